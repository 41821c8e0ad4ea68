"""Join plans with graphs: names to calls and ops, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise

from ckplan.errors import PlanError
from ckplan.graph import Graph
from ckplan.names import Call, OpCounter, OpName, expand_calls, fold_calls
from ckplan.plan import Plan, PlannedRegion
from ckplan.simulate import Region

_MAX_LISTED = 5


def resolve(plan: Plan, graph: Graph) -> tuple[Region, ...]:
    """Find the calls and ops that a plan names.

    Args:
        plan: What to recompute, by name.
        graph: The step of its model.

    Returns:
        One region per call, in the order in which the calls begin.

    Raises:
        PlanError: There is no such call, op or output, or regions overlap.
    """
    index_of = _index_of_calls(graph)
    found: list[tuple[Region, PlannedRegion]] = []
    for planned in plan.regions:
        for call in _expand(planned, index_of):
            save = frozenset(_find_saves(graph, index_of[call], planned))
            found.append((Region(index_of[call], planned.by, save), planned))
    found.sort(key=lambda pair: pair[0].call)
    _check_disjoint(graph, found)
    return tuple(region for region, _ in found)


def describe(graph: Graph, regions: Iterable[Region]) -> tuple[PlannedRegion, ...]:
    """Name the calls and ops of regions, as few patterns as folding finds.

    Args:
        graph: The step that the regions belong to.
        regions: Regions on single calls, in any order.

    Returns:
        What ``resolve`` turns into the same regions; the same for any order of them.

    Raises:
        PlanError: No pattern can name a call.
    """
    calls = list(_index_of_calls(graph))
    alike: dict[tuple[str, frozenset[OpName]], tuple[list[Call], list[OpName]]] = {}
    for region in sorted(regions, key=lambda region: region.call):
        assert region.last is None, f"internal error: a plan cannot name {region}"
        save = list(_name_saves(graph, region))
        chosen, _ = alike.setdefault((region.by, frozenset(save)), ([], save))
        chosen.append(calls[region.call])
    return tuple(
        PlannedRegion(pattern, by, tuple(save))
        for (by, _), (chosen, save) in alike.items()
        for pattern in fold_calls(chosen, calls)
    )


def name_ops(graph: Graph, call: int) -> list[OpName]:
    """Return what a region on a call calls its ops, in order; every one has a name."""
    found, counter = graph.calls[call], OpCounter()
    return [
        counter.name(graph.relative_path(op.call, call), op.name)
        for op in graph.ops[found.start : found.stop]
    ]


def _index_of_calls(graph: Graph) -> dict[Call, int]:
    return {(call.fqn, call.number): i for i, call in enumerate(graph.calls)}


def _expand(planned: PlannedRegion, calls: Iterable[Call]) -> tuple[Call, ...]:
    try:
        return expand_calls(planned.calls, calls)
    except PlanError as error:
        raise _at(planned, 0, error) from None


def _find_saves(
    graph: Graph, call: int, planned: PlannedRegion
) -> Iterator[tuple[int, int]]:
    """Yield (op, output) for all that a region on a call saves."""
    if not planned.save:
        return
    start = graph.calls[call].start
    op_of = {name: start + i for i, name in enumerate(name_ops(graph, call))}
    for place, name in enumerate(planned.save, start=1):
        failed = f"cannot save '{name}' in region {planned.calls!r}"
        op = op_of.get(replace(name, output=None))
        if op is None:
            what = f"{failed}: {graph.calls[call]} runs no such op"
            raise _at(planned, place, _no_op(what, name, op_of))
        outputs = range(len(graph.ops[op].outputs))
        if not outputs or name.output not in (None, *outputs):
            what = f"{failed}: in {graph.calls[call]} it has no such output"
            raise _at(planned, place, _no_output(what, outputs))
        for output in outputs if name.output is None else [name.output]:
            yield op, output


def _name_saves(graph: Graph, region: Region) -> Iterator[OpName]:
    """Yield the names of what a region saves, in order of execution."""
    start = graph.calls[region.call].start
    names = name_ops(graph, region.call)
    outputs_of: dict[int, list[int]] = {}
    for op, output in sorted(region.save):
        outputs_of.setdefault(op, []).append(output)
    for op, outputs in outputs_of.items():
        if len(outputs) == len(graph.ops[op].outputs):
            yield names[op - start]
        else:
            yield from (replace(names[op - start], output=m) for m in outputs)


def _check_disjoint(
    graph: Graph, found: Sequence[tuple[Region, PlannedRegion]]
) -> None:
    """Refuse a call inside another one; the calls come parents first."""
    for (outer, one), (inner, other) in pairwise(found):
        if graph.within(inner.call, outer.call):
            name, around = graph.calls[inner.call], graph.calls[outer.call]
            found_twice = f"{name} is in both {one.calls!r} and {other.calls!r}"
            nested = f"{name} ({other.calls!r}) is inside {around} ({one.calls!r})"
            same = inner.call == outer.call
            error = PlanError(
                f"regions overlap: {found_twice if same else nested}",
                needed="regions of which none lies inside another",
                hint="remove one of the two",
            )
            raise _at(other, 0, error)


def _no_op(what: str, name: OpName, ops: Iterable[OpName]) -> PlanError:
    there = list(map(str, ops))
    near = get_close_matches(str(replace(name, output=None)), there, n=_MAX_LISTED)
    listed = near or [*there[:_MAX_LISTED], "..."]
    return PlanError(
        what,
        needed=f"an op of that call, such as {', '.join(listed)}",
        hint=f"did you mean {near[0]!r}?" if near else "leave it out",
    )


def _no_output(what: str, outputs: range) -> PlanError:
    there = ", ".join(f"@{output}" for output in outputs)
    every = "leave '@' and the number out, to save every output"
    return PlanError(
        what,
        needed=there or "an op that returns a tensor",
        hint=every if there else "leave it out",
    )


def _at(planned: PlannedRegion, place: int, error: PlanError) -> PlanError:
    """Add the line of a region's calls (place 0) or of an op it saves (1, ...)."""
    what = ": ".join((*planned.where[place : place + 1], error.what))
    return PlanError(what, needed=error.needed, hint=error.hint)
