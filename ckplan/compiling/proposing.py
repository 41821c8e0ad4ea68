"""Plans that the solver proposes for compiled code, and estimates of what they cost.

The simulator knows the ops of the joint graph, but neither kernels nor the buffers that
Inductor reuses, so proposals are many, and what counts is a replay: ``search.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.cuts import Cuts
from ckplan.compiling.estimating import Estimates
from ckplan.compiling.graph import CompiledStep
from ckplan.compiling.handing import bytes_handed
from ckplan.compiling.layouts import convolutions_to_save, saving
from ckplan.compiling.masks import becomes_bits, saved_bytes
from ckplan.compiling.partition import JointGraph, Saved
from ckplan.compiling.saved_values import flat, saved_by
from ckplan.compiling.side_by_side import shared_out
from ckplan.gpus import Gpu
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.solving.planner import Planner

CANDIDATES = 32
"""Budgets, evenly spaced, for which the solver proposes a plan."""
NEAR_FLOOR = 8
"""So many parts has the gap between the two smallest, and so many gaps from there on
have three each: there, the solver nests regions, which are flattened, so a plan without
them is often smaller, and replayed peaks of neighbours are far apart."""
TORCH_BUDGETS = (0.75, 0.5, 0.25, 0.0)
"""Values of torch's ``activation_memory_budget``: what they save is a candidate."""
WAYS = ("every layer", "everything", *(f"torch, {one:g}" for one in TORCH_BUDGETS))
"""Candidates whatever their simulated bytes, since ``compare`` shows them."""
_MOST_DOMINATED = 1.1
"""A candidate whose simulated peak exceeds that of a cheaper one by more than this
factor is left out. Replayed peaks of nearly equal ones may be in another order."""
_FEWER = 0.99
"""Of the bytes that a plan saves: with more, another is not worth a replay."""
_MOST_AT_ONCE = 1.25
"""Of the simulated peak of a plan; one region around all is simulated some 15 % above
what is replayed, and more than this where layers are made of all before them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that the solver proposes."""

    regions: tuple[Region, ...]
    simulated_peak_bytes: int
    overhead: float  # estimated for its division, as a fraction of the unplanned step
    saved: Saved
    saved_bytes: int  # of these, at least

    @property
    def size_bytes(self) -> int:
        """What tells best which of two replays at more.

        Of 244 pairs of plans for layers that cost nearly the same, it is wrong about 5,
        simulated peaks alone about 7, and saved bytes alone about 8.
        """
        return self.simulated_peak_bytes + self.saved_bytes


