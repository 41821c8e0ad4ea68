"""CUDA's autocast on CPU tensors: its op lists, its policies and its cache of casts.

The lists come from torch's "Autocast Op Reference" for CUDA. A test compares them with
the ops that torch registers for CUDA's autocast.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from ckplan.tracing.cuda.translation import HALVES, TranslationNotes, overload


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names(
    """
    _convolution _convolution.deprecated _scaled_dot_product_flash_attention
    _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm
    chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose
    einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
    rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """
)
"""Ops that run in autocast's lower precision."""
FLOAT32 = _names(
    """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
    binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
    hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_sqrth log
    log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm
    nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss
    soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d
    """
)
"""Ops that run in float32."""
FLOAT32_RESULT = _names(
    """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm
    log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList
    """
)
"""Ops that get ``dtype=float32`` unless the caller passes a dtype."""
FLOAT32_APPENDED = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""Ops that return float32 by a separate overload."""
WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add
    tensordot vdot
    """
)
"""Ops that run in the widest dtype among their arguments."""
REFUSED = ("binary_cross_entropy",)
"""Ops that raise an error under CUDA's autocast."""

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)


class Autocast:
    """Kernels for autocast's key on CPU, and the cache of casts behind them.

    Args:
        words: Notes on what was translated.
        device: Device type whose autocast gives the lower precision.
    """

    def __init__(self, words: TranslationNotes, device: str = "cpu") -> None:
        self._words = words
        self._device = device
        self._casts: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}

    @property
    def kernels(self) -> dict[str, Any]:
        """Op name -> kernel: CUDA's lists; no cast for ops in the CPU's lists only."""
        policies: dict[str, Any] = {
            **dict.fromkeys(LOWER_PRECISION, self._lower_precision),
            **dict.fromkeys(FLOAT32, self._float32),
            **dict.fromkeys(FLOAT32_RESULT, _float32_result),
            **dict.fromkeys(FLOAT32_APPENDED, _float32_appended),
            **dict.fromkeys(WIDEST, self._widest),
            **dict.fromkeys(REFUSED, _refuse),
        }
        here = registered("AutocastCUDA")  # lists grow from release to release
        return {
            **dict.fromkeys(
                registered("AutocastCPU") - here, torch.library.fallthrough_kernel
            ),
            **{
                name: partial(policy, name)
                for name, policy in policies.items()
                if name in here
            },
            **self.recurrent,
        }

    @property
    def recurrent(self) -> dict[str, Any]:
        """Kernels of ops that query the GPU in a build of torch with CUDA."""
        return {"_cudnn_rnn": self._recurrent}

    @contextmanager
    def switched(self) -> Iterator[None]:
        """A scope in which autocast for CUDA switches autocast for CPU."""
        entered = torch.autocast.__enter__
        left = torch.autocast.__exit__
        made = torch.autocast.__init__
        clear = torch.clear_autocast_cache

        @wraps(made)  # the compiler reads its signature
        def make(
            self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            if device_type == "cuda":
                dtype = dtype or torch.get_autocast_dtype("cuda")
                device_type = "cpu"
            made(self, device_type, dtype, *args, **kwargs)

        outside: list[tuple[bool, torch.dtype]] = []

        def enter(self: Any) -> Any:
            found = entered(self)
            outside.append(_cuda_state())
            _set_cuda_state(self._enabled, self.fast_dtype)
            return found

        def leave(self: Any, *error: Any) -> Any:
            _set_cuda_state(*outside.pop())
            return left(self, *error)

        def forget() -> None:
            self._casts.clear()
            clear()

        with ExitStack() as stack:
            stack.callback(_set_cuda_state, *_cuda_state())
            for name, function in (
                ("__init__", make),
                ("__enter__", enter),
                ("__exit__", leave),
            ):
                stack.enter_context(mock.patch.object(torch.autocast, name, function))
            stack.enter_context(
                mock.patch.object(torch, "clear_autocast_cache", forget)
            )
            yield
        self._casts.clear()

    # -- policies --------------------------------------------------------------------

    def _lower_precision(self, name: str, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(self._device)
        return self._run_in(dtype, overload(name), args, kwargs)

    def _recurrent(
        self, input: Any, weights: Any, count: int, buffer: Any, *rest: Any
    ) -> Any:
        """Cast weights of cuDNN's nets into one new buffer at every call."""
        del buffer
        dtype = torch.get_autocast_dtype(self._device)

        def cast(leaf: Any) -> Any:
            return leaf.to(dtype) if _eligible(leaf) else leaf

        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            input, weights, rest = pytree.tree_map(cast, (input, weights, rest))
            buffer = weights[0].detach()
            return overload("_cudnn_rnn")(input, weights, count, buffer, *rest)

    def _float32(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._run_in(torch.float32, overload(name), args, kwargs)

    def _widest(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if _eligible(t)}
        wide = torch.float32 in found
        dtype = torch.float32 if wide else torch.get_autocast_dtype(self._device)
        return self._run_in(dtype, overload(name), args, kwargs)

    def _run_in(
        self, dtype: torch.dtype, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._words.add_note("autocast: CUDA's lists of ops and its cache of casts")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            # Cast the last argument first, in the order of torch's compiled C++.
            leaves = [self._cast(dtype, leaf) for leaf in reversed(leaves)][::-1]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return op(*args, **kwargs)

    def _cast(self, dtype: torch.dtype, leaf: Any) -> Any:
        """Torch's ``cached_cast``: casts of parameters are kept until autocast ends."""
        if not _eligible(leaf) or leaf.dtype == dtype:
            return leaf
        kept = (
            dtype in HALVES
            and leaf.dtype == torch.float32
            and leaf.requires_grad
            and leaf.is_leaf
            and not leaf._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not kept:
            return leaf.to(dtype)
        found = self._casts.get(id(leaf))
        if found is None or found[0]() is not leaf:
            with torch.enable_grad():  # later users of the cast can need a gradient
                found = weakref.ref(leaf), leaf.to(dtype)
            self._casts[id(leaf)] = found
        return found[1]


def registered(key: str) -> set[str]:
    """Ops of aten with their own kernel at a dispatch key."""
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


def _float32_result(name: str, *args: Any, **kwargs: Any) -> Any:
    op = overload(name)
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        if not _eligible(args[0]):
            return op(*args, **kwargs)
        arguments = op._schema.arguments
        at = next(i for i, one in enumerate(arguments) if one.name == "dtype")
        given = args[at] if at < len(args) else kwargs.get("dtype")
        asked = {**kwargs, "dtype": given or torch.float32}
        return op(*args[:at], **asked)


def _float32_appended(name: str, *args: Any, **kwargs: Any) -> Any:
    op = overload(FLOAT32_APPENDED[name])
    defaults = [one.default_value for one in overload(name)._schema.arguments]
    args += tuple(defaults[len(args) : len(defaults)])
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return op(*args, **kwargs, dtype=dtype)


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise RuntimeError(
        f"{name} is an error under autocast on CUDA, since its gradients overflow: "
        "use binary_cross_entropy_with_logits on what the sigmoid gets"
    )


def _eligible(leaf: Any) -> bool:
    tensor = isinstance(leaf, torch.Tensor)
    return tensor and leaf.is_floating_point() and leaf.dtype != torch.float64


def _cuda_state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _set_cuda_state(enabled: bool, dtype: torch.dtype) -> None:
    """Answers to queries of the state of CUDA's autocast."""
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
