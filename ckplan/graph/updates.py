"""A step with the update of another one.

Forward and backward do not depend on the optimizer, so of further optimizers only the
update is recorded: ops that read parameters and gradients, as they are after backward.
A compiled step takes the update of the uncompiled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, MULTIPLIES, Op, Storage


def with_update_of(step: Graph, update: Graph) -> Graph | None:
    """A step that takes the update of another one, after its own backward.

    Args:
        step: A whole step.
        update: A step of the same model whose update is wanted. If that alone was
            recorded, its gradients exist before it.

    Returns:
        The step; None if the two updates cannot be exchanged: a tensor of forward or
        backward dies within the update, or an update has workspaces of its own.
    """
    stop, end, begin = step.backward_stop, len(step.ops), update.backward_stop
    if any(op.name in MULTIPLIES for op in (*step.ops[stop:], *update.ops[begin:])):
        return None  # cuBLAS keeps workspaces for the whole step
    used = _used(step.ops[:stop])
    own, constants = constants_of_update(step), constants_of_update(update)
    kept = [
        number
        for number, one in enumerate(step.storages)
        if one.maker < stop
        and number not in own
        and (number in used or not _is_of_update(step, number))
    ]
    if any(stop <= step.storages[number].last < end - 1 for number in kept):
        return None
    if any(one.last_held >= stop for one in step.saved):
        return None
    place = {number: new for new, number in enumerate(kept)}
    shared = _shared(step, update, set(kept))
    if shared is None:
        return None
    later = stop + len(update.ops) - begin
    ending = end - 1 if end > stop else end  # without an update, backward is the end
    storages = [_until(step.storages[n], ending, later - end) for n in kept]
    renamed = {}
    for number, one in enumerate(update.storages):
        if number in shared:
            renamed[number] = place[shared[number]]
            continue
        is_made = one.maker >= begin or number in constants
        if is_made or _is_of_update(update, number):
            renamed[number] = len(storages)
            maker = one.maker - begin + stop if is_made else BEFORE_STEP
            last = one.last if one.last == BEFORE_STEP else one.last - begin + stop
            storages.append(replace(one, maker=maker, last=last))
    if not _used(update.ops[begin:]) <= renamed.keys():
        return None  # the update reads what forward or backward made
    mine = tuple(
        replace(
            op,
            reads=tuple(place[n] for n in op.reads),
            writes=tuple(place[n] for n in op.writes),
            outputs=tuple(place[n] for n in op.outputs),
        )
        for op in step.ops[:stop]
    )
    theirs = tuple(
        replace(
            op,
            reads=tuple(renamed[n] for n in op.reads),
            writes=tuple(renamed[n] for n in op.writes),
            outputs=tuple(renamed[n] for n in op.outputs),
        )
        for op in update.ops[begin:]
    )
    return replace(
        step,
        options=update.options,
        notes=tuple(dict.fromkeys((*step.notes, *update.notes))),
        ops=mine + theirs,
        storages=tuple(storages),
        saved=tuple(replace(one, storage=place[one.storage]) for one in step.saved),
        calls=tuple(
            replace(
                call,
                arguments=tuple(place[n] for n in call.arguments),
                state=tuple(place[n] for n in call.state),
            )
            for call in step.calls
        ),
    )


def constants_of_update(graph: Graph) -> frozenset[int]:
    """Storages that Python, and no op, makes right before the update, which reads them.

    Such as the one that AdamW with ``foreach`` adds to all counts of steps.
    """
    stop, storages = graph.backward_stop, graph.storages
    made = graph.creates[stop - 1] if stop else ()
    read = {storage for op in graph.ops[stop:] for storage in op.reads}
    return frozenset(
        number
        for number in read.difference(made)
        if (storages[number].maker, storages[number].kind) == (stop - 1, "temporary")
    )


def _until(one: Storage, ending: int, longer: int) -> Storage:
    """A storage of the step; what lives to its end, as the loss does, still does."""
    return replace(one, last=one.last + longer) if one.last >= ending else one


def _is_of_update(graph: Graph, number: int) -> bool:
    """Whether a storage that exists before the step is there for the optimizer alone.

    That is its state, and what only the update reads, such as numbers on the device.
    """
    one = graph.storages[number]
    if one.maker != BEFORE_STEP or one.kind not in ("optimizer", "buffer"):
        return False
    return one.kind == "optimizer" or number in _used(graph.ops[graph.backward_stop :])


def _used(ops: Iterable[Op]) -> frozenset[int]:
    return frozenset(n for op in ops for n in (*op.reads, *op.writes, *op.outputs))


def _shared(step: Graph, update: Graph, kept: set[int]) -> dict[int, int] | None:
    """Parameter or gradient of the update -> that of the step."""
    found: dict[int, int] = {}
    for kind in ("parameter", "gradient"):
        theirs = list(_of_kind(update, kind))
        mine = [n for n in _of_kind(step, kind) if n in kept]
        # Backward and compiled code have another order of them: pair the sizes.
        theirs.sort(key=lambda n: update.storages[n].bytes)
        mine.sort(key=lambda n: step.storages[n].bytes)
        sizes = [
            [graph.storages[n].bytes for n in numbers]
            for graph, numbers in ((step, mine), (update, theirs))
        ]
        if sizes[0] != sizes[1]:
            return None
        found |= dict(zip(theirs, mine, strict=True))
    return found


def _of_kind(graph: Graph, kind: str) -> Iterator[int]:
    return (n for n, one in enumerate(graph.storages) if one.kind == kind)
