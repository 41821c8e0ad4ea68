"""Correct outputs where CUDA's kernels return other dtypes or sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ckplan.tracing.cuda.translation import HALVES, TranslationNotes
from ckplan.tracing.faking.asked_device import asked_device

_aten = torch.ops.aten
_STATISTICS = {
    _aten.native_layer_norm.default: (1, 2),
    _aten.native_batch_norm.default: (1, 2),
    _aten.cudnn_batch_norm.default: (1, 2),
}
"""Op -> indices of outputs that CUDA computes in float32 for any input."""
_CONVOLUTIONS = {
    _aten.convolution.default: slice(0, 2),
    _aten.convolution_backward.default: slice(1, 3),
}
"""Op -> positions of input and weight among its arguments."""
_CUDNN_ATTENTION = _aten._scaled_dot_product_cudnn_attention.default
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # cuDNN cell -> gates


class Outputs(TorchDispatchMode):
    """Gives outputs their dtypes on CUDA; entered inside a fake mode."""

    def __init__(self, words: TranslationNotes) -> None:
        super().__init__()
        self._words = words
        self._updating = False
        self._pinned = WeakIdKeyDictionary()

    @contextmanager
    def patched_optimizer_queries(self) -> Iterator[None]:
        """A scope in which optimizers read 1.0 for every floating value.

        For example, the norm that Adafactor reads does not change any bytes.
        """

        def begin(*args: object) -> None:
            self._updating = True

        def end(*args: object) -> None:
            self._updating = False

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(begin).remove)
            stack.callback(register_optimizer_step_post_hook(end).remove)
            yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        device = asked_device(func, args)
        return self._answer(func, args, kwargs or {}) if device is None else device

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asks = func is _aten._local_scalar_dense.default
        if asks and self._updating and args[0].is_floating_point():
            return 1.0
        if func is _aten._pin_memory.default or kwargs.get("pin_memory"):
            return self._pin(func, args, kwargs)
        if func is _aten.is_pinned.default:
            return args[0] in self._pinned
        if func in _MADE:
            return _MADE[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if func in _CONVOLUTIONS:
            return _laid_out(out, *args[_CONVOLUTIONS[func]])
        if func in _STATISTICS and out[_STATISTICS[func][0]].dtype in HALVES:
            self._words.add_note("norms: statistics in float32")
            return _retyped(out, _STATISTICS[func])
        if func is _aten.native_group_norm.default and args[1] is not None:
            mixed = args[0].dtype in HALVES and args[1].dtype == torch.float32
            return _retyped(out, (1, 2)) if mixed else out
        if func is _CUDNN_ATTENTION and not args[4]:  # logsumexp, which backward needs
            return (out[0], None, *out[2:])
        if func is _aten._cudnn_rnn.default:
            return (*out[:3], _reserve(args), out[4])
        return out

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor that reports pinned host memory."""
        pinned = func is _aten._pin_memory.default
        out = args[0].clone() if pinned else func(*args, **kwargs)
        self._pinned[out] = True
        return out


def _retyped(out: tuple[Any, ...], which: tuple[int, ...]) -> tuple[Any, ...]:
    """Replace some outputs by float32 ones."""
    return tuple(
        torch.empty_like(one, dtype=torch.float32) if place in which else one
        for place, one in enumerate(out)
    )


def _laid_out(out: Any, input: torch.Tensor, weight: torch.Tensor) -> Any:
    """Give a convolution's outputs cuDNN's layout.

    On a CPU their layout depends on the processor. Torch queries the GPU for cuDNN's
    bfloat16 support.
    """
    formats = {suggest_memory_format(one) for one in (input, weight)}
    last = formats - {torch.contiguous_format}
    if input.dtype == torch.float64 or not last:
        layout = torch.contiguous_format
    else:
        (layout,) = last

    def lay_out(one: torch.Tensor) -> torch.Tensor:
        fits = one.dim() != input.dim() or one.is_contiguous(memory_format=layout)
        return one if fits else torch.empty_like(one, memory_format=layout)

    return pytree.tree_map_only(torch.Tensor, lay_out, out)


def _rms_norm(
    input: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del weight, eps
    rows = [*input.shape[: input.dim() - len(shape)], *(1 for _ in shape)]
    layout = torch.contiguous_format
    return (
        torch.empty_like(input, memory_format=layout),
        torch.empty(rows, dtype=torch.float32, device=input.device),
    )


def _rms_norm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    del grad, shape, rstd
    return _like(input, wanted[0]), _like(weight, wanted[1])


def _rnn_backward(
    input: torch.Tensor,
    weights: list[torch.Tensor],
    stride: int,
    buffer: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    del stride, buffer
    wanted = rest[-1]
    grads = [_like(weight, wanted[3]) for weight in weights]
    return _like(input, wanted[0]), _like(hx, wanted[1]), _like(cx, wanted[2]), grads


def _gru_cell(
    gates: torch.Tensor, hidden: torch.Tensor, hx: torch.Tensor, *biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    del gates, hidden, biases
    return torch.empty_like(hx), hx.new_empty([hx.shape[0], 5 * hx.shape[1]])


def _gru_cell_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    batch, width = grad.shape
    gates = [workspace.new_empty([batch, 3 * width]) for _ in range(2)]
    sums = [workspace.new_empty([3 * width]) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *sums


def _like(given: torch.Tensor | None, wanted: bool) -> torch.Tensor | None:
    """A gradient like a tensor, or None if it is not needed."""
    if given is None or not wanted:
        return None
    return torch.empty_like(given, memory_format=torch.contiguous_format)


_MADE: dict[Any, Callable[..., Any]] = {
    _aten._fused_rms_norm.default: _rms_norm,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten._cudnn_rnn_backward.default: _rnn_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Op -> fake kernel, for ops without fake kernels outside CUDA."""


def _reserve(args: tuple[Any, ...]) -> torch.Tensor:
    """Reserve of cuDNN for backward: gates, cell states and outputs of every layer.

    The size is an estimate, as cuDNN reports it only when it runs.
    """
    input, hx, cell, hidden, layers, dropout = (args[i] for i in (0, 4, 6, 7, 9, 11))
    directions = hx.shape[0] // layers
    steps = math.prod(input.shape[:-1])
    kept = _GATES[cell] + 1 + (cell == 2)
    elements = layers * directions * steps * hidden * kept
    if dropout and layers > 1:
        elements += (layers - 1) * directions * steps * hidden
    size = elements * input.element_size()
    return torch.empty(size, dtype=torch.uint8, device=input.device)
