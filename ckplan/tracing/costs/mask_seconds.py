"""Seconds that generated code takes for random numbers and masks.

On a CPU, Inductor draws one number at a time, writes truth values far slower than their
bytes say, and reads them slowly, too; bits of them take less. How slowly differs
between machines, and whether a mask is kept or drawn again depends on it. So seven
small functions are compiled, and run by turns, in a process of their own, which keeps
its memory: the compiler may be at work in this one. The first three processes that ask
do so; the least that they find counts, since other programs make all of it longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
from torch.nn import functional

from ckplan.encodings import pack_planes, unpack_planes
from ckplan.tracing.costs.cost_cache import Cost, cost_cache
from ckplan.tracing.costs.spread import OtherPrograms
from ckplan.tracing.costs.timing import seconds_of

_CPU = torch.device("cpu")
_ATEN = torch.ops.aten
_ROWS, _WIDTH = 1 << 11, 256  # few enough for the caches, as what a layer makes
_ROUNDS, _DROPPED = 15, 2
_PATIENCE_SECONDS = 300.0
_OCCASIONS = 3
_RATE, _EPS = 0.1, 1e-5  # of dropout, and of a norm
_Tensors: TypeAlias = tuple[torch.Tensor, ...]
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Of glibc: what was freed is used again. Page faults of random numbers before they are
packed, or of results, take as long as packing does, and differ from run to run."""
_CODE = """import sys
sys.path[:] = {path!r}
from ckplan.tracing.costs.mask_seconds import main
main({threads})"""


@dataclass(frozen=True, slots=True)
class MaskSeconds:
    """Seconds of one number, on one core."""

    draw: float  # of a random number
    write: float  # of a truth value to memory
    read: float  # of one from memory, in backward
    pack: float  # of a truth value to a bit, in memory
    unpack: float  # of one from its bit, in backward


ESTIMATED = MaskSeconds(draw=10e-9, write=12e-9, read=3e-9, pack=4e-9, unpack=5e-9)
"""As measured on an AMD EPYC; taken where nothing can be compiled."""
KEYS = tuple(f"{one.name} a number in compiled code" for one in fields(MaskSeconds))
"""Names in the cost cache."""
_found: dict[tuple[Path | None, int], MaskSeconds] = {}


def mask_seconds() -> MaskSeconds:
    """The seconds on this machine, with the threads that torch has."""
    cache, threads = cost_cache(_CPU), torch.get_num_threads()
    place = cache.path, threads
    if place not in _found:
        kept = [cache.known_runs(key) for key in KEYS]
        few, others = min(map(len, kept)) < _OCCASIONS, OtherPrograms()
        if few and (new := _measured_apart(threads)) is not None:
            costs = (Cost(one, 0, 0, measured=True) for one in astuple(new))
            found = dict(zip(KEYS, costs, strict=True))
            cache.learn(found, busy=others.are_busy())
            kept = [(*runs, one) for runs, one in zip(kept, astuple(new), strict=True)]
        _found[place] = MaskSeconds(*map(min, kept)) if all(kept) else ESTIMATED
    return _found[place]


def _measured_apart(threads: int) -> MaskSeconds | None:
    """What another process measures; None if it cannot."""
    code = _CODE.format(path=sys.path, threads=threads)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **_KEEP_MEMORY},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE_SECONDS,
        )
        return MaskSeconds(*json.loads(ended.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return None


def main(threads: int) -> None:
    """Measure in this process, and print the seconds."""
    torch.set_num_threads(threads)
    print(json.dumps(astuple(measure(threads))))


def measure(
    threads: int, compiled: Callable[..., Callable[..., object]] = torch.compile
) -> MaskSeconds:
    """Measure with the threads that torch has.

    Args:
        threads: How many these are.
        compiled: Compiles a function.
    """
    x = torch.randn(_ROWS, _WIDTH)
    given = x, x.softmax(-1), torch.rand_like(x) > _RATE
    bits = pack_planes(given[-1])
    forward = [partial(compiled(f), *given) for f in (_keeping, _packing, _dropping)]
    forward.append(partial(compiled(_plain), *given))
    backward = [partial(compiled(f), *given) for f in (_reading, _again)]
    backward.append(partial(compiled(_unpacking), x, given[1], bits))
    with torch.no_grad():
        rounds = [
            [seconds_of(one, _CPU)[0] for one in (*forward, *backward)]
            for _ in range(_ROUNDS + _DROPPED)
        ]
    return prices_of(rounds[_DROPPED:], threads / x.numel())


def prices_of(rounds: Sequence[Sequence[float]], scale: float) -> MaskSeconds:
    """Differences of what was run by turns.

    Args:
        rounds: Seconds of forward that keeps a mask, keeps its bits, drops it, and has
            none, and of backward that reads it, draws it again, and reads its bits.
        scale: Of these to one number on one core.
    """
    draw = median(drops - plain for _, _, drops, plain, *_ in rounds)
    write = median(keeps - drops for keeps, _, drops, *_ in rounds)
    pack = median(packs - drops for _, packs, drops, *_ in rounds)
    again = median(draws - reads for *_, reads, draws, _ in rounds)
    instead = median(draws - unpacks for *_, draws, unpacks in rounds)
    found = draw, write, draw - again, pack, draw - instead
    return MaskSeconds(*(max(seconds, 0.0) * scale for seconds in found))


# What layers do about a mask in training, most of whose values are true: how fast they
# are read and written depends on that, and on what else is in the same loop, as no loop
# that writes truth values is vectorized. So a norm stores what its backward needs, and
# that of a softmax reads the mask in both of its loops.


def _keeping(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> _Tensors:
    dropped, kept = torch.native_dropout(x, _RATE, True)
    return *_normed(y + dropped), kept


def _packing(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> _Tensors:
    *made, kept = _keeping(x, y, mask)
    return *made, pack_planes(kept)


def _dropping(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> _Tensors:
    return _normed(y + functional.dropout(x, _RATE))


def _plain(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> _Tensors:
    return _normed(y + x)


def _normed(x: torch.Tensor) -> _Tensors:
    """A layer norm with weights, and what its backward reads."""
    normed, _, inverse = torch.native_layer_norm(x, (_WIDTH,), None, None, _EPS)
    return normed * x[0] + x[1], normed, inverse / _WIDTH


def _reading(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> object:
    gradient = _ATEN.native_dropout_backward(x, mask, 1 / (1 - _RATE))
    return _ATEN._softmax_backward_data(gradient, y, -1, x.dtype)


def _again(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> object:
    return _reading(x, y, torch.rand_like(x) > _RATE)


def _unpacking(x: torch.Tensor, y: torch.Tensor, bits: torch.Tensor) -> object:
    return _reading(x, y, unpack_planes(bits, x.shape))
