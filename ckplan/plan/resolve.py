"""Translate the names in a plan to calls and ops of a graph, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.graph.fqn import Call, call_name
from ckplan.graph.graph import Graph
from ckplan.graph.patterns import expand_calls, fold_calls
from ckplan.graph.records import OUTSIDE_CALLS, Encoding
from ckplan.plan.hazards import refuse_hazards
from ckplan.plan.names import OpCounter, OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import Region

_MAX_LISTED = 5
_Outputs: TypeAlias = frozenset[tuple[int, int]]
"""(op, output) of each."""


def resolve(plan: Plan, graph: Graph) -> tuple[Region, ...]:
    """Find the calls and ops that a plan names.

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
    for planned in plan.regions:
        found += _regions(graph, planned, index_of)
    return _in_call_order(graph, found)


def _regions(
    graph: Graph, planned: PlannedRegion, index_of: Mapping[Call, int]
) -> Iterator[tuple[Region, PlannedRegion]]:
    """The regions of one entry of a plan, with the regions inside them."""
    inside = [pair for one in planned.inner for pair in _regions(graph, one, index_of)]
    used: set[Region] = set()
    for call, last in _call_spans(graph, planned, index_of):
        save, encode = _find_outputs(graph, call, last, planned)
        inner_pairs = [
            (inner, one)
            for inner, one in inside
            if (inner.call, inner.last) != (call, last)
            and graph.is_inside(inner.call, call, last)
            and graph.is_inside(inner.last or inner.call, call, last)
        ]
        used.update(inner for inner, _ in inner_pairs)
        inner = _in_call_order(graph, inner_pairs)
        region = Region(call, planned.by, save, last, encode, inner, planned.tiles)
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
        if region.last is not None:
            first, last = (_name_call(graph, c) for c in (region.call, region.last))
            inner = describe(graph, region.inner)
            one = PlannedRegion("", region.by, save, encode, (), (first, last), inner)
            runs.append(one)
            continue
        like = (
            region.by,
            frozenset(save),
            frozenset(encode),
            _inner_structure(graph, region),
            region.tiles,
        )
        if like not in alike:
            one = PlannedRegion("", region.by, save, encode, tiles=region.tiles)
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


def name_ops(graph: Graph, call: int, last: int | None = None) -> list[OpName]:
    """Return the names of a region's ops, in execution order.

    Paths are relative to the call or, for a run of calls, to their parent.
    """
    found, counter = graph.calls[call], OpCounter()
    top = call if last is None else found.parent
    stop = graph.calls[call if last is None else last].stop
    return [
        counter.name(graph.relative_path(op.call, top), op.name)
        for op in graph.ops[found.start : stop]
    ]


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


def _find_outputs(
    graph: Graph, call: int, last: int | None, planned: PlannedRegion
) -> tuple[_Outputs, _Outputs]:
    """(op, output) of the outputs that a region saves, and of those it encodes."""
    if not (planned.save or planned.encode):
        return frozenset(), frozenset()
    start = graph.calls[call].start
    op_of = {name: start + i for i, name in enumerate(name_ops(graph, call, last))}

    def find(place: int, word: str, name: OpName) -> Iterator[tuple[int, int]]:
        failed = f"cannot {word} '{name}' in region {planned.title!r}"
        op = op_of.get(replace(name, output=None))
        if op is None:
            what = f"{failed}: {graph.calls[call]} runs no such op"
            raise planned.located(_no_op(what, name, op_of), place)
        outputs = range(len(graph.ops[op].outputs))
        if not outputs or name.output not in (None, *outputs):
            what = f"{failed}: in {graph.calls[call]} it has no such output"
            raise planned.located(_no_output(what, outputs), place)
        yield from (
            (op, m) for m in (outputs if name.output is None else [name.output])
        )

    save: set[tuple[int, int]] = set()
    encode: set[tuple[int, int]] = set()
    for place, name in enumerate(planned.save, start=1):
        save.update(find(place, "save", name))
    for place, (name, form) in enumerate(planned.encode, start=1 + len(planned.save)):
        for output in find(place, "encode", name):
            known = graph.encoding_of.get(output)
            if known is None or known.name != form or output in save:
                error = _no_encoding(planned, name, form, known)
                raise planned.located(error, place)
            encode.add(output)
    return frozenset(save), frozenset(encode)


def _names_in(graph: Graph, region: Region) -> Mapping[int, OpName]:
    """Op -> its name in the region; empty if the region saves and encodes nothing."""
    if not (region.save or region.encode):
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


def _no_op(what: str, name: OpName, ops: Iterable[OpName]) -> PlanError:
    there = list(map(str, ops))
    near = get_close_matches(str(replace(name, output=None)), there, n=_MAX_LISTED)
    listed = near or [*there[:_MAX_LISTED], "..."]
    return PlanError(
        what,
        needed=f"an op of that call, such as {', '.join(listed)}",
        hint=f"did you mean {near[0]!r}?" if near else "leave it out",
    )


def _no_encoding(
    planned: PlannedRegion, name: OpName, form: str, known: Encoding | None
) -> PlanError:
    what = f"cannot encode '{name}' as {form} in region {planned.title!r}"
    if known is not None and known.name == form:
        return PlanError(
            f"{what}: the region saves it as well",
            needed="either save or encode",
            hint="leave it out of save",
        )
    return PlanError(
        what,
        needed=f"'{known.name}'" if known else "an op whose tensor has a smaller form",
        hint="masks of dropout: attn.attn_dropout/bernoulli_: bits",
    )


def _no_output(what: str, outputs: range) -> PlanError:
    there = ", ".join(f"@{output}" for output in outputs)
    every = "leave '@' and the number out, to save every output"
    return PlanError(
        what,
        needed=there or "an op that returns a tensor",
        hint=every if there else "leave it out",
    )
