"""Measure the CPU time that applying a plan adds to the ops themselves.

A chain of tiny ops runs unplanned; under plans that drop every tensor, as programs of
one region and of several, and with the whole module run again; and under one that keeps
an op of every link. In one more, values decide how large a tensor is, so each forward
is recorded. What forward and backward take longer gives the overheads. In a
large step, kernels evict Python's data from the processor's cache between two ops,
which makes Python several times slower. So the chain reads as many bytes between its
ops, and more between its links: what runs once in a region was evicted by all ops since
the last one. Seconds are those of the thread, where the system counts them: other
programs take none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ckplan.applying import apply
from ckplan.files import source_digest
from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.tracing.costs.spread import undisturbed
from ckplan.tracing.recording.recording import RawOp

_NUM_LINKS, _OPS_PER_LINK = 4, 4
_NUM_OPS = _NUM_LINKS * _OPS_PER_LINK
_DROPPED_STEPS, _STEPS = 2, 7
_FINE_SECONDS = 1e-6  # resolution of a clock that single ops need
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 24
_OPS_BETWEEN = 2  # per saved tensor: an op that saves one, and an op that does not
_REGIONS = 8  # of a forward, to say what ops evict between two of them
_MOST_BETWEEN_REGIONS = 1 << 26  # more than most processors' caches
_CHAIN, _STEP = "engine in a chain", "engine in a step"  # where its costs were measured


class MovesBytes(Protocol):
    """An op of a recording or of a graph."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""


def calibrate_engine(
    ops: Sequence[RawOp], device: torch.device, cache: CostCache
) -> EngineCosts:
    """Look up the engine's overheads in the cost cache, or measure them.

    Costs of training steps (``keep_engine_costs``) go before those of the chain.

    Args:
        ops: Ops of the forward that is planned; the bytes that they move determine how
            much of the processor's cache they evict.
        device: Device of the step; kernels on a GPU evict nothing from the CPU's cache.
        cache: The cost cache of that device.
    """
    for source in (_STEP, _CHAIN):
        found = _known(source, ops, device, cache)
        if found is not None:
            return found
    return _learn(_CHAIN, _measure(_flushed_bytes(ops, device)), ops, device, cache)


def known_engine_costs(
    ops: Sequence[MovesBytes], device: torch.device, cache: CostCache
) -> tuple[EngineCosts, ...]:
    """The engine's overheads in the cost cache: of training steps, of the chain."""
    found = (_known(source, ops, device, cache) for source in (_STEP, _CHAIN))
    return tuple(costs for costs in found if costs is not None)


def keep_engine_costs(
    costs: EngineCosts,
    ops: Sequence[MovesBytes],
    device: torch.device,
    cache: CostCache,
) -> EngineCosts:
    """Keep overheads that were found in training steps of such ops.

    They count for steps whose ops evict as much of the processor's cache.

    Returns:
        The median of the last few runs, which profiles use from now on.
    """
    return _learn(_STEP, _seconds_of(costs), ops, device, cache)


def _known(
    source: str, ops: Sequence[MovesBytes], device: torch.device, cache: CostCache
) -> EngineCosts | None:
    keys = _keys(source, _flushed_bytes(ops, device))
    known = cache.known(keys)
    if len(known) < len(keys):
        return None
    return _costs_of(known[key].seconds for key in keys)


def _learn(
    source: str,
    seconds: Sequence[float],
    ops: Sequence[MovesBytes],
    device: torch.device,
    cache: CostCache,
) -> EngineCosts:
    keys = _keys(source, _flushed_bytes(ops, device))
    costs = {
        k: Cost(s, 0, 0, measured=True) for k, s in zip(keys, seconds, strict=True)
    }
    found = cache.learn(costs)
    return _costs_of(found[key].seconds for key in keys)


def _keys(source: str, flushed: Flushed) -> list[str]:
    """Keys in the cost cache; another engine has other ones."""
    evicted = f"{flushed.per_tensor} {flushed.per_region}"
    engine = engine_digest()
    return [f"{source} {engine} {what} {evicted}" for what in _MEASURED_COSTS]


_MEASURED_COSTS = ("watch", "rerun", "module", "region", "path", "record")


def _seconds_of(costs: EngineCosts) -> tuple[float, ...]:
    return tuple(getattr(costs, f"{what}_seconds") for what in _MEASURED_COSTS)


def _costs_of(seconds: Iterable[float]) -> EngineCosts:
    names = (f"{what}_seconds" for what in _MEASURED_COSTS)
    return EngineCosts(**dict(zip(names, seconds, strict=True)))


def engine_digest() -> str:
    """Digest of the source of the engine, so that none has the costs of another."""
    return source_digest("applying")[:16]


def on_host(graph: Graph, host: float) -> Graph:
    """The step of a GPU, launched by another processor.

    Args:
        graph: The step as this machine would launch it.
        host: Speed of the other processor, relative to the one of this machine.
    """
    if host == 1:
        return graph
    engine = graph.engine.times(1 / host)
    ops = (replace(op, launch_seconds=op.launch_seconds / host) for op in graph.ops)
    note = f"launches and engine: of a processor {host:g} times as fast as this one"
    return replace(graph, ops=tuple(ops), engine=engine, notes=(*graph.notes, note))


class Flushed(NamedTuple):
    """Bytes that the ops of a step move, rounded up to powers of 2."""

    per_tensor: int  # from one saved tensor to the next
    per_region: int  # from one region to the next