class Proposer:
    """Proposes plans for one compiled step. What they cost is estimated once."""

    def __init__(
        self, joint: JointGraph, step: CompiledStep, card: Gpu | None = None
    ) -> None:
        """Propose nothing yet.

        Args:
            joint: The joint graph, divided as torch does.
            step: The same as a ``Graph``.
            card: That the step is for; None: the CPU.
        """
        self._joint = joint
        self._step = step
        self.estimates = Estimates(joint, step, card)
        self._as_bits = card is None  # masks that a plan saves
        self._saved_bytes: dict[Saved, int] = {}

    @cached_property
    def planner(self) -> Planner:
        """The solver of the step's ``Graph``, with masks as a plan saves them."""
        return Planner(self._with_bits(self._step.graph))

    @cached_property
    def ways(self) -> Mapping[str, Candidate]:
        """Those of ``WAYS`` that the step has, by name."""
        layers = [one for _, one in self.planner.standard_baselines.every_call]
        found = dict(zip(WAYS, (*(layers or [()]), (Region(0),)), strict=False))
        saved = shared_out(self._joint.saved_by_torch, TORCH_BUDGETS)
        found |= zip(WAYS[2:], map(self._saving, saved), strict=True)
        found = {name: some for name, some in found.items() if some}
        return dict(zip(found, self._candidates(found.values()), strict=True))

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The cheapest first; the dearer they are, the less they are simulated to take.

        That holds of the solver's own plans, and of those with fewer bytes: of one plan
        of each, simulated peaks do not tell whose replayed one is higher. Torch's own
        choice and all ways are among them.
        """
        ways = {one.saved: one for one in (self.candidate(()), *self.ways.values())}
        own = self._proposed()
        found = dict[Saved, Candidate]()
        for some in (own, self._with_fewer_bytes(own)):
            smallest = float("inf")
            for one in sorted(some, key=_cheapest_first):
                if one.simulated_peak_bytes <= _MOST_DOMINATED * smallest:
                    found.setdefault(one.saved, one)
                smallest = min(smallest, one.simulated_peak_bytes)
        return tuple(sorted({**found, **ways}.values(), key=_cheapest_first))

    def _candidates(self, plans: Iterable[Sequence[Region]]) -> list[Candidate]:
        """The candidates that are made of plans; their costs are estimated together."""
        listed = [tuple(map(flat, regions)) for regions in plans]
        self.estimates.learn(map(self._saved_by, listed))
        return [*map(self.candidate, listed)]

    def candidate(self, regions: Sequence[Region]) -> Candidate:
        """What compiled code can have of a plan for single ops: nothing nested."""
        found = tuple(map(flat, regions))
        saved = self._saved_by(found)
        return Candidate(
            found,
            self.planner.simulator.run(found).peak_bytes,
            self.estimates.overhead_of(saved),
            saved,
            self._bytes_saved(saved),
        )

    def saving(self, names: Collection[str]) -> Candidate:
        """A plan that saves nodes by name, and all that is made of them."""
        return self.candidate(self._saving(names))

    def _saved_by(self, regions: Sequence[Region]) -> Saved:
        """What forward saves under flat regions."""
        simulator = self.planner.simulator
        return saved_by(self._step, simulator, regions) if regions else None

    def least_overhead(self, saved_bytes: int) -> float:
        """Contractions that run again at least, as a fraction of the unplanned step.

        Less what it saves to keep all masks of that as bits.

        Args:
            saved_bytes: Most bytes that forward saves.
        """
        again = self._cuts.seconds_at_least(saved_bytes) / self.estimates.own_seconds
        if not self._as_bits:
            return again
        return again + min(self.estimates.overhead_of(self._saved_by_torch), 0.0)

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self._joint, self.estimates.again, self._bytes_of)

    def _proposed(self) -> list[Candidate]:
        """Torch's own choice, and the solver's plans."""
        return self._candidates(self._proposed_regions())

    def _proposed_regions(self) -> Iterator[tuple[Region, ...]]:
        planner = self.planner
        yield ()
        if planner.graph.storages != self._step.graph.storages:  # with masks as bits
            yield self._saving(self._saved_by_torch)
        ends = planner.floor.peak_bytes, planner.unplanned.peak_bytes
        for budget_bytes in budgets_to_try(*ends):
            for solver in (planner, self._fused_planner):
                plan = solver.within(budget_bytes)
                if plan is not None and plan[1]:
                    yield saving(self._step, plan[1], self._to_save)

    def _with_fewer_bytes(self, own: Sequence[Candidate]) -> list[Candidate]:
        """Those that can run the same contractions again with fewer bytes saved.

        Where masks are bits, all of them are saved: to draw one again takes longer than
        its bits are worth, but for the smallest plan. Where what is computed from these
        is simulated to take far more at once, a layer may have to be made of all before
        it.
        """
        planned = {one.saved: one for one in own if one.regions}.values()
        smallest = min(planned, key=lambda one: one.simulated_peak_bytes, default=None)
        tries = [
            (one, self._narrowed(one.saved, draws_again))
            for one in planned
            for draws_again in sorted({not self._as_bits, one is smallest})
        ]
        self.estimates.learn(names for _, names in tries)
        return self._candidates(
            regions
            for one, names in tries
            if self._bytes_saved(names) < _FEWER * one.saved_bytes
            or self.estimates.overhead_of(names) < one.overhead
            for regions in [self._saving(names)]
            if self.planner.simulator.run(regions).peak_bytes
            <= _MOST_AT_ONCE * one.simulated_peak_bytes
        )

    def _narrowed(self, saved: Saved, draws_again: bool) -> frozenset[str]:
        assert saved is not None
        found = narrowed(self._step, self._cuts, saved, draws_again)
        return found | self._to_save

    def _saving(self, names: Collection[str]) -> tuple[Region, ...]:
        return saving_nodes(self._step, self._joint, names, Region(0))

    @cached_property
    def _to_save(self) -> frozenset[str]:
        """Nodes that every plan of the solver saves."""
        return convolutions_to_save(self._joint, self._step.kernel_bytes or {})

    @cached_property
    def _fused_planner(self) -> Planner:
        return Planner(self._with_bits(fused(self._step)))

    def _with_bits(self, graph: Graph) -> Graph:
        """The graph with the bytes that masks have where a plan saves them."""
        if not self._as_bits:
            return graph
        masks = {
            node.name: saved_bytes(node)
            for node in self._joint.module.graph.nodes
            if becomes_bits(node)
        }
        storages = [*graph.storages]
        for number, name in self._step.name_of.items():
            if name in masks:
                storages[number] = replace(storages[number], bytes=masks[name])
        return replace(graph, storages=tuple(storages))

    @cached_property
    def _saved_by_torch(self) -> frozenset[str]:
        """Names of what forward saves without a plan."""
        inputs = self._joint.backward.graph.find_nodes(op="placeholder")
        return frozenset(one.name for one in inputs)

    def _bytes_of(self, node: fx.Node) -> int:
        """What a node takes that forward saves under a plan."""
        return saved_bytes(node) if self._as_bits else nodes.num_bytes(node)

    def _bytes_saved(self, saved: Saved) -> int:
        if saved not in self._saved_bytes:
            names = self._saved_by_torch if saved is None else saved
            graph = self._joint.module.graph
            self._saved_bytes[saved] = bytes_handed(graph, names, self._bytes_of)
        return self._saved_bytes[saved]


def fused(step: CompiledStep) -> Graph:
    """A step whose ops take what they add to backward, whose kernels they join."""
    graph = step.graph
    ops = (
        replace(op, seconds=seconds, launch_seconds=launch)
        for op, (seconds, launch) in zip(graph.ops, step.rebuilt, strict=True)
    )
    return replace(graph, ops=tuple(ops))


def saving_nodes(
    step: CompiledStep, joint: JointGraph, names: Collection[str], whole: Region
) -> tuple[Region, ...]:
    """All of forward as one region, ``whole``, that saves the storages of nodes."""
    every = joint.module.graph.nodes
    made = frozenset(nodes.base_of(one).name for one in every if one.name in names)
    return saving(step, (whole,), made)


def narrowed(
    step: CompiledStep, cuts: Cuts, saved: frozenset[str], draws_again: bool = True
) -> frozenset[str]:
    """Nodes of fewest bytes that spare the same contractions, and that plans can name.

    The solver decides about one tensor after the other; that a third, of which both are
    made, is enough, it need not see.
    """
    return cuts.narrowed(saved, {*step.name_of.values()}, draws_again)


def budgets_to_try(low: int, high: int) -> Iterator[int]:
    """Budgets for the solver: evenly spaced, and closer near the floor."""
    parts = CANDIDATES - 1
    for place in range(CANDIDATES):
        yield low + (high - low) * place // parts
    for place in range(1, NEAR_FLOOR):
        yield low + (high - low) * place // (parts * NEAR_FLOOR)
    for place in range(3, 3 * NEAR_FLOOR):
        yield low + (high - low) * place // (3 * parts)


def _cheapest_first(one: Candidate) -> tuple[float, bool, int]:
    """Of those that cost the same, torch's own choice, then those that take more."""
    return one.overhead, bool(one.regions), -one.size_bytes
