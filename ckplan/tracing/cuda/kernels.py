"""Kernels at autograd's key that call CUDA's ops where the CPU calls others.

Each kernel replaces a composite of torch. It runs the composite if CUDA calls the same
ops as the CPU.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ckplan.tracing.cuda.translation import TranslationNotes, composite

_Tensor: TypeAlias = torch.Tensor
_aten = torch.ops.aten
_LARGEST_CUDNN_BATCH = {True: 880_801, False: 65_535}  # by training mode
_SMALLEST_CUDNN_EPSILON = 1e-5
_CUDNN_ELEMENTS = 2**31 - 1
_LSTM, _GRU, _TANH, _RELU = 2, 3, 1, 0  # cuDNN's cell types
_MAKES_CONTIGUOUS = torch.__version__ < (2, 14)  # else kernels copy


class Kernels:
    """Kernels by op name; they add notes to ``words``."""

    def __init__(self, words: TranslationNotes) -> None:
        self._words = words
        self.recurrent: dict[str, Any] = {
            "lstm_cell": self._lstm_cell,
            "gru_cell": self._gru_cell,
            "lstm.input": self._lstm,
            "gru.input": self._gru,
            "rnn_tanh.input": self._rnn_tanh,
            "rnn_relu.input": self._rnn_relu,
        }
        """Kernels of ops that query the GPU in a build of torch with CUDA."""
        self.table: dict[str, Any] = {
            "dropout": self._dropout,
            "softmax.int": self._softmax,
            "log_softmax.int": self._log_softmax,
            "_batch_norm_impl_index": self._batch_norm,
            **({"group_norm": _group_norm} if _MAKES_CONTIGUOUS else {}),
            "rms_norm": self._rms_norm,
            **self.recurrent,
        }

    def _dropout(self, input: _Tensor, p: float, train: bool) -> _Tensor:
        if not train or not 0 < p < 1 or not input.numel():
            return composite("dropout", input, p, train)
        self._words.add_note("dropout: native_dropout, whose mask is bool")
        return _aten.native_dropout(input, p, train)[0]

    # -- softmax ---------------------------------------------------------------------

    def _softmax(self, input: _Tensor, dim: int, dtype: Any = None) -> _Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            self._words.add_note("softmax of float16 to float32: one kernel, no cast")
            return _aten._softmax(input, dim, True)
        return composite("softmax.int", input, dim, dtype)

    def _log_softmax(self, input: _Tensor, dim: int, dtype: Any = None) -> _Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            self._words.add_note("softmax of float16 to float32: one kernel, no cast")
            return _aten._log_softmax(input, dim, True)
        return composite("log_softmax.int", input, dim, dtype)

    # -- norms -----------------------------------------------------------------------

    def _batch_norm(
        self,
        input: _Tensor,
        weight: _Tensor | None,
        bias: _Tensor | None,
        running_mean: _Tensor | None,
        running_var: _Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> tuple[Any, ...]:
        tensors = input, weight, bias, running_mean, running_var
        if not (cudnn_enabled and _is_for_cudnn(*tensors, training, eps)):
            rest = training, momentum, eps, cudnn_enabled
            found: tuple[Any, ...] = composite(
                "_batch_norm_impl_index", *tensors, *rest
            )
            return found
        self._words.add_note("batch norm: cuDNN's")
        layout = torch.contiguous_format
        if input.is_contiguous(memory_format=torch.channels_last) and input.dim() == 4:
            layout = torch.channels_last
        found = _aten.cudnn_batch_norm(
            input.contiguous(memory_format=layout),
            *tensors[1:],
            training,
            momentum,
            eps,
        )
        return (*found, 1)

    def _rms_norm(
        self,
        input: _Tensor,
        shape: list[int],
        weight: _Tensor | None = None,
        eps: float | None = None,
    ) -> _Tensor:
        mixed = weight is not None and weight.dtype != input.dtype
        last = input.dim() == 4 and not input.is_contiguous()
        last = last and input.is_contiguous(memory_format=torch.channels_last)
        if mixed or last or input.is_complex():
            return composite("rms_norm", input, shape, weight, eps)
        self._words.add_note("rms norm: one kernel, which keeps its input and 1/rms")
        return _FusedRmsNorm.apply(input, shape, weight, eps)

    # -- recurrent nets --------------------------------------------------------------

    def _lstm_cell(
        self,
        input: _Tensor,
        hx: list[_Tensor],
        w_ih: _Tensor,
        w_hh: _Tensor,
        b_ih: _Tensor | None = None,
        b_hh: _Tensor | None = None,
    ) -> tuple[_Tensor, _Tensor]:
        self._words.add_note("LSTM and GRU cells: one kernel, which keeps a workspace")
        gates = _aten.linear(input, w_ih), _aten.linear(hx[0], w_hh)
        found = _aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
        return found[0], found[1]

    def _gru_cell(
        self,
        input: _Tensor,
        hx: _Tensor,
        w_ih: _Tensor,
        w_hh: _Tensor,
        b_ih: _Tensor | None = None,
        b_hh: _Tensor | None = None,
    ) -> _Tensor:
        self._words.add_note("LSTM and GRU cells: one kernel, which keeps a workspace")
        gates = _aten.linear(input, w_ih), _aten.linear(hx, w_hh)
        return _aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]

    def _lstm(
        self, input: _Tensor, hx: list[_Tensor], *rest: Any
    ) -> tuple[_Tensor, ...]:
        return self._cudnn_rnn(_LSTM, input, hx[0], hx[1], *rest)

    def _gru(self, input: _Tensor, hx: _Tensor, *rest: Any) -> tuple[_Tensor, ...]:
        return self._cudnn_rnn(_GRU, input, hx, None, *rest)[:2]

    def _rnn_tanh(self, input: _Tensor, hx: _Tensor, *rest: Any) -> tuple[_Tensor, ...]:
        return self._cudnn_rnn(_TANH, input, hx, None, *rest)[:2]

    def _rnn_relu(self, input: _Tensor, hx: _Tensor, *rest: Any) -> tuple[_Tensor, ...]:
        return self._cudnn_rnn(_RELU, input, hx, None, *rest)[:2]

    def _cudnn_rnn(
        self,
        cell: int,
        input: _Tensor,
        hx: _Tensor,
        cx: _Tensor | None,
        weights: list[_Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[_Tensor, ...]:
        self._words.add_note(
            "LSTM, GRU and RNN: cuDNN's, the size of its reserve estimated"
        )
        per_layer = len(weights) // (num_layers * (2 if bidirectional else 1))
        plain = 4 if has_biases else 2
        projected = weights[plain].shape[0] if per_layer > plain else 0
        found = _aten._cudnn_rnn(
            input.transpose(0, 1) if batch_first else input,
            weights,
            per_layer,
            weights[0].detach(),  # stands for the flat buffer of all weights
            hx,
            cx,
            cell,
            cx.shape[-1] if cx is not None else hx.shape[-1],
            projected,
            num_layers,
            False,
            dropout,
            train,
            bidirectional,
            [],
            None,
        )
        output = found[0].transpose(0, 1) if batch_first else found[0]
        return output, found[1], found[2]


def _group_norm(input: _Tensor, *args: Any, **kwargs: Any) -> _Tensor:
    """Run with contiguous inputs; the CPU keeps the input's layout."""
    found: _Tensor = composite("group_norm", input.contiguous(), *args, **kwargs)
    return found


