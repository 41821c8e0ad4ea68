"""Checks that a recorded step is consistent.

Every number is in range. No storage is used before it is made. Calls nest. Saved
tensors are saved in forward and read in backward. The simulator relies on all of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from itertools import chain
from math import inf

from ckplan.errors import GraphError
from ckplan.graph.fqn import is_op_name
from ckplan.graph.records import (
    BEFORE_STEP,
    HAZARDS,
    KINDS,
    OUTSIDE_CALLS,
    RecordedStep,
)
from ckplan.units import MOST_BYTES

_MOST = 1 << 63  # of bytes
_COUNTS = ("seed", "micro_batch", "batch_dim", "step", "beside_bytes")
_WORKLOAD_KEYS = frozenset({"target", "set", "input", "script", *_COUNTS})
MOST_SECONDS = 1e9  # of an op; in nanoseconds, sums of them are exact enough


def check_consistent(graph: RecordedStep, version: int) -> None:
    """Raise ``GraphError`` if the records of a step are inconsistent."""
    for what in inconsistencies(graph):
        raise GraphError(
            f"the trace is inconsistent: {what}",
            needed=f"a graph file of format {version} as `ckplan profile` writes it",
            hint="run `ckplan profile` again",
        )


def inconsistencies(graph: RecordedStep) -> Iterator[str]:
    """Yield a message for every inconsistency; stop at the first one.

    Later checks may raise if an earlier one yields a message.
    """
    yield from _phases_out_of_range(graph)
    yield from _engine_out_of_range(graph)
    yield from _ops_out_of_range(graph)
    yield from _storages_out_of_range(graph)
    yield from _tensors_out_of_range(graph)
    yield from _saved_out_of_range(graph)
    yield from _calls_out_of_range(graph)
    yield from _encodings_out_of_range(graph)
    yield from _hazards_out_of_range(graph)
    yield from _tests_out_of_range(graph)
    yield from _code_out_of_range(graph)
    # The checks below rely on numbers in range.
    yield from _inconsistent_names(graph)
    yield from _inconsistent_storages(graph)
    yield from _inconsistent_ops(graph)
    yield from _inconsistent_calls(graph)
    yield from _inconsistent_saved(graph)
    yield from _inconsistent_encodings(graph)


# -- numbers -----------------------------------------------------------------------


def _phases_out_of_range(graph: RecordedStep) -> Iterator[str]:
    num_ops = len(graph.ops)
    halves = (graph.num_forward, graph.num_backward)
    if not _all_in_range(halves, 0, num_ops + 1) or sum(halves) > num_ops:
        yield f"forward and backward are {halves} of {num_ops} ops"


def _engine_out_of_range(graph: RecordedStep) -> Iterator[str]:
    if not _are_times(astuple(graph.engine)):
        yield f"the engine takes {graph.engine}"


def _ops_out_of_range(graph: RecordedStep) -> Iterator[str]:
    num_storages, num_calls = len(graph.storages), len(graph.calls)
    for index, op in enumerate(graph.ops):
        if not _all_in_range((*op.reads, *op.writes, *op.outputs), 0, num_storages):
            yield f"op {index} ({op.name}) uses a storage that is not there"
        if not _all_in_range((op.call,), OUTSIDE_CALLS, num_calls):
            yield f"op {index} ({op.name}) belongs to call {op.call}"
        costs = (*chain(*op.workspace), op.flops, op.moved_bytes)
        timed = _are_times((op.seconds, op.launch_seconds))
        if not (timed and _all_in_range(costs, 0, _MOST)):
            yield f"op {index} ({op.name}) has a cost that is not a number >= 0"


def _storages_out_of_range(graph: RecordedStep) -> Iterator[str]:
    for index, storage in enumerate(graph.storages):
        if storage.kind not in KINDS:
            yield f"storage {index} is of kind {storage.kind!r}"
        sized = _all_in_range((storage.bytes,), 0, _MOST)
        moments = (storage.maker, storage.last)
        if not (sized and _all_in_range(moments, BEFORE_STEP, len(graph.ops) + 1)):
            yield f"storage {index} has {storage.bytes} B, maker {storage.maker}"


def _tensors_out_of_range(graph: RecordedStep) -> Iterator[str]:
    for found in {one.tensor for one in graph.storages} - {None}:
        assert found is not None
        dtype, shape = found
        if str(dtype) != dtype or not _all_in_range(shape, 0, _MOST):
            yield f"a storage holds a tensor of type {dtype!r} and shape {shape}"


def _saved_out_of_range(graph: RecordedStep) -> Iterator[str]:
    for saved in graph.saved:
        known = _all_in_range((saved.storage,), 0, len(graph.storages))
        when = (saved.packed_at, saved.unpacked_at, saved.last_held, saved.last_used)
        timed = _all_in_range(chain(when, *saved.uses), -1, len(graph.ops) + 1)
        called = _all_in_range((saved.call,), OUTSIDE_CALLS, len(graph.calls))
        if not (known and called and timed):
            yield f"a saved tensor of storage {saved.storage} is out of range"
    kept = tuple(chain.from_iterable(graph.kept_backwards))
    if not _all_in_range(kept, 0, len(graph.ops) + 1) or list(kept) != sorted(kept):
        yield "backwards that keep the graph are out of range or order"


def _calls_out_of_range(graph: RecordedStep) -> Iterator[str]:
    for index, call in enumerate(graph.calls):
        known = _all_in_range((call.parent,), OUTSIDE_CALLS, index)
        inside = _all_in_range((call.start, call.stop), 0, len(graph.ops) + 1)
        if not (known and inside and call.start <= call.stop):
            yield f"call {index} covers ops [{call.start}, {call.stop})"
        if call.functions is not None and not _all_in_range(
            (call.functions,), 0, _MOST
        ):
            yield f"call {index} calls {call.functions!r} functions"
        if not _all_in_range((call.number,), 0, _MOST):
            yield f"call {index} is number {call.number!r} of its module"
        if not _all_in_range(call.arguments, 0, len(graph.storages)):
            yield f"call {index} is given a storage that is not there"
        if not _all_in_range(call.state, 0, len(graph.storages)):
            yield f"call {index} has state in a storage that is not there"


def _tests_out_of_range(graph: RecordedStep) -> Iterator[str]:
    for one in graph.tiled:
        counts = one.rows, one.columns, one.threads
        known = _all_in_range((one.call,), 0, len(graph.calls))
        positive = _all_in_range(counts, 1, _MOST)
        if not (
            known and positive and 0 <= one.difference < inf and 0 <= one.share < inf
        ):
            yield f"a test of tiles of call {one.call} is out of range"


def _code_out_of_range(graph: RecordedStep) -> Iterator[str]:
    num_calls = len(graph.calls)
    for number, code in enumerate(graph.generated):
        calls = [one.call for one in code.regions]
        lasts = [one.last for one in code.regions if one.last is not None]
        known = _all_in_range((*calls, *lasts), 0, num_calls) and all(
            _all_in_range((op,), 0, graph.num_forward)
            and _all_in_range((output,), 0, len(graph.ops[op].outputs))
            for one in code.regions
            for op, output in one.save
        )
        peaks = code.peak_bytes, code.simulated_peak_bytes
        # A plan may be faster than what torch chooses.
        timed = -1 <= code.overhead <= MOST_SECONDS
        sized = _all_in_range(peaks, 0, _MOST) and timed
        if not (known and sized and calls == sorted(calls)):
            yield f"plan {number} of generated code is out of range"


def _encodings_out_of_range(graph: RecordedStep) -> Iterator[str]:
    for one in graph.encodings:
        known = _all_in_range((one.op,), 0, len(graph.ops))
        outputs = graph.ops[one.op].outputs if known else ()
        sizes = (one.bytes, one.encode_workspace_bytes, one.decode_workspace_bytes)
        named = _all_in_range((one.output,), 0, len(outputs))
        timed = _are_times((one.encode_seconds, one.decode_seconds))
        if not (named and timed and _all_in_range(sizes, 0, _MOST)):
            yield f"an encoding of op {one.op} is out of range"


def _hazards_out_of_range(graph: RecordedStep) -> Iterator[str]:
    numbers = [hazard.call for hazard in graph.hazards]
    if not _all_in_range(numbers, 0, len(graph.calls)) or numbers != sorted(numbers):
        yield "a hazard refers to a call that does not exist"
    if any(hazard.kind not in HAZARDS for hazard in graph.hazards):
        yield "a hazard has an unknown kind"


def _all_in_range(numbers: Iterable[int], low: int, high: int) -> bool:
    """Whether all are whole numbers of ``[low, high)``."""
    for number in numbers:  # a loop is twice as fast as a generator, and this is hot
        if type(number) is not int or not low <= number < high:
            return False
    return True


def _are_times(seconds: tuple[float, ...]) -> bool:
    """Whether all are times that an op may take."""
    return not [one for one in seconds if not 0 <= one <= MOST_SECONDS]


# -- relations between records -----------------------------------------------------


def _texts_of_workload(workload: object) -> list[object]:
    """What must be text in a remembered workload; all of it, if it is none."""
    if not isinstance(workload, Mapping) or not _WORKLOAD_KEYS.issuperset(workload):
        return [workload]
    several = [workload.get(key, []) for key in ("set", "input", "script")]
    numbers = {type(workload.get(key, 0)) for key in _COUNTS}
    if numbers != {int} or not all(isinstance(one, list) for one in several):
        return [workload]
    return [workload.get("target", ""), *chain(*several)]


def _inconsistent_names(graph: RecordedStep) -> Iterator[str]:
    named: list[object] = [graph.model, graph.costs, *graph.notes]
    named.append(graph.options.get("gpu", ""))
    named += _texts_of_workload(graph.options.get("workload", {}))
    named += [op.name for op in graph.ops]
    named += {op.line for op in graph.ops}
    named += [text for call in graph.calls for text in (call.fqn, call.module)]
    named += [one.name for one in graph.encodings]
    named += [hazard.reason for hazard in graph.hazards]
    for name in named:
        if not isinstance(name, str):
            yield f"{name!r} is not a name"
    for op_name in {op.name for op in graph.ops}:
        if not is_op_name(op_name):
            yield f"{op_name!r} is not the name of an op"
    seen: set[tuple[str, int]] = set()
    for call in graph.calls:
        if (call.fqn, call.number) in seen:
            yield f"two calls have the name {call}"
        seen.add((call.fqn, call.number))


def _inconsistent_storages(graph: RecordedStep) -> Iterator[str]:
    sizes = [storage.bytes for storage in graph.storages]
    sizes.append(max((op.workspace.bytes for op in graph.ops), default=0))
    if sum(sizes) > MOST_BYTES:
        yield f"{sum(sizes)} B in total are too many"
    for index, storage in enumerate(graph.storages):
        if storage.maker >= len(graph.ops):
            yield f"storage {index} is made by op {storage.maker}, which is not there"
        if storage.last < storage.maker:
            yield f"storage {index} is freed before it is made"


def _inconsistent_ops(graph: RecordedStep) -> Iterator[str]:
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
            elif maker < index and storage not in (*op.reads, *op.writes):
                yield f"op {index} ({op.name}) returns what it neither reads nor makes"


def _inconsistent_calls(graph: RecordedStep) -> Iterator[str]:
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
        if any(graph.storages[s].maker >= call.start for s in call.arguments):
            yield f"call {call} receives a storage that is made later"
        if any(graph.storages[s].maker >= call.start for s in call.state):
            yield f"call {call} has state in a storage that is made later"
        begun, ended[call.parent] = call.start, call.stop


def _inconsistent_saved(graph: RecordedStep) -> Iterator[str]:
    before = 0
    until = [storage.last for storage in graph.storages]
    for index, saved in enumerate(graph.saved):
        maker = graph.storages[saved.storage].maker
        name = f"saved tensor {index}"
        if not before <= saved.packed_at <= graph.num_forward:
            yield f"{name} is out of forward order"
        if maker >= saved.packed_at or until[saved.storage] < saved.packed_at - 1:
            yield f"{name} refers to storage {saved.storage}, which is not alive"
        if (
            saved.unpacked_at != -1
            and not saved.packed_at <= saved.unpacked_at < graph.backward_stop
        ):
            yield f"{name} is unpacked at op {saved.unpacked_at}, too early or too late"
        if saved.last_held < max(saved.unpacked_at, saved.packed_at - 1):
            yield f"{name} is freed at op {saved.last_held}, too early"
        if not saved.unpacked_at <= saved.last_used <= saved.last_held:
            yield f"{name} is last used at op {saved.last_used}, too early or too late"
        uses = saved.every_use
        begins, ends = [begin for begin, _ in uses], [end for _, end in uses]
        if saved.uses and (
            begins != sorted({*begins})
            or begins[0] != saved.unpacked_at
            or max(ends) != saved.last_used
            or any(begin > end for begin, end in uses)
        ):
            yield f"{name} has uses out of order"
        if saved.call >= 0:
            call = graph.calls[saved.call]
            if not call.start <= saved.packed_at <= call.stop:
                yield f"{name} is outside its call {call}"
        before = saved.packed_at
        until[saved.storage] = max(until[saved.storage], saved.last_held)


def _inconsistent_encodings(graph: RecordedStep) -> Iterator[str]:
    before = (-1, -1)
    for one in graph.encodings:
        if (one.op, one.output) <= before or one.op >= graph.num_forward:
            yield f"the encodings of op {one.op} are out of order"
        before = (one.op, one.output)
