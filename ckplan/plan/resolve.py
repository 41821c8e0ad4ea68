"""Translate the names in a plan to calls and ops of a graph, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ckplan.errors import PlanError
from ckplan.graph.fqn import Call, call_name
from ckplan.graph.graph import Graph
from ckplan.graph.patterns import expand_calls, fold_calls
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.hazards import refuse_hazards
from ckplan.plan.names import OpName
from ckplan.plan.outputs import find_outputs, name_ops
from ckplan.plan.plan import COMPILED, EAGER, Plan, PlannedRegion
from ckplan.plan.region import Region


def resolve(plan: Plan, graph: Graph) -> tuple[Region, ...]:
    """Find the calls and ops that a plan names, for the code that the graph is of.

    Args:
        plan: What to recompute, by name.
        graph: The step of its model.

    Returns:
        One region per call, in the order in which the calls begin.

    Raises:
        PlanError: A call, op or output does not exist, or regions overlap.
    """
    index_of = _index_of_calls(graph)
    found: list[tuple[Region, PlannedRegion]] = []
    code = COMPILED if "compiled" in graph.fingerprint else EAGER
    for planned in plan.regions:
        if (planned.code or code) != code:
            continue
        found += _regions(graph, planned, index_of)
    return _in_call_order(graph, found)


def _regions(
    graph: Graph, planned: PlannedRegion, index_of: Mapping[Call, int]
) -> Iterator[tuple[Region, PlannedRegion]]:
    """The regions of one entry of a plan, with the regions inside them."""
    inside = [pair for one in planned.inner for pair in _regions(graph, one, index_of)]
    used: set[Region] = set()
    for call, last in _call_spans(graph, planned, index_of):
        outputs = find_outputs(graph, call, last, planned)
        inner_pairs = [
            (inner, one)
            for inner, one in inside
            if (inner.call, inner.last) != (call, last)
            and graph.is_inside(inner.call, call, last)
            and graph.is_inside(inner.last or inner.call, call, last)
        ]
        used.update(inner for inner, _ in inner_pairs)
        inner = _in_call_order(graph, inner_pairs)
        region = Region(
            *(call, planned.by, outputs.save, last, outputs.encode),
            *(inner, planned.tiles, outputs.offload),
        )
        planned.check(refuse_hazards, graph, region)
        yield region, planned
    for inner_region, one in inside:
        if inner_region not in used:
            error = PlanError(
                f"{graph.calls[inner_region.call]} is not inside {planned.title!r}",
                needed="calls that run inside the outer region",
                hint="move it to the regions of the plan",
            )
            raise one.located(error)


def _in_call_order(
    graph: Graph, found: Iterable[tuple[Region, PlannedRegion]]
) -> tuple[Region, ...]:
    """Regions in the order of their calls; raises if two overlap."""
    pairs = sorted(found, key=lambda pair: pair[0].call)
    _check_disjoint(graph, pairs)
    return tuple(region for region, _ in pairs)


def describe(graph: Graph, regions: Iterable[Region]) -> tuple[PlannedRegion, ...]:
    """Name the calls and ops of regions, with few patterns.

    Args:
        graph: The step that the regions belong to.
        regions: In any order.

    Returns:
        Entries that ``resolve`` turns into the same regions. They do not depend on the
        order of ``regions``.

    Raises:
        PlanError: No pattern can name a call.
    """
    calls = list(_index_of_calls(graph))
    alike: dict[Hashable, list[Region]] = {}
    planned: list[PlannedRegion] = []
    runs: list[PlannedRegion] = []
    for region in sorted(regions, key=lambda region: region.call):
        names = _names_in(graph, region)
        save = tuple(_name_outputs(graph, names, region.save))
        encode = tuple(_name_encodings(graph, names, region.encode))
        offload = tuple(_name_outputs(graph, names, region.offload))
        ops = save, encode, ()
        if region.last is not None:
            first, last = (_name_call(graph, c) for c in (region.call, region.last))
            inner = describe(graph, region.inner)
            one = PlannedRegion(
                *("", region.by, *ops, (first, last), inner), offload=offload
            )
            runs.append(one)
            continue
        like = (
            region.by,
            frozenset(save),
            frozenset(encode),
            _inner_structure(graph, region),
            region.tiles,
            frozenset(offload),
        )
        if like not in alike:
            one = PlannedRegion(
                *("", region.by, *ops), tiles=region.tiles, offload=offload
            )
            planned.append(one)
        alike.setdefault(like, []).append(region)
    folded = (
        replace(one, calls=pattern, inner=_describe_inner(graph, pattern, chosen))
        for one, chosen in zip(planned, alike.values(), strict=True)
        for pattern in fold_calls([calls[region.call] for region in chosen], calls)
    )
    return (*folded, *runs)


def _inner_structure(graph: Graph, region: Region) -> Hashable:
    """The inner regions in relative terms: equal for regions that do the same."""
    start = graph.calls[region.call].start
    return tuple(
        (
            graph.calls[one.call].start - start,
            graph.calls[one.call if one.last is None else one.last].stop - start,
            graph.relative_path(one.call, region.call),
            frozenset(_name_outputs(graph, _names_in(graph, one), one.save)),
            _inner_structure(graph, one),
        )
        for one in region.inner
    )


def _describe_inner(
    graph: Graph, pattern: str, alike: Sequence[Region]
) -> tuple[PlannedRegion, ...]:
    """Describe the inner regions of the regions that a pattern matches."""
    named = set(expand_calls(pattern, _index_of_calls(graph)))
    inner = (
        one
        for region in alike
        if (graph.calls[region.call].fqn, graph.calls[region.call].number) in named
        for one in region.inner
    )
    return describe(graph, inner)


def _index_of_calls(graph: Graph) -> dict[Call, int]:
    return {(call.fqn, call.number): i for i, call in enumerate(graph.calls)}


def _call_spans(
    graph: Graph, planned: PlannedRegion, index_of: Mapping[Call, int]
) -> list[tuple[int, int | None]]:
    """(first, last) call of every region of an entry; last is None for one call."""
    if planned.run is None:
        return [(index_of[call], None) for call in _expand(planned, index_of)]
    first, last = (_find_run_end(planned, name, index_of) for name in planned.run)
    one, other = graph.calls[first], graph.calls[last]
    if one.parent != other.parent or one.parent == OUTSIDE_CALLS or first >= last:
        error = PlanError(
            f"cannot make one region of {planned.title}",
            needed="two calls with the same parent module, in order of execution",
            hint="run: [transformer.h.0, transformer.h.3]",
        )
        raise planned.located(error)
    return [(first, last)]


def _find_run_end(
    planned: PlannedRegion, name: str, index_of: Mapping[Call, int]
) -> int:
    try:
        found = expand_calls(name, index_of)
    except PlanError as error:
        raise planned.located(error) from None
    if len(found) != 1:
        ambiguous = PlanError(
            f"cannot tell which call of {name} is meant: it runs {len(found)} times",
            needed=f"one of {', '.join(call_name(*call) for call in found[:3])}, ...",
            hint=f"run: [{call_name(*found[0])}, ...]",
        )
        raise planned.located(ambiguous)
    return index_of[found[0]]


def _name_call(graph: Graph, call: int) -> str:
    found = graph.calls[call]
    once = sum(other.fqn == found.fqn for other in graph.calls) == 1
    return (found.fqn or ".") if once else call_name(found.fqn, found.number)


def _expand(planned: PlannedRegion, calls: Iterable[Call]) -> tuple[Call, ...]:
    try:
        return expand_calls(planned.calls, calls)
    except PlanError as error:
        raise planned.located(error) from None


def _names_in(graph: Graph, region: Region) -> Mapping[int, OpName]:
    """Op -> its name in the region; empty if the region names nothing."""
    if not (region.save or region.encode or region.offload):
        return {}
    names = name_ops(graph, region.call, region.last)
    return dict(enumerate(names, graph.calls[region.call].start))


def _name_outputs(
    graph: Graph, names: Mapping[int, OpName], outputs: Iterable[tuple[int, int]]
) -> Iterator[OpName]:
    """Yield the names of outputs, in order of execution."""
    outputs_of: dict[int, list[int]] = {}
    for op, output in sorted(outputs):
        outputs_of.setdefault(op, []).append(output)
    for op, found in outputs_of.items():
        if len(found) == len(graph.ops[op].outputs):
            yield names[op]
        else:
            yield from (replace(names[op], output=m) for m in found)


def _name_encodings(
    graph: Graph, names: Mapping[int, OpName], outputs: Iterable[tuple[int, int]]
) -> Iterator[tuple[OpName, str]]:
    for place in sorted(outputs):
        (name,) = _name_outputs(graph, names, [place])
        yield name, graph.encoding_of[place].name


def _check_disjoint(
    graph: Graph, found: Sequence[tuple[Region, PlannedRegion]]
) -> None:
    """Refuse overlapping regions; ``found`` has parent calls first."""
    for (outer, one), (inner, other) in pairwise(found):
        last = outer.call if outer.last is None else outer.last
        inside = graph.is_within(inner.call, outer.call)
        if inside or graph.calls[inner.call].start < graph.calls[last].stop:
            name, around = graph.calls[inner.call], graph.calls[outer.call]
            found_twice = f"{name} is in both {one.title!r} and {other.title!r}"
            nested = f"{name} ({other.title!r}) is inside {around} ({one.title!r})"
            same = inner.call == outer.call or not inside
            error = PlanError(
                f"regions overlap: {found_twice if same else nested}",
                needed="regions that do not overlap",
                hint="remove one of the two",
            )
            raise other.located(error)
