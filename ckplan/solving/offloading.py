"""Plans that may offload: moving is one more way to keep a value.

A value that can move is given a form of no bytes, whose seconds are a share of those
that its copies take, what cannot be hidden beside the ops, and what copies take from
the processor that the ops need. In some tries, only as many
bytes of a layer get that form as the link carries while the layer's forward runs, of
the ops that are slowest for their bytes. The step with these forms is solved like any
other, and replayed with the waits that the link really causes. The cheapest plan is
taken; recomputation alone is among them, so a link that is too slow moves nothing.
Where it was measured with a spread, plans compete at its slowest: the speed of a disk
varies more than that of ops, and a move has to pay on a bad day.

The bound counts moves as free: no schedule of these ops, with any moves, costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding
from ckplan.plan.outputs import storage_of, why_not_moved
from ckplan.plan.region import Region
from ckplan.simulating.moving import Link, is_on_gpu
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.view import MOVED, MovedForm, move_of
from ckplan.solving.baselines import find_repeated_layers
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import budget_within
from ckplan.solving.search import solve_each
from ckplan.solving.solution import Solution

_TRIES = (
    *((0.02, 0.5, False), (0.02, 0.9, False), (0.02, inf, False), (1.0, inf, False)),
    *((0.02, 0.9, True), (0.02, inf, True)),
)
"""Share of the seconds of a copy that ops wait for, most seconds of a layer's copies,
as a multiple of those of its forward, and whether encoded forms move, too."""
_SMALL = 16  # a move of so few times fewer bytes than the largest only takes its place


class MovingPlanner:
    """The plans of one graph that recompute, move, or both."""

    def __init__(self, planner: Planner, link: Link) -> None:
        """Prepare the searches.

        Args:
            planner: Of the graph, which keeps and recomputes.
            link: The way of the copies.

        Raises:
            CkplanError: The step is compiled.
        """
        graph = planner.graph
        if "compiled" in graph.fingerprint:
            raise CkplanError(
                f"cannot plan to offload in the compiled step of '{graph.model}'",
                needed="an uncompiled step: compiled code keeps or recomputes",
                hint="--offload none, or a trace made without --compile",
            )
        layers = find_repeated_layers(graph, planner.menus)
        moving = (Planner(step) for step in _tries(graph, layers, link))
        self.planner = planner
        self._planners = [planner, *moving]
        self._free = Planner(with_moves(graph, Link(inf), encoded=True))
        self._replay = Simulator(graph, link)
        slowest = link.slowest
        self._slowest = None if slowest is None else Simulator(graph, slowest)

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""
        return min(one.floor.peak_bytes for one in self._planners)

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan that fits, as its timeline and its regions."""
        plans = ((one, one.within(budget_bytes)) for one in self._planners)
        found = [self._replayed(one, plan[1]) for one, plan in plans if plan]
        return min(
            (one for one in found if one[0].peak_bytes <= budget_bytes),
            key=lambda one: (self._overhead(one), one[0].peak_bytes),
            default=None,
        )

    def _overhead(self, plan: ReplayedPlan) -> float:
        """What a plan costs where its link is slowest."""
        line, regions = plan
        if self._slowest is None or not line.moves.moved_bytes:
            return line.overhead
        return max(line.overhead, self._slowest.run(regions).overhead)

    def _by_cost(self, limit: MemoryLimit, one: Solution) -> tuple[bool, float, int]:
        """As ``by_cost``, where the link is slowest."""
        misses, _, peak_bytes = by_cost(limit, one)
        return misses, self._overhead((one.timeline, one.regions)), peak_bytes

    def _replayed(self, planner: Planner, regions: Iterable[Region]) -> ReplayedPlan:
        step = planner.graph
        moving = tuple(as_moving(self._replay, step, one) for one in regions)
        return self._replay.run(moving), moving

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit.

        Raises:
            InfeasibleError: No plan found fits; the smallest peak found is named.
        """

        def solved(planner: Planner) -> Solution | None:
            replayed = partial(self._replayed, planner)
            budget_bytes = budget_within(_Replayed(planner, replayed), limit)
            solution = planner.solve(budget_bytes, limit)
            timeline, regions = replayed(solution.regions)
            if timeline.peak_bytes > solution.budget_bytes:
                return None
            return replace(solution, regions=regions, timeline=timeline)

        found = solve_each(self._planners, solved, lambda one: one.floor.peak_bytes)
        best = min(found, key=partial(self._by_cost, limit))
        return replace(
            best,
            unplanned=self.planner.unplanned,
            bound_overhead=self._free.bound(limit.bytes),
            baselines=self.planner.standard_baselines.baselines(limit),
        )


class _Replayed:
    """The plans of a step with forms for moves, with the moves of the step itself."""

    def __init__(
        self,
        planner: Planner,
        replayed: Callable[[Iterable[Region]], ReplayedPlan],
    ) -> None:
        self._planner, self._replayed = planner, replayed
        self.unplanned, self.floor = planner.unplanned, planner.floor

    @property
    def smallest(self) -> ReplayedPlan:
        """The plan that reaches the floor; its moves may need more bytes."""
        return self._replayed(self._planner.smallest[1])

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan within a budget; None if its moves need more bytes."""
        plan = self._planner.within(budget_bytes)
        found = None if plan is None else self._replayed(plan[1])
        return found if found and found[0].peak_bytes <= budget_bytes else None