def _flushed_bytes(ops: Sequence[MovesBytes], device: torch.device) -> Flushed:
    if device.type != "cpu":
        return Flushed(0, 0)
    moved_bytes = sum(op.moved_bytes for op in ops)
    return Flushed(
        _rounded(_OPS_BETWEEN * moved_bytes // max(len(ops), 1), _MOST_BYTES),
        _rounded(moved_bytes // _REGIONS, _MOST_BETWEEN_REGIONS),
    )


def _rounded(moved_bytes: int, most: int) -> int:
    if moved_bytes < _LEAST_BYTES:
        return 0
    return min(1 << (moved_bytes - 1).bit_length(), most)


def _measure(flushed: Flushed) -> tuple[float, ...]:
    """Seconds per saved tensor, per op that reruns, and so on: ``_MEASURED_COSTS``."""
    names = tuple(OpName(str(link), "sin") for link in range(_NUM_LINKS))
    plans = [
        Plan(regions=(PlannedRegion("links"),)),
        Plan(regions=(PlannedRegion(f"links.[0..{_NUM_LINKS - 1}]"),)),
        Plan(regions=(PlannedRegion("links", "rerun"),)),
        Plan(regions=(PlannedRegion("links", save=names),)),
        Plan(regions=(PlannedRegion("links"),)),
    ]
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        ways = [_Chain(flushed, varies=n == len(plans)) for n in range(1 + len(plans))]
        for way, plan in zip(ways[1:], plans, strict=True):
            apply(way, plan)
        times: list[list[tuple[float, float]]] = [[] for _ in ways]
        for number in range(_DROPPED_STEPS + _STEPS):
            for way, found in zip(ways, times, strict=True):
                found.append(way.step_seconds(first=number == 0))
    (forward, backward), *planned = (
        tuple(map(undisturbed, zip(*found[_DROPPED_STEPS:], strict=True)))
        for found in times
    )
    added = [(one - forward, other - backward) for one, other in planned]
    program, several, module, named, varied = added
    region = max(sum(several) - sum(program), 0.0) / (_NUM_LINKS - 1)
    watch = max(program[0] - region, 0.0) / _NUM_OPS
    rerun = max(program[1] / _NUM_OPS - ways[0].op_seconds(), 0.0)
    more = max(sum(module) - sum(program), 0.0) / _NUM_OPS
    path = max(named[0] - program[0], 0.0) / _NUM_LINKS
    record = max(sum(varied) - sum(program), 0.0) / (2 * _NUM_OPS + _NUM_LINKS)
    return watch, rerun, more, region, path, record


def _thread_clock() -> Callable[[], float]:
    """The clock of this thread's own time, or else of the wall."""
    try:
        fine = time.get_clock_info("thread_time").resolution <= _FINE_SECONDS
    except (AttributeError, ValueError):
        fine = False
    return time.thread_time if fine else time.perf_counter


_clock = _thread_clock()


class _Chain(nn.Module):
    """A step of tiny ops that each save their input."""

    def __init__(self, flushed: Flushed, *, varies: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
        self._cache = _Evicted(flushed)
        links = (_Link(self._cache, varies=varies) for _ in range(_NUM_LINKS))
        self.links = nn.Sequential(*links)

    def step_seconds(self, *, first: bool) -> tuple[float, float]:
        """Seconds of forward and of backward, without the flushes of the cache."""
        cache = self._cache
        cache.cold, cache.seconds = not first, 0.0  # the first forward is recorded
        start = _clock()
        loss = self.links(self.weight * 1.0).sum()
        half, flushes = _clock(), cache.seconds
        loss.backward()
        end = _clock()
        return half - start - flushes, end - half - (cache.seconds - flushes)

    def op_seconds(self) -> float:
        """Seconds of an op alone."""
        taken, x = [], self.weight.detach()
        for _ in range(_NUM_OPS):
            self._cache.after_op()
            start = _clock()
            torch.sin(x)
            taken.append(_clock() - start)
        return median(taken)


class _Evicted:
    """The processor's cache: what ops of a large step do to it."""

    def __init__(self, flushed: Flushed) -> None:
        self.cold = False
        self.seconds = 0.0
        self._per_tensor, self._per_region = (
            torch.zeros(size // 4, dtype=torch.float32, device="cpu")
            for size in flushed
        )

    def after_op(self, gradient: torch.Tensor | None = None) -> None:
        """Read as many bytes as the ops between two saved tensors."""
        del gradient
        self._read(self._per_tensor)

    def after_link(self, gradient: torch.Tensor | None = None) -> None:
        """Read as many bytes as the ops between two regions."""
        del gradient
        self._read(self._per_region)

    def _read(self, flushed: torch.Tensor) -> None:
        start = _clock()
        if self.cold:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                flushed.sum()
        self.seconds += _clock() - start


class _Link(nn.Module):
    def __init__(self, cache: _Evicted, *, varies: bool) -> None:
        super().__init__()
        self._cache = (cache,)  # in a tuple: not state that a rerun restores
        self._varies = varies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (cache,) = self._cache
        if self._varies:
            x.detach().nonzero()  # values decide how much it returns
        for _ in range(_OPS_PER_LINK):
            with torch._C.DisableTorchFunction():
                cache.after_op()
                x.register_hook(cache.after_op)
            x = torch.sin(x).view(-1)  # most models make twice as many calls
        with torch._C.DisableTorchFunction():
            cache.after_link()
            x.register_hook(cache.after_link)
        return x