def _is_for_cudnn(
    input: _Tensor,
    weight: _Tensor | None,
    bias: _Tensor | None,
    running_mean: _Tensor | None,
    running_var: _Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Torch's conditions for cuDNN's batch norm (``_select_batch_norm_backend``)."""
    if weight is None or bias is None or input.dim() < 3:
        return False
    running = (running_mean is not None) + (running_var is not None)
    half = input.dtype == torch.float16
    return (
        torch.backends.cudnn.enabled
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (not half or weight.dtype == torch.float32)
        and (running == 2 or (running == 0 and training))
        and input.shape[0] <= _LARGEST_CUDNN_BATCH[training]
        and eps >= _SMALLEST_CUDNN_EPSILON
        and input.numel() < _CUDNN_ELEMENTS
    )


class _FusedRmsNorm(torch.autograd.Function):
    """Autograd of ``_fused_rms_norm``, for which torch has a formula on CUDA only."""

    @staticmethod
    def forward(
        ctx: Any,
        input: _Tensor,
        shape: list[int],
        weight: _Tensor | None,
        eps: float | None,
    ) -> _Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # autograd calls a composite on CPU
            output, rstd = _aten._fused_rms_norm(input, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(input, rstd, weight)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: _Tensor) -> tuple[Any, ...]:
        input, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        found = _aten._fused_rms_norm_backward(
            grads[0], input, ctx.shape, rstd, weight, wanted
        )
        return found[0], None, found[1], None
