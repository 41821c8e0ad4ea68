"""The properties of a tensor that decide which ops run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckplan.applying.tensors.sharing import Shared, exactly

KINDS = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # no other subclasses


class UnknownArgumentError(Exception):
    """A function was called with an argument that cannot be compared."""


class Geometry(NamedTuple):
    """The properties of a tensor that decide which ops run on it."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: type[torch.Tensor]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Describe a strided tensor.

    Raises:
        UnknownArgumentError: It is of a kind that does not act as a plain tensor.
    """
    kind, lazy = type(tensor), tensor.is_conj() or tensor.is_neg()
    strided = tensor.layout == torch.strided and not tensor.is_nested
    if kind not in KINDS or lazy or not strided:
        raise UnknownArgumentError
    return Geometry(
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        kind,
    )


def has_geometry(tensor: Any, geometry: Geometry) -> bool:
    """Whether a tensor is strided and has a geometry."""
    size, stride, offset, dtype, device, requires_grad, kind = geometry
    return (
        type(tensor) is kind
        and tensor.shape == size
        and tensor.requires_grad is requires_grad
        and tensor.dtype is dtype
        and tensor.layout is _strided
        and tensor.stride() == stride
        and tensor.storage_offset() == offset
        and tensor.device == device
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


class GeometryCheck:
    """Tells whether tensors have a geometry: fast for tensors like one that had it.

    Torch's guards of compiled code compare all but the offset in one call. They count
    the state of the thread as well, such as autocast: in another state, or where torch
    has no such guards, the properties decide, one by one.
    """

    __slots__ = ("__weakref__", "_geometry", "_is_alike", "_offset")

    def __init__(self, geometry: Geometry) -> None:
        self._geometry, self._offset = geometry, geometry.offset
        self._is_alike: Callable[[Any], bool] = _is_never_alike

    @staticmethod
    def of(geometry: Geometry) -> GeometryCheck:
        """The check of a geometry; tensors of layers that are alike share it."""
        return _CHECKS.one(exactly(geometry), GeometryCheck(geometry))

    def passes(self, tensor: Any) -> bool:
        """Whether a tensor has the geometry."""
        if self._is_alike(tensor) and tensor.storage_offset() == self._offset:
            return True
        if not has_geometry(tensor, self._geometry):
            return False
        if self._is_alike is _is_never_alike and type(tensor) is not FakeTensor:
            self._is_alike = _likeness(tensor)
        return True


def _is_never_alike(tensor: object) -> bool:
    """No tensor has passed yet."""
    return False


def _likeness(tensor: torch.Tensor) -> Callable[[Any], bool]:
    """What tells whether others are like a tensor; in some versions of torch, never."""
    if _TensorGuards is None:
        return _is_never_alike
    sizes = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    try:
        check: Callable[[Any], bool] = _TensorGuards(tensor, **sizes).check
    except TypeError:
        return _is_never_alike
    return check


_CHECKS: Shared[GeometryCheck] = Shared()
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_strided = torch.strided  # saves looking up
