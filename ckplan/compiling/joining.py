"""The graphs of one step as one ``Graph``, so that one solve plans all of them.

Forward runs the graphs in their order, backward in reverse. A graph may run several
times. What it returns stays alive to the end of the step, so a later graph reads it as
it is, and no region of one graph reaches into another. What runs between graphs is not
recorded: the bytes that it saves are alive all the time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckplan.compiling.costs import COSTS
from ckplan.compiling.graph import CompiledStep
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Call, Op, Saved, Storage
from ckplan.plan.region import Region


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a compiled graph in forward."""

    key: str  # of the graph
    inputs: tuple[int, ...] = ()  # a number for the storage of each; 0: no tensor
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class JoinedStep:
    """A step of several compiled graphs as one ``Graph``."""

    graph: Graph
    starts: tuple[tuple[int, int], ...]  # first call and first op of every run

    def joined(self, regions: Sequence[Iterable[Region]]) -> tuple[Region, ...]:
        """Regions of the step, from those of each run."""
        pairs = zip(self.starts, regions, strict=True)
        return tuple(one.moved(*start) for start, some in pairs for one in some)

    def divided(self, regions: Iterable[Region]) -> list[tuple[Region, ...]]:
        """Regions of each run, from those of the step."""
        found: list[list[Region]] = [[] for _ in self.starts]
        for one in regions:
            run = sum(call <= one.call for call, _ in self.starts) - 1
            first_call, first_op = self.starts[run]
            found[run].append(one.moved(-first_call, -first_op))
        return [tuple(some) for some in found]


def join(
    runs: Sequence[Run],
    steps: Mapping[str, CompiledStep],
    uncompiled_bytes: int,
    model: str = "model",
) -> JoinedStep:
    """Join the graphs of a step.

    Args:
        runs: Of graphs, in the order of forward.
        steps: By key of a graph.
        uncompiled_bytes: That are alive beside what the graphs read and make.
        model: Name of the model.
    """
    joiner = _Joiner(runs, steps)
    for place in range(len(runs)):
        joiner.add(place)
    if uncompiled_bytes > 0:
        everything = Storage(uncompiled_bytes, "buffer", BEFORE_STEP, joiner.stop)
        joiner.storages.append(everything)
    first = steps[runs[0].key].graph
    digests = "".join(str(steps[r.key].graph.fingerprint["compiled"]) for r in runs)
    digest = hashlib.sha256(digests.encode()).hexdigest()[:16]
    num_forward = len(joiner.forward)
    graph = Graph(
        model=model,
        fingerprint={
            **first.fingerprint,
            "compiled": f"{digest} in {len(runs)} graphs",
        },
        ops=(*joiner.forward, *joiner.backward),
        storages=tuple(joiner.storages),
        saved=tuple(sorted(joiner.saved, key=lambda one: one.packed_at)),
        calls=tuple(joiner.calls),
        num_forward=num_forward,
        num_backward=len(joiner.backward),
        costs=COSTS,
    )
    return JoinedStep(graph, tuple(joiner.starts))


class _Joiner:
    """Appends runs, and numbers their ops, storages and calls anew."""

    def __init__(self, runs: Sequence[Run], steps: Mapping[str, CompiledStep]) -> None:
        self._runs = runs
        self._steps = [steps[run.key] for run in runs]
        graphs = [one.graph for one in self._steps]
        self._first = [*accumulate((g.num_forward for g in graphs), initial=0)]
        ends = [*accumulate((g.num_backward for g in reversed(graphs)), initial=0)]
        before = [self._first[-1] + end for end in ends]
        self._backward = before[-2::-1]  # first op of backward of every run
        self.stop = before[-1]
        self.forward: list[Op] = []
        self.backward: list[Op] = []
        self.storages: list[Storage] = []
        self.saved: list[Saved] = []
        self.calls: list[Call] = []
        self.starts: list[tuple[int, int]] = []
        self._times = Counter[str]()
        self._known: dict[int, int] = {}  # storage of a tensor -> its number here

    def add(self, place: int) -> None:
        """Append one run."""
        graph = self._steps[place].graph
        first_call, first_op = len(self.calls), len(self.forward)
        self.starts.append((first_call, first_op))
        number = self._number(place)
        for one in graph.calls:
            parent = one.parent if one.parent < 0 else one.parent + first_call
            times = one.number + self._times[one.fqn]
            moved = (one.start + first_op, one.stop + first_op)
            self.calls.append(Call(one.fqn, times, parent, *moved, one.module))
        self._times.update(one.fqn for one in graph.calls)
        ops = [
            replace(
                op,
                call=op.call + first_call,
                reads=tuple(number[s] for s in op.reads),
                writes=tuple(number[s] for s in op.writes),
                outputs=tuple(number[s] for s in op.outputs),
            )
            for op in graph.ops
        ]
        self.forward += ops[: graph.num_forward]
        self.backward[:0] = ops[graph.num_forward :]
        for saved in graph.saved:
            self.saved.append(
                Saved(
                    number[saved.storage],
                    saved.call + first_call,
                    saved.packed_at + first_op,
                    self._moment(place, saved.unpacked_at),
                    self._moment(place, saved.last_held),
                    self._moment(place, saved.last_used),
                )
            )

    def _number(self, place: int) -> list[int]:
        """The number here of each storage of a run's graph."""
        step, run = self._steps[place], self._runs[place]
        found = []
        for index, one in enumerate(step.graph.storages):
            position = step.inputs.get(index)
            given = 0 if position is None else run.inputs[position]
            if given not in self._known:
                self.storages.append(self._moved(place, index, one))
                new = len(self.storages) - 1
                if given:
                    self._known[given] = new
                found.append(new)
            else:
                found.append(self._known[given])
        pairs = zip(reversed(step.outputs), reversed(run.outputs), strict=False)
        for storage, made in pairs:  # before them come inputs that forward changes
            if storage is not None and made:
                self._known.setdefault(made, found[storage])
        return found

    def _moved(self, place: int, index: int, one: Storage) -> Storage:
        maker, last = (self._moment(place, at) for at in (one.maker, one.last))
        num_bytes, kind = one.bytes, one.kind
        is_last = place == len(self._runs) - 1
        if kind == "gradient" and maker == BEFORE_STEP and not is_last:
            num_bytes = 0  # the gradient that the next run makes
        position = self._steps[place].gradients.get(index)
        if position is not None and self._is_made(place, position):
            kind, before = "temporary", place - 1
            last = self._backward[before] + self._steps[before].graph.num_backward - 1
        return replace(one, bytes=num_bytes, kind=kind, maker=maker, last=last)

    def _is_made(self, place: int, position: int) -> bool:
        """Whether an earlier run returned this input."""
        given = self._runs[place].inputs[position]
        return any(given in run.outputs for run in self._runs[:place])

    def _moment(self, place: int, moment: int) -> int:
        graph = self._steps[place].graph
        if moment < 0:
            return moment
        if moment >= len(graph.ops):
            return self.stop
        beyond = moment - graph.num_forward
        if beyond < 0:
            return self._first[place] + moment
        return self._backward[place] + beyond
