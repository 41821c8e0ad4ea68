"""Whether tiles of a head give autograd's own bits: tested, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckplan.applying.tiling.cross_entropy import tiled_cross_entropy
from ckplan.errors import ApplyError

SAME, CLOSE = "same", "close"
_MOST_ROUNDS, _AGAIN_SECONDS = 3, 1.0  # more runs, and what they may take together
_SCALE = 3.0  # standard deviation of the tested logits, as of a model that has learnt


@dataclass(frozen=True, slots=True)
class Bits:
    """What a test of one shape found."""

    bits: str  # SAME or CLOSE
    difference: float  # largest, relative to the largest value of its tensor
    where: str  # name of the result; "" if all are the same
    threads: int  # that the test ran with
    share: float = 0.0  # seconds of tiles, of plain ones; 0: not timed, as on a GPU

    def __str__(self) -> str:
        """One line."""
        at = f", {self.difference:.1e} in {self.where}" if self.where else ""
        return f"{self.bits}{at} ({self.threads} threads)"


def plain_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    upcast: bool = True,
    shift: bool = False,
) -> Tensor:
    """What ``tiled_cross_entropy`` computes, with the logits whole.

    Args and the result are those of ``tiled_cross_entropy``.
    """
    logits = F.linear(hidden, weight, bias)
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    if upcast:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if shift:
        logits, target = logits[..., :-1, :].contiguous(), target[..., 1:].contiguous()
    loss = F.cross_entropy(
        logits.view(-1, logits.shape[-1]),
        target.reshape(-1),
        weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.view(target.shape) if reduction == "none" else loss


def check_bits(
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    device: str | torch.device = "cpu",
    threads: int | None = None,
    bias: bool = False,
    tiles: tuple[int, int] = (16, 16),
    seed: int = 0,
    **options: Any,
) -> Bits:
    """Compare loss and gradients of tiles with those of autograd, on random values.

    Which kernel sums in which order depends on shapes, dtype, device and threads, so
    test what you train with. The plain computation has to fit in memory.

    Args:
        shape: Tokens, features, words.
        dtype: Of hidden and weight.
        device: Where to test.
        threads: Threads of kernels on the CPU; None for as many as now.
        bias: Whether the head has a bias.
        tiles: As for ``tiled_cross_entropy``.
        seed: Of the random values; the state of the generators is kept.
        options: Other options of ``tiled_cross_entropy``.

    Returns:
        ``same``, or ``close`` with the largest difference.

    Raises:
        ApplyError: A size is below 1.
    """
    if min(shape) < 1:
        raise ApplyError(
            f"cannot compare losses of the shape {shape}",
            needed="tokens, features and words, 1 or more of each",
            hint="ckplan.check_bits((64, 64, 1000))",
        )
    with _threads(threads):
        operands, target = _random_operands(shape, dtype, torch.device(device), seed)
        if not bias:
            operands.pop("bias")
        return compared(
            partial(_gradients, plain_cross_entropy, operands, target, options),
            partial(
                _gradients,
                tiled_cross_entropy,
                operands,
                target,
                {**options, "tiles": tiles},
            ),
        )


def _random_operands(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    tokens, features, words = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*sizes, generator=generator) * scale
        return made.to(device, dtype)

    operands = {
        "hidden": normal(tokens, features),
        "weight": normal(words, features, scale=_SCALE / features**0.5),
        "bias": normal(words),
    }
    target = torch.randint(0, words, (tokens,), generator=generator)
    return operands, target.to(device)


def _gradients(
    function: Callable[..., Tensor],
    operands: dict[str, Tensor],
    target: Tensor,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Loss and gradients by name."""
    leaves = {k: v.detach().requires_grad_() for k, v in operands.items()}
    loss = function(**leaves, target=target, **options)
    loss.sum().backward()
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": loss.detach(), **found}


Results = dict[str, Tensor]  # by name


def compared(
    run_plain: Callable[[], Results], run_tiled: Callable[[], Results]
) -> Bits:
    """How far results are from the plain ones, which is farthest, and their seconds."""
    plain, first = _timed(run_plain)
    found, second = _timed(run_tiled)
    for _ in range(min(_MOST_ROUNDS, int(_AGAIN_SECONDS / (first + second)))):
        first = min(first, _timed(run_plain)[1])
        second = min(second, _timed(run_tiled)[1])
    is_on_cpu = all(one.device.type == "cpu" for one in plain.values())
    worst, where = _farthest(plain, found)
    return Bits(
        CLOSE if where else SAME,
        worst,
        where,
        torch.get_num_threads(),
        second / first if is_on_cpu else 0.0,
    )


def _timed(run: Callable[[], Results]) -> tuple[Results, float]:
    begin = perf_counter()
    return run(), perf_counter() - begin


def _farthest(plain: Results, found: Results) -> tuple[float, str]:
    """The largest difference, relative to the largest of its tensor; and whose."""
    worst, where = 0.0, ""
    for name, one in plain.items():
        if torch.equal(one, found[name]):
            continue
        exact = one.double()
        far = (exact - found[name].double()).abs().max() / exact.abs().max()
        if not where or not float(far) <= worst:
            worst, where = float(far), name
    return worst, where


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
