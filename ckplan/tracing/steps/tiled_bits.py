"""Test whether a head gives the same bits in tiles, where the step will train.

Which kernel sums in which order depends on shapes, dtype, device and threads, so the
tiles that solvers choose from are compared with autograd on random values of the head's
own shape. Results are kept with the measured costs, which belong to a device, a version
of torch and a number of threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ckplan.applying.tiling import Bits, check_bits
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import TiledBits
from ckplan.simulating.heads import HeadOps, find_head
from ckplan.solving.tiled_heads import COUNTS, find_tileable_head
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.training.failures import first_line, is_out_of_memory
from ckplan.training.free_memory import free_bytes
from ckplan.training.warm_up import warm_up_vector_kernels

MARGIN = 4.0
"""A plan states as many times the difference found: other values, other rounding."""
LONGEST_SECONDS = 20.0
"""A test that takes longer is left out."""
_PREFIXES = "bits of ", "share of "  # keys of kept tests
_RUNS = 3 + 4 * len(COUNTS)  # products of the head: plain, and in tiles
_PLAIN_TENSORS = 6  # of the size of log-probabilities, at once
_SOFT_CAP, _SMOOTHING = 30.0, 0.1


def with_tested_tiles(
    graph: Graph, device: torch.device, cache: CostCache, progress: Progress | None
) -> Graph:
    """Add to a graph whether its head gives the same bits in tiles.

    A head that is too large to be tested gets a note; a graph without one stays.

    Args:
        graph: A step that was recorded for this machine.
        device: Where it trains.
        cache: Of the costs of that device.
        progress: Called with the progress.
    """
    try:
        call, *_ = find_tileable_head(graph, close=True)
    except PlanError:
        return graph
    head = find_head(graph, call)
    keys = {n: _key(head, n) for n in COUNTS}
    known = known_tests(cache, keys.values())
    wanted = [n for n in COUNTS if keys[n] not in known]
    if wanted:
        why = _too_large(graph, head, device)
        if why:
            note = f"tiles of {graph.calls[call]}: bits not tested: {why}"
            return replace(graph, notes=(*graph.notes, note))
        (progress or (lambda what, done, total: None))("testing tiles", 0, 0)
        try:
            tests = {keys[n]: _test(head, device, n) for n in wanted}
            known |= learn_tests(cache, tests)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            note = f"tiles of {graph.calls[call]}: bits not tested: {first_line(error)}"
            return replace(graph, notes=(*graph.notes, note))
    found = [_record(call, n, known[keys[n]]) for n in COUNTS]
    return replace(graph, tiled=(*graph.tiled, *found))


def _record(call: int, count: int, test: TileTest) -> TiledBits:
    threads = torch.get_num_threads()
    return TiledBits(call, count, count, test.difference, threads, test.share)


class TileTest(NamedTuple):
    """What a test of tiles found, beyond whether bits are the same."""

    difference: float  # that a plan states
    share: float  # seconds in tiles, of those whole; 0: not timed

    @classmethod
    def of(cls, *bits: Bits) -> TileTest:
        """The worst of several tests."""
        far = MARGIN * max(one.difference for one in bits)
        return cls(far, max(one.share for one in bits))


def known_tests(cache: CostCache, keys: Collection[str]) -> dict[str, TileTest]:
    """The tests that were kept; both numbers stand in place of seconds."""
    far, shares = (cache.known([p + key for key in keys]) for p in _PREFIXES)
    return _as_tests(far, shares, keys)


def learn_tests(cache: CostCache, tests: Mapping[str, TileTest]) -> dict[str, TileTest]:
    """Keep tests; returns them combined with earlier ones."""
    far, shares = (
        cache.learn(
            {p + key: Cost(test[n], 0, 0, measured=True) for key, test in tests.items()}
        )
        for n, p in enumerate(_PREFIXES)
    )
    return _as_tests(far, shares, tests)


def _as_tests(
    far: Mapping[str, Cost], shares: Mapping[str, Cost], keys: Collection[str]
) -> dict[str, TileTest]:
    first, second = _PREFIXES
    return {
        key: TileTest(far[first + key].seconds, shares[second + key].seconds)
        for key in keys
        if first + key in far and second + key in shares
    }


def _test(head: HeadOps, device: torch.device, count: int) -> TileTest:
    warm_up_vector_kernels()
    found = check_bits(
        (head.tokens, head.features, head.words),
        getattr(torch, head.dtype),
        device=device,
        bias=head.has_bias,
        tiles=(count, count),
        upcast=head.upcast,
        shift=head.is_shifted,
        soft_cap=_SOFT_CAP if head.is_capped else None,
        label_smoothing=_SMOOTHING if head.has_sums else 0.0,
    )
    return TileTest.of(found)


def _key(head: HeadOps, count: int) -> str:
    """What the bits of a head in so many tiles depend on."""
    shape = head.tokens, head.features, head.words
    flags = head.has_bias, head.upcast, head.is_shifted, head.is_capped, head.has_sums
    return f"tiles {count} {shape} {head.dtype} {flags}"


def _too_large(graph: Graph, head: HeadOps, device: torch.device) -> str:
    """Why a head is not tested, in words; "" if it is."""
    seconds = _RUNS * graph.ops[head.product].seconds
    if seconds > LONGEST_SECONDS:
        return f"it would take {seconds:.0f} s"
    needed = _PLAIN_TENSORS * head.tokens * head.words * head.log_bytes
    if needed > free_bytes(device):
        return "the logits do not fit in memory"
    return ""
