"""Cut a recording of a loop to the ops and storages of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.tracing.recording.recording import (
    STILL_ALIVE,
    RawCall,
    RawOp,
    RawSaved,
    RawStorage,
    RawUse,
    Recording,
)


class Trimmed(NamedTuple):
    """A recording that begins later, and what it leaves out."""

    recording: Recording
    beside_bytes: int  # of storages that are alive all along and that no op uses


class Kept(NamedTuple):
    """The ops that a shorter recording keeps: all but those before and between."""

    start: int = 0
    gap_start: int = 0  # ops of [gap_start, gap_stop) are left out, too
    gap_stop: int = 0

    def has(self, op: int) -> bool:
        """Whether an op is kept."""
        return op >= self.start and not self.gap_start <= op < self.gap_stop

    def moved(self, op: int) -> int:
        """The number of an op; for one that is left out, of the kept one before it."""
        if op >= self.gap_stop:
            op -= self.gap_stop - self.gap_start
        elif op >= self.gap_start:
            op = self.gap_start - 1
        return max(op - self.start, BEFORE_STEP)


_ALL = Kept()
_OF_FORWARD = ("activation", "input")
_MADE = (*_OF_FORWARD, "temporary")


def trimmed(recording: Recording, kept: Kept = _ALL) -> Trimmed:
    """Leave out ops before and between those that are kept.

    No call of a module may span an end of what is left out. Storages that are freed
    before the first op are left out, and so are those that exist before the step,
    outlive it and are used by none of its ops. The latter count as ``beside_bytes``.
    """
    numbers = {
        old: new
        for new, old in enumerate(
            n for n, call in enumerate(recording.calls) if kept.has(call.start)
        )
    }
    calls = [recording.calls[n] for n in numbers]
    saved = [one for one in recording.saved if kept.has(one.at - 1)]
    held = {one.storage: one.done for one in recording.saved if one.at <= kept.start}
    ops = [op for n, op in enumerate(recording.ops) if kept.has(n)]
    used = _used_by(ops)
    used_before = _used_by(recording.ops)
    used |= {one.storage for one in saved}
    used |= {s for call in calls for s in (*call.given, *call.state)}
    keep, beside_bytes = [], 0
    for number, storage in enumerate(recording.storages):
        last = _last(storage, held.get(number, -1))
        is_alive = last >= kept.start and (
            storage.maker == BEFORE_STEP
            or not kept.gap_start <= storage.maker <= last < kept.gap_stop
        )
        counts = storage.last != STILL_ALIVE or number < recording.num_known
        if number in used or (is_alive and (counts or number in used_before)):
            keep.append(number)
        elif is_alive:
            beside_bytes += storage.bytes
    keep = _in_order(keep, ops, recording)
    renamed = {old: new for new, old in enumerate(keep)}
    found = Recording(
        [_op(op, renamed, numbers) for op in ops],
        [_storage(recording.storages[s], kept, held.get(s, -1)) for s in keep],
        [_saved(one, kept, renamed, numbers) for one in saved],
        list(_calls(calls, kept, renamed, numbers)),
        [(numbers[c], kind, why) for c, kind, why in recording.changes if c in numbers],
        recording.run_again,
        [renamed[s] for s in recording.on_host if s in renamed],
        sum(number < recording.num_known for number in keep),
        recording.num_forward,
        recording.num_backward,
    )
    return Trimmed(found, beside_bytes)


def hold_over(recording: Recording) -> bool:
    """Keep what autograd holds at the end of the step; return whether it does.

    It held as much when the step began. Of that, storages are added that no Python
    object has, which were not found then. They are counted until the others are freed;
    if there are none, or they stay, to the end of the last backward.
    """
    storages, num_ops = recording.storages, len(recording.ops)
    over = [one for one in recording.saved if one.done < 0]
    for one in over:
        one.done = num_ops
    used = _used_by(recording.ops)
    before = [
        one
        for number, one in enumerate(storages)
        if one.maker == BEFORE_STEP and one.kind in _OF_FORWARD and number not in used
    ]
    by_others = Counter(
        one.bytes
        for one in storages
        if one.maker >= 0 and one.last == STILL_ALIVE and one.kind in _MADE
    )
    seen = Counter(one.bytes for one in before) - by_others
    last = max(recording.num_forward + recording.num_backward - 1, 0)
    ends = [one.last for one in before if one.kind == "activation"]
    if ends and STILL_ALIVE not in ends:
        last = min(last, max(0, *ends))
    unseen = {one.storage for one in over if storages[one.storage].last != STILL_ALIVE}
    for number in sorted(unseen):
        size = storages[number].bytes
        if seen[size]:
            seen[size] -= 1
        else:
            storages.append(RawStorage(size, "temporary", BEFORE_STEP, last))
    return bool(over)


def _in_order(keep: list[int], ops: list[RawOp], recording: Recording) -> list[int]:
    """Storages, those that were found alive in the order of their first use.

    Python tells what is alive in an order that varies from step to step.
    """
    known, storages = recording.num_known, recording.storages
    first: dict[int, int] = {}
    for storage in chain.from_iterable((*op.reads, *op.writes) for op in ops):
        first.setdefault(storage, len(first))

    def key(number: int) -> tuple[int, int, str, int, int]:
        one = storages[number]
        sizes = len(one.tensor.shape) if one.tensor else 0
        use = first.get(number, len(first))
        return use, one.last, one.kind, sizes, one.bytes

    found = [s for s in keep if s >= known and storages[s].maker == BEFORE_STEP]
    moved = dict(zip(found, sorted(found, key=key), strict=True))
    return [moved.get(number, number) for number in keep]


def largest_moment(recording: Recording) -> int:
    """The last op at which most bytes are alive, without workspaces of kernels."""
    num_ops = len(recording.ops)
    last = [num_ops if s.last == STILL_ALIVE else s.last for s in recording.storages]
    for one in recording.saved:
        last[one.storage] = max(last[one.storage], one.done)
    change = [0] * (num_ops + 2)
    for storage, stop in zip(recording.storages, last, strict=True):
        start = max(storage.maker, 0)
        if stop >= start:
            change[start] += storage.bytes
            change[stop + 1] -= storage.bytes
    live = list(accumulate(change))[: max(num_ops, 1)]
    return max(range(len(live)), key=lambda op: (live[op], op))


def _used_by(ops: Iterable[RawOp]) -> set[int]:
    return {s for op in ops for s in (*op.reads, *op.writes, *op.outputs)}


def _last(storage: RawStorage, held_until: int) -> float:
    """The last op before which a storage is freed."""
    if storage.last == STILL_ALIVE:
        return float("inf")
    return max(storage.last, held_until)


def _op(op: RawOp, renamed: dict[int, int], numbers: dict[int, int]) -> RawOp:
    return replace(
        op,
        call=numbers.get(op.call, OUTSIDE_CALLS),
        reads=tuple(renamed[s] for s in op.reads),
        writes=tuple(renamed[s] for s in op.writes),
        outputs=tuple(renamed[s] for s in op.outputs),
    )


def _storage(storage: RawStorage, kept: Kept, held_until: int) -> RawStorage:
    last = storage.last
    if last != STILL_ALIVE:
        last = kept.moved(max(last, held_until))
    return replace(storage, maker=kept.moved(storage.maker), last=last)


def _saved(
    one: RawSaved, kept: Kept, renamed: dict[int, int], numbers: dict[int, int]
) -> RawSaved:
    def moved(count: int) -> int:
        """A number of ops that had run, which is one more than the last one's."""
        return kept.moved(count - 1) + 1

    return RawSaved(
        renamed[one.storage],
        numbers.get(one.call, OUTSIDE_CALLS),
        moved(one.at),
        kept.moved(one.done),
        [RawUse(moved(use.wanted), kept.moved(use.used), use.kept) for use in one.uses],
    )


def _calls(
    calls: list[RawCall], kept: Kept, renamed: dict[int, int], numbers: dict[int, int]
) -> Iterator[RawCall]:
    """The calls, numbered anew by module."""
    times_called: Counter[str] = Counter()
    for call in calls:
        yield replace(
            call,
            number=times_called[call.fqn],
            parent=numbers.get(call.parent, OUTSIDE_CALLS),
            start=call.start - kept.start,
            stop=call.stop - kept.start,
            given=tuple(renamed[s] for s in call.given),
            state=tuple(renamed[s] for s in call.state),
        )
        times_called[call.fqn] += 1
