"""A head and its loss of 131,072 words on 4,096 tokens: whole, in tiles, in chunks.

Forward, loss and backward of one linear layer, 768 wide, on the CPU with one thread, in
float32, and in bfloat16 with logits cast to float32. Four ways: the plain computation,
``ckplan.tiled_cross_entropy`` in 32 tiles of tokens and 64 of the vocabulary, chunks of
256 tokens whose logits are made again in backward (``torch.utils.checkpoint``), and the
chunks of torch's own ``linear_cross_entropy``. Seconds are those of the processor, the
median of three rounds in turns. The peak is that of torch's allocator, without the
operands; it has the gradients of hidden state and weight. "Same bits" is of loss and
both gradients.

    python scripts/head_tiles.py
    python scripts/head_tiles.py --set words=8192 --set tokens=512

Exit code 1 if tiles take more than a tenth of the plain peak, 1.4 of its time or more,
or give other bits.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import _measuring as measuring

from ckplan.training.loading import parse_options
from ckplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch import Tensor

TILES_OF = (32, 64)  # tokens, vocabulary
SETTINGS = {"words": 131_072, "tokens": 4096, "width": 768, "rounds": 3}
DTYPES = ("float32", "bfloat16")
PLAIN, TILES, CHUNKS, FUSED = (
    *("plain", "tiles", "chunks of 256 tokens", "torch's linear_cross_entropy"),
)
CHUNK = 256  # tokens
MOST_PEAK, MOST_TIME = 0.1, 1.4  # of the plain computation
HEADERS = (
    *("dtype", "way", "peak", "of plain", "processor time", "of plain", "same bits"),
)


@dataclass(frozen=True)
class Row:
    """One way in one dtype."""

    dtype: str
    way: str
    peak_bytes: int
    seconds: float
    is_same: bool
    peak_share: float
    time_share: float

    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            self.dtype,
            self.way,
            format_bytes(self.peak_bytes),
            f"{self.peak_share:.3f}",
            format_seconds(self.seconds),
            f"{self.time_share:.2f}",
            "yes" if self.is_same else "no",
        ]


@dataclass(frozen=True)
class Run:
    """One forward and backward of the loss."""

    peak_bytes: int
    seconds: float  # of the processor
    digest: str  # of loss and gradients


def main() -> int:
    """Measure all ways, print the table, write it."""
    import torch

    args = measuring.make_parser(__doc__, settings=True).parse_args()
    sizes = SETTINGS | parse_options(args.settings)
    torch.set_num_threads(1)
    rows = [row for dtype in DTYPES for row in rows_of(dtype, sizes)]
    ways = {row.way for row in rows}
    missing = [f"torch {torch.__version__} has no {FUSED[8:]}."] * (FUSED not in ways)
    report = measuring.Report(
        "head_tiles",
        "A head and its loss in tiles",
        __doc__,
        [measuring.make_table(HEADERS, [r.cells() for r in rows], texts=2), *missing],
        list(broken(rows)),
    )
    return measuring.finish(report, args)


def rows_of(dtype: str, sizes: Mapping[str, int]) -> Iterator[Row]:
    """Every way in one dtype; the plain one first."""
    import torch

    torch.manual_seed(measuring.SEED)
    tokens, words, width = sizes["tokens"], sizes["words"], sizes["width"]
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, width).to(kind).requires_grad_()
    weight = (torch.randn(words, width) * 3 / width**0.5).to(kind).requires_grad_()
    target = torch.randint(words, (tokens,))
    found: dict[str, list[Run]] = {}
    for turn in range(sizes["rounds"]):
        for way, loss_of in ways():
            measuring.say(f"{dtype}, {way}, round {turn + 1}")
            one = run(loss_of, hidden, weight, target)
            found.setdefault(way, []).append(one)
    seconds = {
        way: statistics.median(one.seconds for one in runs)
        for way, runs in found.items()
    }
    plain = found[PLAIN][0]
    for way, runs in found.items():
        peak_bytes = max(one.peak_bytes for one in runs)
        yield Row(
            dtype,
            way,
            peak_bytes,
            seconds[way],
            all(one.digest == plain.digest for one in runs),
            peak_bytes / plain.peak_bytes,
            seconds[way] / seconds[PLAIN],
        )


def ways() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Every way, as a function of hidden state, weight and target."""
    from torch import nn
    from torch.nn import functional

    import ckplan

    yield PLAIN, plain
    yield TILES, partial(ckplan.tiled_cross_entropy, tiles=TILES_OF)
    yield CHUNKS, chunked
    if hasattr(functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        yield FUSED, partial(functional.linear_cross_entropy, options=options)


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss of whole logits."""
    from torch.nn import functional

    return functional.cross_entropy((hidden @ weight.t()).float(), target)


def chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean of the losses of chunks, whose logits are made again in backward."""
    from torch.utils.checkpoint import checkpoint

    losses = [
        checkpoint(_sum, rows, weight, labels, use_reentrant=False)
        for rows, labels in zip(hidden.split(CHUNK), target.split(CHUNK), strict=True)
    ]
    loss: Tensor = sum(losses[1:], losses[0]) / len(target)
    return loss


def _sum(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from torch.nn import functional

    logits = (hidden @ weight.t()).float()
    return functional.cross_entropy(logits, target, reduction="sum")


def run(
    loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor
) -> Run:
    """One forward and backward of the loss."""
    from ckplan.training.allocator import log_allocations

    hidden.grad = weight.grad = None
    gc.collect()
    begun = time.process_time()
    with log_allocations() as log:
        loss = loss_of(hidden, weight, target)
        loss.backward()
    seconds = time.process_time() - begun
    digest = hashlib.sha256()
    for one in (loss.detach(), hidden.grad, weight.grad):
        assert one is not None
        digest.update(one.float().numpy().tobytes())
    return Run(log.peak_bytes, seconds, digest.hexdigest())


def broken(rows: list[Row]) -> Iterator[str]:
    """Where the claim does not hold."""
    for row in (row for row in rows if row.way == TILES):
        if row.peak_share > MOST_PEAK:
            yield f"{row.dtype}: tiles take {row.peak_share:.3f} of the plain peak"
        if row.time_share >= MOST_TIME:
            yield f"{row.dtype}: tiles take {row.time_share:.2f} of the plain time"
        if not row.is_same:
            yield f"{row.dtype}: tiles give other bits"


if __name__ == "__main__":
    measuring.run(main)
