"""Parameters and gradients that ranks can divide, grouped by unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ckplan.errors import GraphError, PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.patterns import expand_calls
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS, TensorType
from ckplan.units import in_blocks

ROOT = ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that exists before the step."""

    fqn: str
    bytes: int
    shape: tuple[int, ...]

    def share_bytes(self, num_ranks: int) -> int:
        """Bytes of rank 0's part of dimension 0, padded to equal size on all ranks."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // num_ranks) * (self.bytes // rows) if rows else 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are gathered together, without inner units."""

    fqn: str
    calls: tuple[int, ...]  # in forward order
    parameters: tuple[Parameter, ...]
    gradients: tuple[int, ...]  # storages, in the order in which they are ready


@dataclass(frozen=True)
class State:
    """The parameters and gradients of a step, and its units."""

    graph: Graph
    parameters: tuple[Parameter, ...]
    units: tuple[Unit, ...]  # the whole model is the last
    ready: Mapping[int, int]  # storage of a new gradient -> last op that changes it
    allocated: Callable[[int], int]  # bytes of a tensor -> what the graph counts

    @property
    def gradients(self) -> list[int]:
        """Storages of all new gradients, in the order in which they are ready."""
        return sorted(self.ready, key=lambda gradient: (self.ready[gradient], gradient))

    @cached_property
    def accumulates(self) -> bool:
        """Whether new gradients are added to those of earlier batches."""
        return any(
            storage.kind == "gradient" and storage.maker == BEFORE_STEP
            for storage in self.graph.storages
        )

    def row_shares(self, num_ranks: int) -> Callable[[int], int]:
        """Bytes of a parameter, or of state like it -> of rank 0's part of that.

        Of parameters of equal size, the one with the larger part counts.
        """
        known: dict[int, int] = {}
        for factor in (1, 2, 4):  # state may be of a wider type
            wider: dict[int, int] = {}
            for parameter in self.parameters:
                size = self.allocated(factor * parameter.bytes)
                part = factor * parameter.share_bytes(num_ranks)
                wider[size] = max(part, wider.get(size, 0))
            known = wider | known
        return lambda size: known.get(size, -(-size // num_ranks))


def flat_shares(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Parts of one flat partition; together as large as the padded whole over N."""
    ends = [-(-end // num_ranks) for end in accumulate(sizes, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


def state_of(graph: Graph, patterns: Sequence[str]) -> State:
    """Find parameters, gradients and units.

    Args:
        graph: The step of one process.
        patterns: Patterns of the unit modules; by default, the layers.

    Raises:
        GraphError: The trace does not name its parameters.
        PlanError: A pattern matches no module.
    """
    allocated = _allocation(graph)
    parameters = _parameters(graph, allocated)
    fqns = _units(graph, patterns)
    calls: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(graph.calls):
        calls[call.fqn].append(number)
    ready = _new_gradients(graph)
    owned: dict[str, list[Parameter]] = {fqn: [] for fqn in (*fqns, ROOT)}
    for parameter in parameters:
        owned[_owner(parameter.fqn.rpartition(".")[0], owned)].append(parameter)
    made: dict[str, list[int]] = {fqn: [] for fqn in owned}
    for gradient in sorted(ready, key=lambda found: (ready[found], found)):
        owner = graph.ops[ready[gradient]].call
        fqn = graph.calls[owner].fqn if owner != OUTSIDE_CALLS else ROOT
        made[_owner(fqn, owned)].append(gradient)
    units = tuple(
        Unit(fqn, tuple(calls[fqn]), tuple(owned[fqn]), tuple(made[fqn]))
        for fqn in owned
        if fqn == ROOT or owned[fqn]
    )
    return State(graph, parameters, units, ready, allocated)


def _owner(fqn: str, units: Mapping[str, object]) -> str:
    """The innermost unit that contains a module."""
    while fqn not in units:
        fqn = fqn.rpartition(".")[0]
    return fqn


def _units(graph: Graph, patterns: Sequence[str]) -> list[str]:
    if not patterns:
        return _layers(graph)
    known = [(call.fqn, call.number) for call in graph.calls]
    found: dict[str, None] = {}
    for pattern in patterns:
        if "#" in pattern:
            raise PlanError(
                f"cannot gather the unit {pattern!r}: it names single calls",
                needed="modules, whose calls all use the same parameters",
                hint=f"--unit '{pattern.partition('#')[0]}'",
            )
        found |= dict.fromkeys(fqn for fqn, _ in expand_calls(pattern, known))
    found.pop(ROOT, None)  # a unit anyway
    return list(found)


def _layers(graph: Graph) -> list[str]:
    """Modules in numbered lists with others of their type, the outermost."""
    found: dict[str, None] = {}
    for children in graph.children.values():
        alike: dict[tuple[str, str], set[str]] = defaultdict(set)
        for child in children:
            call = graph.calls[child]
            place, _, number = call.fqn.rpartition(".")
            if number.isdigit():
                alike[place, call.module].add(call.fqn)
        for fqns in alike.values():
            if len(fqns) > 1:
                found |= dict.fromkeys(fqns)
    return [
        fqn
        for fqn in dict.fromkeys(call.fqn for call in graph.calls)
        if fqn in found
        and not any(fqn.startswith(f"{other}.") for other in found if other != fqn)
    ]


def _allocation(graph: Graph) -> Callable[[int], int]:
    """Bytes of a tensor as the graph counts them: on a GPU, in blocks."""
    sizes = {storage.bytes for storage in graph.storages}
    return in_blocks if sizes == set(map(in_blocks, sizes)) else int


def _parameters(graph: Graph, allocated: Callable[[int], int]) -> tuple[Parameter, ...]:
    """Join the parameters' storages, in order, with the names in the fingerprint."""
    named = graph.fingerprint.get("parameters")
    sizes = [
        storage.bytes
        for storage in graph.storages
        if storage.kind == "parameter" and storage.maker == BEFORE_STEP
    ]
    found: list[Parameter] = []
    for fqn, text in named.items() if isinstance(named, Mapping) else ():
        one = TensorType.parse(str(text))
        # One that is no more than a view of another has no storage of its own.
        if one and sizes[len(found) : len(found) + 1] == [allocated(one.bytes)]:
            found.append(Parameter(str(fqn), one.bytes, one.shape))
    if len(found) != len(sizes):
        raise GraphError(
            "cannot shard the trace: it does not say which parameters it has",
            needed=f"a fingerprint that names {len(sizes)} parameters and their shapes",
            hint="run `ckplan profile` again",
        )
    return tuple(found)


def _new_gradients(graph: Graph) -> dict[int, int]:
    """New gradients of parameters and the last op of backward that changes each.

    Where gradients accumulate, what is added to them is new.
    """
    kept = {s for s, found in enumerate(graph.storages) if found.kind == "gradient"}
    old = {s for s in kept if graph.storages[s].maker == BEFORE_STEP}
    new = kept - old
    ready: dict[int, int] = {}
    for number in range(graph.num_forward, graph.backward_stop):
        op = graph.ops[number]
        if old.intersection(op.writes):
            ready |= {s: number for s in op.reads if s not in old and s in ready}
            new.update(s for s in op.reads if graph.storages[s].maker != BEFORE_STEP)
            ready |= {s: number for s in op.reads if s in new}
        ready |= {s: number for s in (*op.writes, *op.outputs) if s in new}
    return ready
