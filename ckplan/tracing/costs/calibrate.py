"""Run every distinct op once, alone, to learn its seconds and its workspace.

Ops are alike when name, shapes, strides, dtypes and numbers are. Alone means that it
never needs the memory of the whole model: the largest op decides, or ``COLD_BYTES``.
Ops whose tensors are larger than ``LARGEST_BYTES``, and those that do not run on
made-up content, are not measured but scaled from the bandwidth and the rate that the
others reached. What was measured before, on this machine, need not be measured again
(``cost_cache``).

In a step other tensors pass through the processor's cache between two ops that touch
the same one. So several copies of an op's input take turns, of ``COLD_BYTES`` together.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from ckplan.encodings import decode, encode
from ckplan.errors import WorkloadError
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.training.allocator import AllocatorLog, gpu_allocator_stats, log_allocations
from ckplan.training.data_dependent import MASK_DTYPES
from ckplan.training.failures import first_line, is_out_of_memory

LARGEST_BYTES = 1 << 30
COLD_BYTES = 1 << 26
_MOST_COPIES = 32  # of small inputs: more than are run, to pass through the cache
_MOST_ENCODED = 1 << 24  # elements; encodings of more are scaled
_LONG_SECONDS = 0.05  # an op that takes so long is run once
_PATIENCE_SECONDS = 0.02  # others are repeated for so long
_MOST_REPEATS = 7
_MARK = "ckplan_op_"
_WRITE_AT_INDEX = (
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._index_put_impl_,
)
_RECURRENT = (
    torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten._cudnn_rnn_backward.default,
)
_HEAD_START = 1_000_000  # cycles, most of a millisecond
_LAUNCHES = 200

_Run: TypeAlias = Callable[[], object]
"""What is to be measured."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Something to be measured."""

    prepare: Callable[[], _Run]  # with an input of its own
    num_bytes: int  # of that input, and of what one run reads and writes


