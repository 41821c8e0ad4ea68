"""Measure every distinct op alone, for its seconds and its workspace.

Ops are equal if their names, shapes, strides, dtypes and numbers are equal. Measuring
ops alone needs memory for the largest op, or ``COLD_BYTES``, and not for the whole
model. Ops with tensors larger than ``LARGEST_BYTES``, ops of ``LARGEST_FLOPS`` or more,
and ops that fail on made-up content, are not measured. Their seconds are scaled from
the bandwidth and the FLOP rate that other ops reach. Ops in the cost cache are not
measured again (``cost_cache``).

In a step, other tensors evict an op's inputs from the processor's cache. So several
copies of the inputs, of ``COLD_BYTES`` together, are used in turn, and what they make
is kept: memory is new, as in an uncompiled step. ``Memory`` names other places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.profiler import record_function

from ckplan.collector import collection_off
from ckplan.encodings import decode, encode
from ckplan.errors import WorkloadError
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.tracing.costs.op_arguments import (
    Run,
    chosen_indices,
    input_bytes,
    make_runner,
    make_writer,
)
from ckplan.tracing.costs.spread import OtherPrograms
from ckplan.tracing.costs.timing import (
    Job,
    Memory,
    launch_seconds,
    seconds_of,
    time_runs,
)
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.training.allocator import (
    AllocatorLog,
    Requested,
    log_allocations,
    requested_within,
)
from ckplan.training.failures import first_line, is_out_of_memory

LARGEST_BYTES = 1 << 30
LARGEST_FLOPS = 1 << 38  # seconds of one core
_MOST_ENCODED = 1 << 24  # elements; costs of larger tensors are scaled
_LONG_SECONDS = 0.05  # an op that takes longer is run once
MARK = "ckplan_op_"

Progress = Callable[[str, int, int], None]
"""Called with a title, the number of items done and the total."""


def calibrate(
    ops: Sequence[RawOp],
    device: torch.device,
    progress: Progress | None = None,
    cache: CostCache | None = None,
    memory: Memory = Memory.NEW,
) -> list[Cost]:
    """Measure every distinct op that is not in the cost cache.

    Args:
        ops: The ops.
        device: That runs them.
        progress: Told of the work.
        cache: Costs that are known.
        memory: Where ops find their inputs and put their results.

    Returns:
        One cost for each of ``ops``, in order.
    """
    is_new = memory is Memory.NEW
    make = make_runner if is_new else make_writer
    where = "" if is_new else f"{memory.value} memory: "
    keys = [where + _key(op) for op in ops]
    distinct = dict(zip(reversed(keys), reversed(ops), strict=True))
    every = {
        key: Job(
            partial(make, op, device), max(op.moved_bytes, input_bytes(op)), memory
        )
        for key, op in distinct.items()
        if op.flops < LARGEST_FLOPS
    }
    jobs = {key: job for key, job in every.items() if job.num_bytes <= LARGEST_BYTES}
    costs = _look_up_or_measure(jobs, device, progress or _silent, cache)
    bandwidth, flop_rate = _rates(distinct, costs)
    for key, op in distinct.items():
        if key not in costs:
            seconds = max(op.moved_bytes / bandwidth, op.flops / flop_rate)
            costs[key] = Cost(seconds, 0, 0, measured=False)
    if device.type == "cuda":
        launch = launch_seconds(device)
        costs = {k: replace(c, launch_seconds=launch) for k, c in costs.items()}
    return [costs[key] for key in keys]


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


@dataclass(frozen=True, slots=True)
class EncodingCost:
    """Seconds and workspaces of encoding and decoding one tensor."""

    encode_seconds: float
    decode_seconds: float
    encode_workspace_bytes: int
    decode_workspace_bytes: int


def calibrate_encodings(
    wanted: Iterable[tuple[str, TensorMeta]],
    device: torch.device,
    cache: CostCache | None = None,
) -> dict[tuple[str, TensorMeta], EncodingCost]:
    """Measure encoding and decoding for pairs of form and tensor."""
    sizes = {
        (form, meta): (form, meta.dtype, min(meta.numel, _MOST_ENCODED))
        for form, meta in dict.fromkeys(wanted)
    }
    jobs: dict[str, Job] = {
        f"{way} {size}": Job(partial(make, *size, device), size[1].itemsize * size[2])
        for size in dict.fromkeys(sizes.values())
        for way, make in (("pack", _encoder), ("unpack", _decoder))
    }
    costs = _look_up_or_measure(jobs, device, _silent, cache)
    found: dict[tuple[str, TensorMeta], EncodingCost] = {}
    for (form, meta), size in sizes.items():
        scale = meta.numel / max(size[2], 1)
        there, back = (costs[f"{way} {size}"] for way in ("pack", "unpack"))
        found[form, meta] = EncodingCost(
            there.seconds * scale,
            back.seconds * scale,
            round((there.peak_bytes - there.held_bytes) * scale),
            round((back.peak_bytes - back.held_bytes) * scale),
        )
    return found


def _encoder(form: str, dtype: torch.dtype, length: int, device: torch.device) -> Run:
    return partial(encode, form, torch.zeros(length, dtype=dtype, device=device))


def _decoder(form: str, dtype: torch.dtype, length: int, device: torch.device) -> Run:
    small = encode(form, torch.zeros(length, dtype=dtype, device=device))
    assert small is not None, "a tensor of zeros is dense"
    return partial(decode, small)


def _look_up_or_measure(
    jobs: Mapping[str, Job],
    device: torch.device,
    progress: Progress,
    cache: CostCache | None,
) -> dict[str, Cost]:
    if cache is None:
        return _measure(jobs, device, progress)
    known = cache.known(jobs)
    new = {key: job for key, job in jobs.items() if key not in known}
    if not new:
        return known
    others = OtherPrograms()
    found = _measure(new, device, progress)
    return {**known, **cache.learn(found, busy=others.are_busy())}


def _measure(
    jobs: Mapping[str, Job], device: torch.device, progress: Progress
) -> dict[str, Cost]:
    seconds: dict[str, float] = {}
    marks: dict[str, str] = {}
    requested: dict[str, Requested] = {}
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        collection_off(),
        log_allocations(MARK, device) as log,
    ):
        for number, (key, job) in enumerate(jobs.items()):
            progress("measuring ops", number, len(jobs))
            mark, run = f"{MARK}{number}", None  # the inputs of the op before are freed
            try:
                run = job.prepare()
                if device.type == "cuda":
                    run()  # cuBLAS allocates its workspace; kernels are loaded
                with record_function(mark), requested_within(device) as requested[key]:
                    first, out = seconds_of(run, device)
                del out
                taken = first if first > _LONG_SECONDS else time_runs(job, run, device)
            except (RuntimeError, IndexError, TypeError, ValueError, MemoryError) as e:
                if is_out_of_memory(e):
                    raise _too_large(key, e) from e
                continue  # the op does not run on made-up content
            marks[key] = mark
            seconds[key] = taken
    within: Mapping[str, AllocatorLog | Requested] = (
        requested if device.type == "cuda" else _within(log, marks)
    )
    return {
        key: Cost(
            seconds[key],
            within[key].peak_bytes,
            within[key].held_bytes,
            measured=True,
        )
        for key in seconds
    }


def _too_large(key: str, error: BaseException) -> WorkloadError:
    return WorkloadError(
        f"cannot measure {key.partition('(')[0].rpartition(' ')[2]}: no memory "
        f"({first_line(error)})",
        needed="memory for the largest op of the step alone",
        hint="close other programs, or make the batch smaller",
    )


def _within(log: AllocatorLog, marks: Mapping[str, str]) -> dict[str, AllocatorLog]:
    """Allocations during the first run of every op."""
    times = [when for when, _ in log.events]
    found: dict[str, AllocatorLog] = {}
    for key, mark in marks.items():
        start, stop = log.spans[mark]
        first, last = bisect_left(times, start), bisect_left(times, stop)
        found[key] = AllocatorLog(log.events[first:last])
    return found


def _rates(ops: Mapping[str, RawOp], costs: Mapping[str, Cost]) -> tuple[float, float]:
    """The highest bytes and FLOPs per second that measured ops reach."""
    bandwidth, flop_rate = 1e9, 1e9
    for key, cost in costs.items():
        seconds = max(cost.seconds, 1e-9)
        if ops[key].moved_bytes > 1 << 22:
            bandwidth = max(bandwidth, ops[key].moved_bytes / seconds)
        flop_rate = max(flop_rate, ops[key].flops / seconds)
    return bandwidth, flop_rate


def _key(op: RawOp) -> str:
    return f"{op.func}{op.args}{op.in_grad_mode}{chosen_indices(op) or ''}"
