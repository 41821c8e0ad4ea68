"""Find the outputs of ops that a plan names, and refuse those that cannot be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Encoding
from ckplan.plan.names import OpCounter, OpName
from ckplan.plan.plan import PlannedRegion

LEAST_MOVED_BYTES = 4096
"""Least bytes of an offloaded tensor: one block of a file."""
_MOVED_KINDS = ("activation", "temporary")
_PLAIN = ("float", "bfloat", "int", "uint", "bool", "complex")
_MAX_LISTED = 5


class Outputs(NamedTuple):
    """(op, output) of the outputs that a region keeps, by how it keeps them."""

    save: frozenset[tuple[int, int]] = frozenset()
    encode: frozenset[tuple[int, int]] = frozenset()
    offload: frozenset[tuple[int, int]] = frozenset()


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


def find_outputs(
    graph: Graph, call: int, last: int | None, planned: PlannedRegion
) -> Outputs:
    """Find the outputs that a region saves, encodes and offloads.

    Raises:
        PlanError: An op or output is not there, or cannot be kept in this way.
    """
    if not planned.ops:
        return Outputs()
    start = graph.calls[call].start
    op_of = {name: start + i for i, name in enumerate(name_ops(graph, call, last))}

    find = partial(_find, graph, call, planned, op_of)
    save: set[tuple[int, int]] = set()
    encode: set[tuple[int, int]] = set()
    offload: set[tuple[int, int]] = set()
    for place, name in enumerate(planned.save, start=1):
        save.update(find("save", name, place))
    for place, (name, form) in enumerate(planned.encode, start=1 + len(planned.save)):
        for output in find("encode", name, place):
            known = graph.encoding_of.get(output)
            if known is None or known.name != form or output in save:
                error = _no_encoding(planned, name, form, known)
                raise planned.located(error, place)
            encode.add(output)
    begin = 1 + len(planned.save) + len(planned.encode)
    for place, name in enumerate(planned.offload, start=begin):
        for output in find("offload", name, place):
            twice = "the region keeps it as well" if output in save else ""
            if storage_of(graph, output) in {storage_of(graph, one) for one in offload}:
                twice = "another output in the same memory moves"
            small = graph.encoding_of[output] if output in encode else None
            why = twice or why_not_moved(graph, *output, small)
            if why:
                raise planned.located(_no_offload(planned, name, why), place)
            offload.add(output)
    return Outputs(frozenset(save), frozenset(encode), frozenset(offload))


def _find(
    graph: Graph,
    call: int,
    planned: PlannedRegion,
    op_of: Mapping[OpName, int],
    word: str,
    name: OpName,
    place: int,
) -> list[tuple[int, int]]:
    """(op, output) of those that a name stands for."""
    failed = f"cannot {word} '{name}' in region {planned.title!r}"
    op = op_of.get(replace(name, output=None))
    if op is None:
        what = f"{failed}: {graph.calls[call]} runs no such op"
        raise planned.located(_no_op(what, name, op_of), place)
    outputs = range(len(graph.ops[op].outputs))
    if not outputs or name.output not in (None, *outputs):
        what = f"{failed}: in {graph.calls[call]} it has no such output"
        raise planned.located(_no_output(what, outputs), place)
    return [(op, m) for m in (outputs if name.output is None else [name.output])]


def storage_of(graph: Graph, place: tuple[int, int]) -> int:
    """The storage of an output of an op."""
    op, output = place
    return graph.ops[op].outputs[output]


def why_not_moved(
    graph: Graph, op: int, output: int, small: Encoding | None = None
) -> str:
    """Why an output cannot be offloaded; empty if it can.

    Args:
        graph: The step.
        op: The op.
        output: The output of it.
        small: The form that moves in place of the tensor, if it is encoded first.
    """
    number = storage_of(graph, (op, output))
    storage = graph.storages[number]
    if storage.maker == BEFORE_STEP or storage.kind not in _MOVED_KINDS:
        return f"it is part of a tensor of kind {storage.kind}"
    size = storage.bytes if small is None else small.bytes
    if size < LEAST_MOVED_BYTES:
        return f"it has {size} B, fewer than {LEAST_MOVED_BYTES} B"
    if small is not None:
        return ""
    if graph.is_changed(number, op + 1, graph.num_forward):
        return "forward overwrites it later"
    if storage.tensor is not None and not storage.tensor.dtype.startswith(_PLAIN):
        return f"its elements are {storage.tensor.dtype}"
    return ""


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


def _no_offload(planned: PlannedRegion, name: OpName, why: str) -> PlanError:
    return PlanError(
        f"cannot offload '{name}' in region {planned.title!r}: {why}",
        needed=f"an activation of {LEAST_MOVED_BYTES} B or more, that is not saved and "
        "stays as it is or is encoded",
        hint="leave it out of offload",
    )
