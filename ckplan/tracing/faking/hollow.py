"""Hollow tensors: real tensors of torch whose large contents are never computed.

Nothing that Python can ask tells a hollow tensor from one in training: it is a plain
``torch.Tensor`` with a storage, on the device it says. A dispatch mode skips kernels of
large tensors and returns memory that nobody touches, which the system does not provide.
Small tensors are computed, so that code that reads masks and positions goes on.

What shapes a skipped kernel returns, its fake kernel says.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.tracing.faking.fake_mode import (
    QUESTIONS,
    KnownValues,
    is_small,
    without_draws,
)
from ckplan.tracing.faking.fake_outputs import SET_STORAGE_OPS, make_fake_mode

_Made = TypeVar("_Made")
_META = torch.device("meta")
_OUTSIDE_HEAP = 1 << 20  # bytes


class _Hollow(TorchDispatchMode):
    """Skips kernels that read or make large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes: FakeTensorMode = make_fake_mode()
        self._layouts = KnownValues()
        self._hollow: set[int] = set()  # addresses of storages without content

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        only_layout = func.is_view or torch.Tag.inplace_view in func.tags
        if only_layout or func.namespace == "prim" or func in SET_STORAGE_OPS:
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        known = all(is_small(x) and not self._is_hollow(x) for x in given)
        needs_content = (
            func in QUESTIONS
            or torch.Tag.dynamic_output_shape in func.tags
            or (func._schema.is_mutable and given)
        )
        if known and needs_content:
            return func(*args, **kwargs)
        if func in QUESTIONS:
            raise DataDependentOutputException(func)
        twins = {id(x): self._twin(x) for x in given}
        leaves = [twins.get(id(x), x) for x in leaves]
        fake_args, fake_kwargs = pytree.tree_unflatten(leaves, spec)
        with self._fakes, self._layouts:
            out = func(*fake_args, **fake_kwargs)
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if known and all(map(is_small, made)):
            return func(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._empty(value)
        return self._hollow_like(out, [(twins[id(x)], x) for x in given])

    def _is_hollow(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._hollow

    def _empty(self, value: object) -> None:
        """Forget the contents of tensors that a skipped kernel would have written."""
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not self._is_hollow(tensor):
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._hollow.add(storage._cdata)
        weakref.finalize(storage, self._hollow.discard, storage._cdata).atexit = False

    def _twin(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor of the same geometry."""
        shape, stride = tensor.size(), tensor.stride()
        bare = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=_META)
        return FakeTensor(self._fakes, bare, tensor.device)

    def _hollow_like(
        self, out: Any, given: list[tuple[FakeTensor, torch.Tensor]]
    ) -> Any:
        """Hollow tensors for fake outputs; those that alias an input still do so."""
        same = {id(twin): tensor for twin, tensor in given}
        storages = {_address(twin): tensor for twin, tensor in given}
        made: dict[int, torch.UntypedStorage] = {}

        def real(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) in same:
                return same[id(fake)]
            size, stride, offset = fake.size(), fake.stride(), fake.storage_offset()
            base = storages.get(_address(fake))
            if base is not None:
                return base.as_strided(size, stride, base.storage_offset() + offset)
            if _address(fake) not in made:
                storage = _untouched(fake.untyped_storage().nbytes())
                made[_address(fake)] = storage
                self._add(storage)
            bare = torch.empty(0, dtype=fake.dtype)
            return bare.set_(made[_address(fake)], offset, size, stride)

        return pytree.tree_map_only(torch.Tensor, real, out)


def _untouched(num_bytes: int) -> torch.UntypedStorage:
    """Memory that nobody touches; large memory is the system's, outside of the heap.

    Free memory within a heap is not returned to the system once somebody touched it.
    """
    if num_bytes < _OUTSIDE_HEAP:
        return torch.UntypedStorage(num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def hollow_tensors() -> Iterator[None]:
    """A scope in which kernels of large tensors on the CPU are skipped.

    Raises:
        DataDependentOutputException: Code in the scope reads a large tensor.
    """
    with without_draws(), _Hollow():
        yield


def without_content(build: Callable[[], _Made], device: torch.device) -> _Made:
    """What ``build`` makes, on the CPU without contents."""
    with hollow_tensors() if device.type == "cpu" else nullcontext():
        return build()