def by_cost(limit: MemoryLimit, one: Solution) -> tuple[bool, float, int]:
    """Plans that fit a card with its gaps first, then the cheaper ones."""
    line = one.timeline
    return not limit.allows(line), line.overhead, line.peak_bytes


def host_rate(
    graph: Graph, offload: str, gpu: str | None = None, rate: float | None = None
) -> float:
    """Bytes per second between a card and the host, each way.

    Args:
        graph: The step.
        offload: ``"host"``.
        gpu: The card; by default that of the step.
        rate: The rate, if known.

    Raises:
        CkplanError: It is not ``"host"``, the step runs on the CPU, or its card is not
            known.
    """
    gpu = gpu or graph.options.get("gpu")
    if offload != "host":
        what = f"to {offload!r} without the rate of its disk"
        needed = "'host' for a GPU, or the bytes per second that a disk moves"
        hint = "ckplan.solve(graph, '12GiB', spill_rate=ckplan.spill_rate('/tmp'))"
    elif not is_on_gpu(graph):
        what, needed = "to host memory: the step runs there", "a step on a GPU"
        hint = "--offload /tmp, which moves tensors of the CPU to a file"
    elif rate is None and gpu is None:
        what, needed = "to host memory: no card is named", "the rate of its link"
        hint = "--gpu 'RTX 4090', or --spill-rate 25GB"
    else:
        return float(gpus.find(str(gpu)).link) if rate is None else rate
    raise CkplanError(f"cannot plan to offload {what}", needed=needed, hint=hint)


def behind_host(graph: Graph, disk: Link, gpu: str | None = None) -> Link:
    """The way of a GPU's tensors to a file: the slower of its bus and the disk.

    Copies go to pinned memory and on to the file, one after the other both ways. The
    device loses nothing to the processor's part of them.

    Args:
        graph: The step, on a GPU.
        disk: The way from host memory to the file.
        gpu: The card; by default that of the step. The bus of an unknown one is taken
            to be faster than the disk.
    """
    gpu = gpu or graph.options.get("gpu")
    bus = inf if gpu is None else float(gpus.find(str(gpu)).link)

    def slower(link: Link) -> Link:
        return Link(min(link.bytes_per_second, bus), to_file=True)

    slowest = disk.slowest
    return replace(slower(disk), slowest=None if slowest is None else slower(slowest))


def _tries(graph: Graph, layers: Sequence[int], link: Link) -> Iterator[Graph]:
    """The step with forms for moves, for each share and multiple; each step once."""
    seen: set[tuple[Encoding, ...]] = set()
    for share, multiple, encoded in _TRIES:
        step = with_moves(graph, link, share, encoded=encoded)
        step = _hidden(step, layers, multiple, link)
        if step.encodings not in seen:
            seen.add(step.encodings)
            yield step


