"""Digests of dropped tensors, compared with the rebuilt ones.

The first forward of every region is checked, so that writes that no mode sees are
reported in the first step. Kernels whose results differ in their last bits pass. A
difference is a warning, not an error: some kernels leave padding unwritten.
"""

from __future__ import annotations

from math import isnan
from typing import TypeAlias

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

Digest: TypeAlias = tuple[float, float, float]
"""Sum, smallest and largest element: numbers, so that a first step holds no bytes for
them. ``amin`` and ``amax`` and not ``aminmax``, which copies what lies in strides.
"""

_MOST_NOISE = 0.01  # of the largest element
_LEAST_ITEM_BYTES = 2  # masks and the like say little


def digest(tensor: torch.Tensor) -> Digest | None:
    """Three numbers of a tensor; None if they cannot be computed."""
    if is_fake(tensor) or type(tensor) is not torch.Tensor or not tensor.numel():
        return None
    if tensor.dtype.itemsize < _LEAST_ITEM_BYTES or _is_captured(tensor):
        return None
    with _disable_current_modes(), torch.no_grad():
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        try:
            numbers = plain.sum(), plain.amin(), plain.amax()
        except RuntimeError:  # of a dtype without arithmetic
            return None
        total, least, most = (float(number) for number in numbers)
        return total, least, most


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether ops on it go into a CUDA graph, where no number can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_same(before: Digest, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the digest of the dropped one."""
    now = digest(tensor)
    return now is None or all(map(_is_equal, before, now))


def is_alike(before: Digest, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the digest of the dropped one, up to kernel noise."""
    now = digest(tensor)
    if now is None:
        return True
    total, least, most = before
    scale = max(abs(least), abs(most))
    of_one, of_all = scale, scale * tensor.numel() ** 0.5 + abs(total)
    noises = [_MOST_NOISE * size for size in (of_all, of_one, of_one)]
    return all(
        abs(was - is_now) <= noise or _is_equal(was, is_now)
        for was, is_now, noise in zip(before, now, noises, strict=True)
    )


def holds_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether tensors of one geometry have the same bytes, as far as can be seen."""
    if first.untyped_storage()._cdata == second.untyped_storage()._cdata:
        return True
    if first.is_meta or is_fake(first) or _is_captured(first):
        return True
    both = first.detach(), second.detach()
    if any(not one.untyped_storage().nbytes() for one in both):
        return True  # FSDP freed them
    with _disable_current_modes(), torch.no_grad():
        one, other = both
        same = (one == other) | ((one != one) & (other != other))  # nan is like nan
        return bool(same.all())


def _is_equal(first: float, second: float) -> bool:
    return first == second or (isnan(first) and isnan(second))
