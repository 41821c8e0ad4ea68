"""A fake mode whose outputs torch remembers, looked up by a shorter key.

``FakeTensorMode`` remembers the output of an op by its arguments. A step runs thousands
of ops, and most take plain tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SET_STORAGE_OPS = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _Fakes(FakeTensorMode):
    """A fake mode that survives copies of its tensors."""

    def __deepcopy__(self, memo: object) -> _Fakes:
        """Return the same mode, as copied tensors must keep it."""
        del memo
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        """Keep storages out of torch's cache of fake kernels, as it holds them."""
        if func not in SET_STORAGE_OPS:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with mock.patch.object(self, "cache_enabled", False):
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch's cache of fake outputs looks an op up by.

        It is made for every op. Torch's own key is needed for more kinds of arguments,
        and takes as long as all else that the cache does.
        """
        key: list[Any] = [func, torch.get_default_dtype()]
        key += [torch.is_inference_mode_enabled(), torch._C._get_default_device()]
        given = (args, tuple(kwargs), tuple(kwargs.values()))
        plain = self._add_plain(key, given)
        return tuple(key) if plain else super()._cache_key(state, func, args, kwargs)

    def _add_plain(self, key: list[Any], values: Iterable[Any]) -> bool:
        """Add what determines outputs; False if a value is not plain."""
        for value in values:
            kind = type(value)
            key.append(kind)
            if kind is FakeTensor:
                if (
                    value.fake_mode is not self
                    or value.constant is not None
                    or value.layout is not torch.strided
                    or value.is_conj()
                    or value.is_neg()
                    or value.is_inference()
                ):
                    return False
                key += (value.dtype, value.shape, value.stride(), value.fake_device)
                key += (value.storage_offset(), value.requires_grad)
                key.append(value.untyped_storage().nbytes())
            elif kind in (list, tuple):
                key.append(len(value))
                if not self._add_plain(key, value):
                    return False
            elif kind in _PLAIN:
                key.append(value)
            else:
                return False
        return True


def make_fake_mode() -> FakeTensorMode:
    """A mode whose tensors outlive copies, not entered yet."""
    return _Fakes(allow_non_fake_inputs=True)