def calibrate(
    ops: Sequence[RawOp],
    device: torch.device,
    progress: Progress | None = None,
    cache: CostCache | None = None,
) -> list[Cost]:
    """Measure every distinct op that the cache does not know.

    Returns:
        One cost for each of ``ops``, in order.
    """
    keys = [_key(op) for op in ops]
    distinct = dict(zip(reversed(keys), reversed(ops), strict=True))
    every = {
        key: _Job(partial(_runner, op, device), max(op.moved_bytes, _input_bytes(op)))
        for key, op in distinct.items()
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
    """What one encoding of one tensor costs."""

    encode_seconds: float
    decode_seconds: float
    encode_workspace_bytes: int
    decode_workspace_bytes: int


def calibrate_encodings(
    wanted: Iterable[tuple[str, TensorMeta]],
    device: torch.device,
    cache: CostCache | None = None,
) -> dict[tuple[str, TensorMeta], EncodingCost]:
    """Measure how tensors are brought into a smaller form and back."""
    sizes = {
        (form, meta): (form, meta.dtype, min(meta.numel, _MOST_ENCODED))
        for form, meta in dict.fromkeys(wanted)
    }
    jobs: dict[str, _Job] = {
        f"{way} {size}": _Job(partial(make, *size, device), size[1].itemsize * size[2])
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


def _encoder(form: str, dtype: torch.dtype, length: int, device: torch.device) -> _Run:
    return partial(encode, form, torch.zeros(length, dtype=dtype, device=device))


def _decoder(form: str, dtype: torch.dtype, length: int, device: torch.device) -> _Run:
    small = encode(form, torch.zeros(length, dtype=dtype, device=device))
    assert small is not None, "a tensor of zeros is dense"
    return partial(decode, small)


def _look_up_or_measure(
    jobs: Mapping[str, _Job],
    device: torch.device,
    progress: Progress,
    cache: CostCache | None,
) -> dict[str, Cost]:
    if cache is None:
        return _measure(jobs, device, progress)
    known = cache.known(jobs)
    new = {key: job for key, job in jobs.items() if key not in known}
    return {**known, **cache.learn(_measure(new, device, progress) if new else {})}


def _measure(
    jobs: Mapping[str, _Job], device: torch.device, progress: Progress
) -> dict[str, Cost]:
    seconds: dict[str, float] = {}
    marks: dict[str, str] = {}
    requested: dict[str, _Requested] = {}
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        log_allocations(_MARK, device) as log,
    ):
        for number, (key, job) in enumerate(jobs.items()):
            progress("measuring ops", number, len(jobs))
            mark = f"{_MARK}{number}"
            try:
                run = job.prepare()
                if device.type == "cuda":
                    run()  # cuBLAS takes its workspace, and kernels are loaded
                with record_function(mark), _requested(device) as requested[key]:
                    first, out = _seconds_of(run, device)
                del out
                taken = first if first > _LONG_SECONDS else _time(job, run, device)
            except (RuntimeError, IndexError, TypeError, ValueError, MemoryError) as e:
                if is_out_of_memory(e):
                    raise _too_large(key, e) from e
                continue  # made-up content is not good enough for it
            marks[key] = mark
            seconds[key] = taken
    within: Mapping[str, AllocatorLog | _Requested] = (
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


@dataclass(slots=True)
class _Requested:
    """What an op asked of a GPU's allocator, which may hand out larger blocks."""

    peak_bytes: int = 0
    held_bytes: int = 0


@contextmanager
def _requested(device: torch.device) -> Iterator[_Requested]:
    found = _Requested()
    if device.type != "cuda":
        yield found
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = gpu_allocator_stats(device).requested_bytes
    yield found
    after = gpu_allocator_stats(device)
    found.peak_bytes = after.requested_peak_bytes - before
    found.held_bytes = after.requested_bytes - before


def _too_large(key: str, error: BaseException) -> WorkloadError:
    return WorkloadError(
        f"cannot measure {key.partition('(')[0]}: no memory ({first_line(error)})",
        needed="memory for the largest op of the step alone",
        hint="close other programs, or make the batch smaller",
    )


def _runner(op: RawOp, device: torch.device) -> _Run:
    """The op with made-up content."""
    args, kwargs = arguments(op, device)

    def run() -> object:
        with torch.set_grad_enabled(op.in_grad_mode):
            return op.func(*args, **kwargs)

    return run


def arguments(op: RawOp, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """What to run an op on: halves in floats, zeros in integers.

    Masks choose as many elements as in the step: outputs are as large, and workspaces.
    """
    flat = [_make(leaf, device) for leaf in op.args]
    chosen = _chosen(op)
    if chosen is not None:
        mask = torch.zeros_like(
            flat[chosen.place], memory_format=torch.contiguous_format
        )
        mask.view(-1)[: chosen.elements] = 1
        flat[chosen.place] = mask
    if op.func is torch.ops.aten._grouped_mm.default and flat[2] is not None:
        _spread(*flat[:3])
    given, kwargs = pytree.tree_unflatten(flat, op.spec)
    args = [*given]
    if op.func in _RECURRENT:  # of the buffer that has all weights, traces show one
        weights, buffer = args[1], args[3]
        args[3] = buffer.new_zeros(sum(weight.numel() for weight in weights))
    return args, kwargs


class _Chosen(NamedTuple):
    """What a mask lets through."""

    place: int  # of the mask in the op's flat arguments
    elements: int


def _chosen(op: RawOp) -> _Chosen | None:
    """How many elements a mask let through, as far as shapes tell.

    That is for nothing but one mask: ``nonzero``, indexing, and writing at an index.
    """
    packet = op.func.overloadpacket
    if packet is torch.ops.aten.nonzero:
        return _Chosen(0, op.returned[0].shape[0])
    if packet is not torch.ops.aten.index and packet not in _WRITE_AT_INDEX:
        return None
    (tensor, indices, *values), _ = op.arguments
    given = [(at, one) for at, one in enumerate(indices, 1) if one is not None]
    (place, mask), *others = given
    through = values[0] if values else op.returned[0]
    if others or mask.dtype not in MASK_DTYPES or not through.shape:
        return None  # a number is written to however many there are
    return _Chosen(place, through.numel * mask.numel // max(tensor.numel, 1))


def _input_bytes(op: RawOp) -> int:
    """Of what an op does not read, too: the input of ``empty_like``."""
    return sum(leaf.num_bytes for leaf in op.args if isinstance(leaf, TensorMeta))


def _make(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, TensorMeta):
        return leaf
    geometry = zip(leaf.shape, leaf.stride, strict=True)
    sizes = [size if step else 1 for size, step in geometry]  # unexpanded, to write
    tensor = torch.empty_strided(sizes, leaf.stride, dtype=leaf.dtype, device=device)
    floating = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return tensor.fill_(0.5 if floating else leaf.dtype == torch.bool).expand(
        leaf.shape
    )


def _spread(a: torch.Tensor, b: torch.Tensor, stops: torch.Tensor) -> None:
    """Give every expert the same number of tokens, not none."""
    tokens = a.shape[-1] if a.dim() == b.dim() else a.shape[-2]
    groups = torch.arange(1, len(stops) + 1, device=stops.device)
    stops.copy_(groups * tokens // len(stops))


def _time(job: _Job, run: _Run, device: torch.device) -> float:
    """Seconds of one run, the median of a few."""
    copies = min(COLD_BYTES // max(job.num_bytes, 1), _MOST_COPIES)
    runs = [run, *(job.prepare() for _ in range(copies - 1))]
    outs: list[object] = [None] * len(runs)  # kept for a turn, so that they are cold
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MOST_REPEATS:
        turn = len(times) % len(runs)
        outs[turn] = None
        seconds, outs[turn] = _seconds_of(runs[turn], device)
        times.append(seconds)
        if time.perf_counter() - begin > _PATIENCE_SECONDS:
            break
    return median_low(times)


def _seconds_of(run: _Run, device: torch.device) -> tuple[float, object]:
    """Seconds that the device works, and what comes of it."""
    if device.type != "cuda":
        start = time.perf_counter()
        out = run()
        return time.perf_counter() - start, out
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)  # so that the device never waits for launches
        begin.record()
        out = run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3, out


def launch_seconds(device: torch.device) -> float:
    """What the CPU needs to hand one small op to a GPU."""
    small = torch.zeros(1, device=device)
    small.add_(1)  # the first time loads its kernel
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        small.add_(1)
    seconds = (time.perf_counter() - start) / _LAUNCHES
    torch.cuda.synchronize(device)
    return seconds


def _within(log: AllocatorLog, marks: Mapping[str, str]) -> dict[str, AllocatorLog]:
    """What was allocated during the first run of every op."""
    times = [when for when, _ in log.events]
    found: dict[str, AllocatorLog] = {}
    for key, mark in marks.items():
        start, stop = log.spans[mark]
        first, last = bisect_left(times, start), bisect_left(times, stop)
        found[key] = AllocatorLog(log.events[first:last])
    return found


def _rates(ops: Mapping[str, RawOp], costs: Mapping[str, Cost]) -> tuple[float, float]:
    """Bytes and FLOPs per second that the measured ops reached at best."""
    bandwidth, flop_rate = 1e9, 1e9
    for key, cost in costs.items():
        seconds = max(cost.seconds, 1e-9)
        if ops[key].moved_bytes > 1 << 22:
            bandwidth = max(bandwidth, ops[key].moved_bytes / seconds)
        flop_rate = max(flop_rate, ops[key].flops / seconds)
    return bandwidth, flop_rate


def _key(op: RawOp) -> str:
    return f"{op.func}{op.args}{op.in_grad_mode}{_chosen(op) or ''}"
