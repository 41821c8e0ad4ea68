"""What must be true of any step, beyond every number being in range.

Nothing is used before it is made, so there are no cycles; calls nest; saved tensors are
of the forward and wanted by the backward. What replays a graph relies on all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckplan.units import MOST_BYTES

if TYPE_CHECKING:
    from ckplan.graph import Graph


def contradictions(graph: Graph) -> Iterator[str]:
    """What does not hold together; numbers that are out of range must be out."""
    yield from _of_names(graph)
    yield from _of_storages(graph)
    yield from _of_ops(graph)
    yield from _of_calls(graph)
    yield from _of_saved(graph)
    yield from _of_encodings(graph)


def _of_names(graph: Graph) -> Iterator[str]:
    named: list[object] = [graph.model, graph.costs, *graph.notes]
    named += [op.name for op in graph.ops]
    named += [text for call in graph.calls for text in (call.fqn, call.module)]
    named += [one.name for one in graph.encodings]
    named += [hazard.reason for hazard in graph.hazards]
    for name in named:
        if not isinstance(name, str):
            yield f"{name!r} is no name"
    seen: set[tuple[str, int]] = set()
    for call in graph.calls:
        if (call.fqn, call.number) in seen:
            yield f"two calls are {call}"
        seen.add((call.fqn, call.number))


def _of_storages(graph: Graph) -> Iterator[str]:
    sizes = [storage.bytes for storage in graph.storages]
    sizes.append(max((op.workspace_bytes for op in graph.ops), default=0))
    if sum(sizes) > MOST_BYTES:
        yield f"{sum(sizes)} B are more than anybody has"
    for index, storage in enumerate(graph.storages):
        if storage.maker >= len(graph.ops):
            yield f"storage {index} is made by op {storage.maker}, which is not there"
        if storage.last < storage.maker:
            yield f"storage {index} is gone before it is made"


def _of_ops(graph: Graph) -> Iterator[str]:
    storages = graph.storages
    for index, op in enumerate(graph.ops):
        for storage in (*op.reads, *op.writes):
            maker = storages[storage].maker
            if maker >= index:
                yield f"op {index} ({op.name}) reads what op {maker} makes"
        for storage in op.outputs:
            maker = storages[storage].maker
            if maker > index:
                yield f"op {index} ({op.name}) returns what op {maker} makes"


def _of_calls(graph: Graph) -> Iterator[str]:
    begun = 0
    ended = dict.fromkeys(range(-1, len(graph.calls)), 0)
    for call in graph.calls:
        if call.start < begun or call.start < ended[call.parent]:
            yield f"call {call} begins before the one before it ends"
        if call.parent >= 0:
            around = graph.calls[call.parent]
            if not around.start <= call.start <= call.stop <= around.stop:
                yield f"call {call} is not inside {around}"
        if call.stop > graph.num_forward:
            yield f"call {call} ends after forward"
        begun, ended[call.parent] = call.start, call.stop


def _of_saved(graph: Graph) -> Iterator[str]:
    before = 0
    until = [storage.last for storage in graph.storages]
    for index, saved in enumerate(graph.saved):
        maker = graph.storages[saved.storage].maker
        name = f"saved tensor {index}"
        if not before <= saved.at <= graph.num_forward:
            yield f"{name} is out of the order of forward"
        if maker >= saved.at or until[saved.storage] < saved.at - 1:
            yield f"{name} is of storage {saved.storage}, which is not there"
        if saved.wanted != -1 and not saved.at <= saved.wanted < graph.backward_stop:
            yield f"{name} is wanted by op {saved.wanted}, too early or too late"
        if saved.done < max(saved.wanted, saved.at - 1):
            yield f"{name} is let go by op {saved.done}, too early"
        if saved.call >= 0:
            call = graph.calls[saved.call]
            if not call.start <= saved.at <= call.stop:
                yield f"{name} is outside of its call {call}"
        before = saved.at
        until[saved.storage] = max(until[saved.storage], saved.done)


def _of_encodings(graph: Graph) -> Iterator[str]:
    before = (-1, -1)
    for one in graph.encodings:
        if (one.op, one.output) <= before or one.op >= graph.num_forward:
            yield f"the encodings of op {one.op} are out of order"
        before = (one.op, one.output)
