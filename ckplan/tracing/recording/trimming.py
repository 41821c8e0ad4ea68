"""Cut a recording of a loop to the ops and storages of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.tracing.recording.recording import (
    STILL_ALIVE,
    RawCall,
    RawOp,
    RawSaved,
    RawStorage,
    Recording,
)


class Trimmed(NamedTuple):
    """A recording that begins later, and what it leaves out."""

    recording: Recording
    beside_bytes: int  # of storages that are alive all along and that no op uses


def trimmed(recording: Recording, start: int = 0) -> Trimmed:
    """Begin a recording at an op that no call of a module spans.

    Storages that are freed before that op are left out, and so are those that exist
    before the step, outlive it and are used by none of its ops. The latter count as
    ``beside_bytes``.
    """
    calls = [call for call in recording.calls if call.start >= start]
    saved = [one for one in recording.saved if one.at > start]
    held = {one.storage: one.done for one in recording.saved if one.at <= start}
    ops = recording.ops[start:]
    used = _used_by(ops)
    used_before = _used_by(recording.ops[:start])
    used |= {one.storage for one in saved}
    used |= {s for call in calls for s in (*call.given, *call.state)}
    keep, beside_bytes = [], 0
    for number, storage in enumerate(recording.storages):
        is_alive = _last(storage, held.get(number, -1)) >= start
        counts = storage.last != STILL_ALIVE or number < recording.num_known
        if number in used or (is_alive and (counts or number in used_before)):
            keep.append(number)
        elif is_alive:
            beside_bytes += storage.bytes
    renamed = {old: new for new, old in enumerate(keep)}
    numbers = {old: new for new, old in enumerate(_numbers_of(recording, start))}
    found = Recording(
        [_op(op, renamed, numbers) for op in ops],
        [_storage(recording.storages[s], start, held.get(s, -1)) for s in keep],
        [_saved(one, start, renamed, numbers) for one in saved],
        list(_calls(calls, start, renamed, numbers)),
        [(numbers[c], *x) for c, *x in recording.changes if c in numbers],  # type: ignore[misc]
        recording.run_again,
        [renamed[s] for s in recording.on_host if s in renamed],
        sum(number < recording.num_known for number in keep),
        recording.num_forward - start,
        recording.num_backward,
    )
    return Trimmed(found, beside_bytes)


def _used_by(ops: Iterable[RawOp]) -> set[int]:
    return {s for op in ops for s in (*op.reads, *op.writes, *op.outputs)}


def _last(storage: RawStorage, held_until: int) -> float:
    """The last op before which a storage is freed."""
    if storage.last == STILL_ALIVE:
        return float("inf")
    return max(storage.last, held_until)


def _numbers_of(recording: Recording, start: int) -> Iterator[int]:
    return (n for n, call in enumerate(recording.calls) if call.start >= start)


def _op(op: RawOp, renamed: dict[int, int], numbers: dict[int, int]) -> RawOp:
    return replace(
        op,
        call=numbers.get(op.call, OUTSIDE_CALLS),
        reads=tuple(renamed[s] for s in op.reads),
        writes=tuple(renamed[s] for s in op.writes),
        outputs=tuple(renamed[s] for s in op.outputs),
    )


def _storage(storage: RawStorage, start: int, held_until: int) -> RawStorage:
    maker = storage.maker - start if storage.maker >= start else BEFORE_STEP
    last = storage.last
    if last != STILL_ALIVE:
        last = max(last, held_until, start + BEFORE_STEP) - start
    return replace(storage, maker=maker, last=last)


def _saved(
    one: RawSaved, start: int, renamed: dict[int, int], numbers: dict[int, int]
) -> RawSaved:
    def moved(moment: int) -> int:
        return max(moment - start, -1)

    return RawSaved(
        renamed[one.storage],
        numbers.get(one.call, OUTSIDE_CALLS),
        *map(moved, (one.at, one.wanted, one.done, one.used)),
    )


def _calls(
    calls: list[RawCall], start: int, renamed: dict[int, int], numbers: dict[int, int]
) -> Iterator[RawCall]:
    """The calls, numbered anew by module."""
    times_called: Counter[str] = Counter()
    for call in calls:
        yield replace(
            call,
            number=times_called[call.fqn],
            parent=numbers.get(call.parent, OUTSIDE_CALLS),
            start=call.start - start,
            stop=call.stop - start,
            given=tuple(renamed[s] for s in call.given),
            state=tuple(renamed[s] for s in call.state),
        )
        times_called[call.fqn] += 1