def _hidden(graph: Graph, layers: Sequence[int], multiple: float, link: Link) -> Graph:
    """The step, in which few values of each layer can move, and no others.

    Args:
        graph: The step with forms for moves.
        layers: Calls.
        multiple: Most seconds of a layer's copies, as a multiple of its forward's.
        link: The way of the copies.
    """
    if multiple == inf or not layers:
        return graph
    kept = [one for one in graph.encodings if one.name != MOVED]
    for layer in layers:
        ops = range(graph.calls[layer].start, graph.calls[layer].stop)
        room = multiple * sum(graph.critical_seconds[op] for op in ops)
        room *= link.bytes_per_second
        moves = [o for o in graph.encodings if o.op in ops and o.name == MOVED]
        least = max((_bytes(graph, one) for one in moves), default=0) // _SMALL
        for one in sorted(moves, key=partial(_seconds_per_byte, graph), reverse=True):
            if least <= _bytes(graph, one) <= room:
                room -= _bytes(graph, one)
                kept.append(one)
    kept.sort(key=lambda one: (one.op, one.output))
    return replace(graph, encodings=tuple(kept))


def _seconds_per_byte(graph: Graph, one: Encoding) -> float:
    return graph.ops[one.op].seconds / _bytes(graph, one)


def _bytes(graph: Graph, one: Encoding) -> int:
    if isinstance(one, MovedForm) and one.small_bytes:
        return one.small_bytes
    return graph.storages[graph.ops[one.op].outputs[one.output]].bytes


def with_moves(
    graph: Graph, link: Link, share: float = 1.0, *, encoded: bool = False
) -> Graph:
    """The step with a form of no bytes for every value that can move.

    Args:
        graph: The step.
        link: The way of the copies.
        share: Of the seconds of the copies that ops wait for.
        encoded: Whether values that have a smaller form move in it.
    """

    def seconds(size: int) -> float:
        return 2 * share * size / link.bytes_per_second + link.busy_seconds(size)

    forms = dict(graph.encoding_of)
    for op, output in movable(graph, range(graph.num_forward)):
        size = graph.storages[graph.ops[op].outputs[output]].bytes
        forms.setdefault((op, output), move_of((op, output), seconds=seconds(size)))
    for place, small in graph.encoding_of.items() if encoded else ():
        if not why_not_moved(graph, *place, small):
            forms[place] = move_of(place, small, seconds(small.bytes))
    return replace(graph, encodings=tuple(forms[place] for place in sorted(forms)))


def movable(graph: Graph, ops: range) -> list[tuple[int, int]]:
    """(op, output) of what can move, wanted or not: the ops that make what stays."""
    last: dict[int, tuple[int, int]] = {}
    for op in ops:
        for output, storage in enumerate(graph.ops[op].outputs):
            makes = graph.storages[storage].maker == op
            makes = makes or storage in graph.ops[op].writes  # else it hands it on
            if makes and not why_not_moved(graph, op, output):
                last[storage] = op, output
    return list(last.values())


def as_moving(simulator: Simulator, step: Graph, region: Region) -> Region:
    """A region of a step with forms for moves, as one of the step itself."""
    moved = frozenset(p for p in region.encode if step.encoding_of[p].name == MOVED)
    if not moved:
        return region
    small = moved & simulator.graph.encoding_of.keys()
    encode = region.encode - moved | small
    whole = {storage_of(step, place) for place in moved - small}
    moved = frozenset(
        place
        for place in moved
        if place not in small or storage_of(step, place) not in whole
    )
    return only_wanted(simulator, replace(region, encode=encode, offload=moved))


def only_wanted(simulator: Simulator, region: Region) -> Region:
    """A region that moves nothing but what backward asks back.

    What it never wants is left out, and what is rebuilt before it is asked for, as its
    op runs again for another output: that would begin to return for nobody.
    """
    view = simulator.view(region.call, region.last)
    wanted, returned = view.wanted(region), view.flow.returned
    kept = (p for p in region.offload if returned[p[0] - view.start][p[1]] in wanted)
    found = replace(region, offload=frozenset(kept))
    if not found.offload:
        return found
    asked = {storage for storage, _ in simulator.effect(found).wants}
    graph = simulator.graph
    kept = (place for place in found.offload if storage_of(graph, place) in asked)
    return replace(found, offload=frozenset(kept))
