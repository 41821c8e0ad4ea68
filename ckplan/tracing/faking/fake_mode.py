"""Fake tensors that take the same path through a model as real tensors.

A fake tensor has a shape and no content. So a model that reads content raises an error,
or takes another path, as ``transformers`` does for fake tensors. Most reads are of
small integers, such as token ids, masks and positions, or of constants, such as a mask
of ones or the probability to drop a layer. ``KnownValues`` computes real values of
these beside the fake ones, and reads return them.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ckplan.collector import Instances
from ckplan.tracing.faking.answers import answers_of_training
from ckplan.tracing.faking.asked_device import asked_device
from ckplan.tracing.faking.fake_outputs import SET_STORAGE_OPS, make_fake_mode
from ckplan.tracing.faking.kernel_layouts import as_kernels_do
from ckplan.tracing.faking.known_sizes import fake_like, tensor_of_known, with_positions
from ckplan.tracing.faking.left_fakes import empty_of, known_containers
from ckplan.training.fake_logs import without_logs_of_fakes
from ckplan.training.randomness import says_it_draws

_LARGEST_BYTES = 1 << 25  # largest known tensor of integers: 8,192 x 512 positions
_LARGEST_FLOAT_BYTES = 1 << 16
QUESTIONS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
)
EMPTY_OPS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
)
_DRAWS = (torch.ops.aten.rand.default,)
"""Ops that draw from 0 to 1. A lone number counts as known, as 0.5: models compare it
with the probability of something rare, such as to leave a layer out."""
_GROUPED_MM = torch.ops.aten._grouped_mm.default
_SIZED_BY_KERNEL = (torch.ops.aten.mkldnn_rnn_layer.default,)
"""Ops whose workspace for backward has a size that only the kernel knows."""
_FUSED = (
    torch.ops.aten._fused_adagrad_,
    torch.ops.aten._fused_adam_,
    torch.ops.aten._fused_adamw_,
    torch.ops.aten._fused_sgd_,
)
"""Optimizer steps; torch has few fake kernels of them. They return nothing."""


class KnownValues(TorchDispatchMode):
    """Keeps real values of small tensors; entered inside a fake mode."""

    def __init__(self) -> None:
        super().__init__()
        self._real = WeakIdKeyDictionary()  # fake tensor -> real one
        self._stale = WeakIdKeyDictionary()  # real storages with outdated content
        self._unwritten = WeakIdKeyDictionary()  # those that no op has written yet
        self._drawn = WeakIdKeyDictionary()  # real ones that depend on a draw
        self.asked_drawn = False  # whether the model has asked for one

    def learn_all(
        self, fakes: Iterable[torch.Tensor], reals: Iterable[torch.Tensor]
    ) -> None:
        """Take small real integer tensors as the values of fake ones."""
        for fake, real in zip(fakes, reals, strict=True):
            if is_small(real) and not real.is_floating_point():  # floats are data
                with _disable_current_modes():
                    self._real[fake] = real.detach().to("cpu", copy=True)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor
        if tensor.constant is not None:
            return tensor.constant
        real = self._real.get(tensor)
        known = real is not None and real.untyped_storage() not in self._stale
        return real if known else None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor and self._is_unknown_float(args[0]):
            args = with_positions(args, self._written_value)
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func in _SIZED_BY_KERNEL and args[0].device.type == "cpu":
            return _sized_by_kernel(func, args)
        if func.overloadpacket in _FUSED:
            return self._forget(_written_arguments(func, args))
        if func is _GROUPED_MM and args[0].dtype != torch.bfloat16:
            return _grouped_mm(*args[:3])
        if func in SET_STORAGE_OPS or any(map(self._is_unknown_float, args)):
            if func._schema.is_mutable:
                self._forget(_written_arguments(func, args))
            return as_kernels_do(func, args, func(*args, **kwargs))
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op; learn the values of its outputs if its inputs' are known."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [self._value(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        known = all(
            value is not None or not isinstance(leaf, torch.Tensor)
            for leaf, value in zip(leaves, values, strict=True)
        )
        drawn = any(isinstance(x, torch.Tensor) and x in self._drawn for x in values)
        if known and func in QUESTIONS:
            self.asked_drawn |= drawn
            return _run_real(func, values, spec)
        try:
            out = as_kernels_do(func, args, func(*args, **kwargs))
        except DynamicOutputShapeException:
            if not known or any(self._is_unwritten(x) for x in leaves):
                raise
            return self._learn(func, values, spec)
        outputs = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if func in _DRAWS and outputs[0].numel() == 1:
            self._real[outputs[0]] = real = _mean_of(outputs[0])
            self._drawn[real] = True
            return out
        known &= not (_is_chance(func) and any(x.is_floating_point() for x in outputs))
        if known and all(is_small(x) for x in outputs):
            answer = pytree.tree_leaves(_run_real(func, values, spec))
            real = [x for x in answer if isinstance(x, torch.Tensor)]
            for fake, value in zip(outputs, real, strict=True):
                self._real[fake] = value
                if drawn:
                    self._drawn[value] = True
                if func in EMPTY_OPS:
                    self._unwritten[value.untyped_storage()] = True
            for written in _written_arguments(func, args):
                self._unwritten.pop(self._real[written].untyped_storage(), None)
        else:
            self._forget(_written_arguments(func, args))
        return out

    def _is_unwritten(self, x: object) -> bool:
        real = self._real.get(x) if isinstance(x, FakeTensor) else None
        return real is not None and real.untyped_storage() in self._unwritten

    def _written_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value, or None if it is not known or what memory held by chance."""
        return None if self._is_unwritten(tensor) else self._value(tensor)

    def _learn(self, func: Any, values: list[Any], spec: pytree.TreeSpec) -> Any:
        """Fake outputs whose shapes depend on known values, and their values."""
        real = _run_real(func, values, spec)
        out = pytree.tree_map_only(torch.Tensor, fake_like, real)
        for made, value in zip(*map(pytree.tree_leaves, (out, real)), strict=True):
            if isinstance(made, torch.Tensor):
                self._real[made] = value
        return out

    def _is_unknown_float(self, x: object) -> bool:
        floats = isinstance(x, FakeTensor) and x.dtype.is_floating_point
        return floats and self._value(x) is None

    def _forget(self, written: Iterable[torch.Tensor]) -> None:
        for tensor in written:
            real = self._real.get(tensor)
            if real is not None:
                self._stale[real.untyped_storage()] = True


