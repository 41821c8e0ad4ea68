"""Measure the CPU time that applying a plan adds to the ops themselves.

A chain of tiny ops runs unplanned, under a plan that saves every tensor, and under a
plan that saves every second tensor; the differences give the overheads. In a large
step, kernels evict Python's data from the processor's cache between two ops, which
makes Python several times slower. So the chain reads as many bytes between its ops.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache as cache_once
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import nn

from ckplan import __version__, applying
from ckplan.applying import apply
from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.tracing.recording.recording import RawOp

_NUM_OPS = 16
_DROPPED_STEPS, _STEPS = 2, 5
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 24
_OPS_BETWEEN = 2  # per saved tensor: an op that saves one, and an op that does not
_CHAIN, _STEP = "engine", "engine in a step"  # where its costs were measured


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
    seconds = costs.watch_seconds, costs.rerun_seconds
    return _learn(_STEP, seconds, ops, device, cache)


def _known(
    source: str, ops: Sequence[MovesBytes], device: torch.device, cache: CostCache
) -> EngineCosts | None:
    keys = _keys(source, _flushed_bytes(ops, device))
    known = cache.known(keys)
    if len(known) < len(keys):
        return None
    return EngineCosts(*(known[key].seconds for key in keys))


def _learn(
    source: str,
    seconds: tuple[float, float],
    ops: Sequence[MovesBytes],
    device: torch.device,
    cache: CostCache,
) -> EngineCosts:
    keys = _keys(source, _flushed_bytes(ops, device))
    costs = {
        k: Cost(s, 0, 0, measured=True) for k, s in zip(keys, seconds, strict=True)
    }
    found = cache.learn(costs)
    return EngineCosts(*(found[key].seconds for key in keys))


def _keys(source: str, flushed_bytes: int) -> list[str]:
    """Keys in the cost cache; another engine has other ones."""
    engine = engine_digest()
    return [f"{source} {engine} {w} {flushed_bytes}" for w in ("watch", "rerun")]


@cache_once
def engine_digest() -> str:
    """Digest of the source of the engine, so that none has the costs of another.

    Without source, the version stands for it.
    """
    found = hashlib.sha256(__version__.encode())
    for path in sorted(Path(applying.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def on_host(graph: Graph, host: float) -> Graph:
    """The step of a GPU, launched by another processor.

    Args:
        graph: The step as this machine would launch it.
        host: Speed of the other processor, relative to the one of this machine.
    """
    if host == 1:
        return graph
    engine = EngineCosts(*(seconds / host for seconds in astuple(graph.engine)))
    ops = (replace(op, launch_seconds=op.launch_seconds / host) for op in graph.ops)
    note = f"launches and engine: of a processor {host:g} times as fast as this one"
    return replace(graph, ops=tuple(ops), engine=engine, notes=(*graph.notes, note))


def _flushed_bytes(ops: Sequence[MovesBytes], device: torch.device) -> int:
    """Bytes moved from one saved tensor to the next, rounded up to a power of 2."""
    if device.type != "cpu":
        return 0
    moved_bytes = _OPS_BETWEEN * sum(op.moved_bytes for op in ops) // max(len(ops), 1)
    if moved_bytes < _LEAST_BYTES:
        return 0
    return min(1 << (moved_bytes - 1).bit_length(), _MOST_BYTES)


def _measure(flushed_bytes: int) -> tuple[float, float]:
    """Seconds per saved tensor, and per recomputed op."""
    ops = [OpName("", "sin", occurrence) for occurrence in range(_NUM_OPS)]
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        ways = [_Chain(flushed_bytes) for _ in range(3)]
        for way, saved in zip(ways[1:], (ops, ops[1::2]), strict=True):
            apply(way, Plan(regions=(PlannedRegion("links", save=tuple(saved)),)))
        times: list[list[float]] = [[] for _ in ways]
        for number in range(_DROPPED_STEPS + _STEPS):
            for way, found in zip(ways, times, strict=True):
                found.append(way.step_seconds(first=number == 0))
    unplanned, watched, rerun = (median(found[_DROPPED_STEPS:]) for found in times)
    return (
        max(watched - unplanned, 0.0) / _NUM_OPS,
        max(rerun - watched, 0.0) / len(ops[::2]),
    )


class _Chain(nn.Module):
    """A step of tiny ops that each save their input."""

    def __init__(self, flushed_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
        self.links = _Links(flushed_bytes)

    def step_seconds(self, *, first: bool) -> float:
        """Seconds of forward and backward without the flushes of the cache."""
        links = self.links
        links.cold, links.flush_seconds = not first, 0.0
        start = time.perf_counter()
        links(self.weight * 1.0).sum().backward()
        return time.perf_counter() - start - links.flush_seconds


class _Links(nn.Module):
    def __init__(self, flushed_bytes: int) -> None:
        super().__init__()
        self.cold = False  # the recording of the first forward must not contain flushes
        self.flush_seconds = 0.0
        self._flushed = torch.zeros(
            flushed_bytes // 4, dtype=torch.float32, device="cpu"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_NUM_OPS):
            with torch._C.DisableTorchFunction():
                self._flush()
                x.register_hook(self._flush)
            x = torch.sin(x)
        return x

    def _flush(self, gradient: torch.Tensor | None = None) -> None:
        del gradient
        start = time.perf_counter()
        if self.cold:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._flushed.sum()
        self.flush_seconds += time.perf_counter() - start
