"""A step at another batch, from another way to train that is known at both.

Optimizers, and gradients that accumulate, add ops to a step that do not depend on its
rows. So of two ways to train that differ in these alone, one batch of the second tells
all its batches, once two batches of the first are known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Call, Op

_OF_MODEL = ("parameter", "buffer", "input")


def transplanted(own: Graph, here: Graph, there: Graph) -> Graph | None:
    """The step ``own``, recorded at one batch, at another batch.

    Args:
        own: A step at the batch of ``here``.
        here: The same model and batch with another optimizer, or without accumulation.
        there: The step of ``here`` at another batch.

    Returns:
        The step ``own`` at the batch of ``there``; None if forward and backward of
        ``own`` and ``here`` differ in more than added ops.
    """
    pairs = _paired_ops(own, here)
    if pairs is None or len(here.ops) != len(there.ops):
        return None
    twins = dict(_paired_storages(own, here, pairs))
    same_ops = all(_is_twin(own.ops[a], here.ops[b]) for a, b in pairs.items())
    sizes = ((own.storages[a], here.storages[b]) for a, b in twins.items())
    if not same_ops or any(one.bytes != other.bytes for one, other in sizes):
        return None
    ops, storages = list(own.ops), list(own.storages)
    for place, twin in pairs.items():
        ops[place] = _moved(ops[place], here.ops[twin], there.ops[twin])
    for place, twin in twins.items():
        grown = there.storages[twin]
        if grown.bytes != storages[place].bytes or grown.tensor is not None:
            storages[place] = replace(
                storages[place], bytes=grown.bytes, tensor=grown.tensor
            )
    known = there.encoding_of
    codings = ((one, known.get((pairs[one.op], one.output))) for one in own.encodings)
    return replace(
        own,
        fingerprint={**own.fingerprint, "batch": there.fingerprint.get("batch")},
        ops=tuple(ops),
        storages=tuple(storages),
        encodings=tuple(
            replace(found, op=one.op) for one, found in codings if found is not None
        ),
        tiled=(),  # tests belong to a batch
    )


def _paired_ops(own: Graph, here: Graph) -> dict[int, int] | None:
    """Op -> the same op of the other step; None if one of these has no twin."""
    found: dict[int, int] = {}
    twin = 0
    calls = ([_without_storages(c) for c in graph.calls] for graph in (own, here))
    if operator.ne(*calls):
        return None
    for place, op in enumerate(own.ops[: own.backward_stop]):
        if twin < here.backward_stop and _is_twin(op, here.ops[twin]):
            found[place] = twin
            twin += 1
    return found if twin == here.backward_stop else None


def _without_storages(call: Call) -> Call:
    return replace(call, arguments=(), state=())


def _is_twin(one: Op, other: Op) -> bool:
    counts = (len(one.outputs), one.flops, one.moved_bytes, one.workspace)
    return (one.name, one.call) == (other.name, other.call) and counts == (
        len(other.outputs),
        other.flops,
        other.moved_bytes,
        other.workspace,
    )


def _paired_storages(
    own: Graph, here: Graph, pairs: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Storage -> the same one of the other step; others do not grow with the rows."""
    for place, twin in pairs.items():
        yield from zip(own.creates[place], here.creates[twin], strict=False)
    for kind in _OF_MODEL:
        yield from zip(*(_before(graph, kind) for graph in (own, here)), strict=False)


def _before(graph: Graph, kind: str) -> list[int]:
    return [
        number
        for number, one in enumerate(graph.storages)
        if one.kind == kind and one.maker == BEFORE_STEP
    ]


def _moved(own: Op, here: Op, there: Op) -> Op:
    """An op with what changes between two batches of its twin."""
    if here == there:
        return own
    return replace(
        own,
        workspace=there.workspace,
        flops=there.flops,
        moved_bytes=there.moved_bytes,
        seconds=_shifted(own.seconds, here.seconds, there.seconds),
        launch_seconds=_shifted(
            own.launch_seconds, here.launch_seconds, there.launch_seconds
        ),
    )


def _shifted(own: float, here: float, there: float) -> float:
    """Seconds with the change of another op's; exact where they are equal."""
    return there if own == here else max(0.0, own + there - here)