def is_small(tensor: torch.Tensor) -> bool:
    """Whether the content of a tensor is computed beside its fake one."""
    most = _LARGEST_FLOAT_BYTES if tensor.is_floating_point() else _LARGEST_BYTES
    return tensor.untyped_storage().nbytes() <= most and not tensor.is_complex()


def _mean_of(drawn: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return torch.full(drawn.shape, 0.5, dtype=drawn.dtype)


def _is_chance(func: Any) -> bool:
    """Whether an op's results are uninitialized or random."""
    return func in EMPTY_OPS or says_it_draws(func)


def _run_real(func: Any, values: list[Any], spec: pytree.TreeSpec) -> Any:
    with _disable_current_modes():
        args, kwargs = pytree.tree_unflatten(map(_reachable, values), spec)
        kwargs.pop("pin_memory", None)  # it needs a GPU
        return func(*args, **kwargs)


def _reachable(value: Any) -> Any:
    """Move a value to the CPU, as known values are always computed there."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    of_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if of_gpu else value


def _sized_by_kernel(func: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Fake outputs with the sizes of the real kernel's outputs."""
    with _disable_current_modes():
        real = [
            torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x
            for x in args
        ]
        outputs = func(*real)
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in outputs
    )


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, stops: torch.Tensor | None
) -> torch.Tensor:
    """A fake result of a grouped matmul; torch's fake kernel takes bfloat16 only."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, len(a) if stops is None else len(stops))
    return torch.empty(shape, dtype=a.dtype, device=a.device)


def _written_arguments(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = pytree.tree_leaves(value)
            yield from (x for x in leaves if isinstance(x, torch.Tensor))


def without_draws() -> AbstractContextManager[object]:
    """A scope in which ``trunc_normal_`` of torch does not draw.

    It draws until all values are in range; values that are not computed never are.
    """
    return mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", _no_draw)


@contextmanager
def fake_tensors() -> Iterator[tuple[FakeTensorMode, KnownValues]]:
    """A scope in which new tensors are fake and act like real ones."""
    fake, known = make_fake_mode(), KnownValues()
    with ExitStack() as stack:
        stack.callback(_empty_caches_of_functions)
        stack.callback(empty_of, fake, known_containers())
        stack.enter_context(without_draws())
        stack.enter_context(mock.patch.object(torch, "tensor", tensor_of_known))
        # model.half() swaps fake parameters, and fails if weak references exist. Fake
        # tensors have weak references of their own, which stay valid after a swap.
        stack.enter_context(mock.patch.object(torch.utils, "weakref", _NO_WEAKREFS))
        stack.enter_context(without_logs_of_fakes())
        # Torch reads the address of a fake tensor to copy it, and warns of that.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.enter_context(answers_of_training())
        stack.enter_context(fake)
        stack.enter_context(known)
        for module in (optimizer, _foreach_utils):  # these check exact types
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(
                mock.patch.object(module, "_foreach_supported_types", types)
            )
        yield fake, known


_NO_WEAKREFS = SimpleNamespace(getweakrefs=lambda tensor: [])
_cached_functions = Instances[Any](type(functools.lru_cache(lambda: None)))


def _empty_caches_of_functions() -> None:
    """Empty ``functools`` caches that hold fake tensors, such as image positions.

    The caches outlive the traced model, and would return fake tensors to the next one.
    """
    for function in _cached_functions():
        if function.cache_info().currsize and _holds_fakes(function):
            function.cache_clear()


def _holds_fakes(function: Any) -> bool:
    held = pytree.tree_leaves(gc.get_referents(function))
    return any(isinstance(value, FakeTensor) for value in held)


def _no_draw(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    del args, kwargs
    return tensor
