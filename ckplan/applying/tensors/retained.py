"""Tensors that a region retains to rebuild from, and views of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.foreign import digest_of_bytes, digest_of_foreign
from ckplan.errors import ApplyError


class Place(NamedTuple):
    """Where a tensor lies in its storage, and how its bytes are read."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    def is_strided_from(self, other: Place) -> bool:
        """Whether strides alone lead from the other view of a storage to this one."""
        lazy = self.is_conj or self.is_neg or other.is_conj or other.is_neg
        return self.dtype is other.dtype and not lazy


class Ref(NamedTuple):
    """A tensor argument: a view of a value."""

    value: int
    place: Place


@dataclass(slots=True)
class Retained:
    """A value that a region retains to rebuild from."""

    tensor: torch.Tensor
    version: int
    place: Place  # during forward
    # Of its storage; 0 for parameters, which frameworks give other storages as they
    # gather them.
    address: int = 0
    digest: bytes | None = None  # of its storage, where others may write

    def __post_init__(self) -> None:
        """Note which storage it has."""
        if type(self.tensor) is not torch.nn.Parameter:
            storage = self.tensor.untyped_storage()
            self.address, self.digest = storage._cdata, digest_of_foreign(storage)

    def watch(self) -> None:
        """Note its bytes: others may write them from now on."""
        self.digest = digest_of_bytes(self.tensor.untyped_storage())

    def settle(self) -> None:
        """Fix the version that later uses must find.

        An output got a graph after it was retained, which may lead back to here.
        """
        self.tensor = bare(self.tensor)
        self.version = version_of(self.tensor)

    def stay(self) -> None:
        """Stay with the bytes of its tensor, which is about to be given others."""
        if version_of(self.tensor) == self.version:
            self.tensor = self.tensor.data
            self.version = version_of(self.tensor)

    def copy(self) -> None:
        """Hold a copy of its bytes, if they have not changed since."""
        if version_of(self.tensor) == self.version:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.tensor = copy_of(self.tensor)
            self.version = version_of(self.tensor)
            self.__post_init__()

    def moved(self, region: str) -> int:
        """Change of its offset in the storage since forward, in elements; mostly 0.

        Raises:
            ApplyError: The tensor changed since forward.
        """
        tensor, (size, stride, offset, dtype, *_) = self.tensor, self.place
        if version_of(tensor) != self.version:
            shape = tuple(tensor.shape)
            raise ApplyError(
                f"cannot rebuild {region}: a tensor of shape {shape} that it reads "
                f"was changed in place after its forward (version {self.version} then, "
                f"{version_of(tensor)} now)",
                needed="parameters and inputs that do not change until backward",
                hint="update parameters after backward, or leave this call out",
            )
        if self.address and tensor.untyped_storage()._cdata != self.address:
            raise ApplyError(
                f"cannot rebuild {region}: a tensor of shape {tuple(tensor.shape)} "
                "that it reads was given other data after its forward",
                needed="buffers and inputs that do not change until backward",
                hint="change them after backward, or leave this call out",
            )
        if self.digest and digest_of_bytes(tensor.untyped_storage()) != self.digest:
            raise ApplyError(
                f"cannot rebuild {region}: a tensor of shape {tuple(tensor.shape)} "
                "that it reads shares its bytes with an array, and those have changed",
                needed="arrays that do not change until backward",
                hint="give torch a copy (array.copy()), or leave this call out",
            )
        if tensor.size() != size:  # DeepSpeed frees a parameter's data
            raise _not_gathered(region, size)
        if tensor.stride() != stride or tensor.dtype is not dtype:
            raise ApplyError(
                f"cannot rebuild {region}: a tensor of shape {tuple(size)} that "
                "it reads was given another memory format or type after its forward",
                needed="parameters and inputs that do not change until backward",
                hint="convert the model before the step",
            )
        return tensor.storage_offset() - offset


def retain(tensor: torch.Tensor) -> Retained:
    """Retain a tensor's bytes without its graph.

    A view of a parameter retains the parameter, since gathering may move its bytes.
    """
    if type(tensor) is not torch.nn.Parameter:
        base = tensor._base
        is_view = base is not None and isinstance(base, torch.nn.Parameter)
        tensor = base if is_view else bare(tensor)
    return Retained(tensor, version_of(tensor), place_of(tensor))


def place_of(tensor: torch.Tensor) -> Place:
    """Where a tensor lies in its storage."""
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    bits = tensor.is_conj(), tensor.is_neg()
    return Place(size, stride, offset, tensor.dtype, *bits)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph, which would form a reference cycle.

    That cycle would leak if backward never runs.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


def retain_copy(tensor: torch.Tensor) -> Retained:
    """Retain a copy of a tensor that is written without a new version."""
    return retain(copy_of(tensor))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that an op takes or returns in one place: one, several or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def values_in(argument: Any) -> list[int]:
    """The values of the tensors in an argument, in which they are ``Ref``."""
    refs = argument if isinstance(argument, list) else [argument]
    return [one.value for one in refs if isinstance(one, Ref)]


def ref_of(tensor: torch.Tensor, value: int) -> Ref:
    """A tensor as a view of the value of its storage."""
    return Ref(value, place_of(tensor))


def view_of(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """The view that an op had of a value, from any tensor on its storage."""
    view = _strided(tensor, place)
    view = view.conj() if place.is_conj else view
    return torch._neg_view(view) if place.is_neg else view


def _strided(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    size, stride, offset, dtype, *_ = place
    if tensor.dtype == dtype and not (tensor.is_conj() or tensor.is_neg()):
        same = tensor.size() == size and tensor.stride() == stride
        if same and tensor.storage_offset() == offset:
            return tensor
        return tensor.as_strided(size, stride, offset)
    bare = torch.empty(0, dtype=dtype, device=tensor.device)
    return bare.set_(tensor.untyped_storage(), offset, size, stride)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry on a copy of the whole storage.

    An op makes the copy, so that dispatch modes see it.
    """
    storage = tensor.untyped_storage()
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if plain and tensor.nbytes == storage.nbytes():
        return tensor.detach().clone()
    every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    every_byte.set_(storage, 0, (storage.nbytes(),), (1,))
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return bare.set_(every_byte.clone().untyped_storage(), *place)


def check_gathered(
    name: str, tensors: Iterable[torch.Tensor], error: RuntimeError
) -> None:
    """FSDP frees a parameter's bytes and keeps the parameter."""
    for tensor in tensors:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise _not_gathered(name, tensor.shape) from error


def _not_gathered(name: str, shape: torch.Size) -> ApplyError:
    return ApplyError(
        f"cannot rebuild {name}: it reads a parameter of shape {tuple(shape)} that is "
        "not gathered now",
        needed="regions inside one gathered unit",
        hint="plan with `ckplan solve --shard fsdp2 --world-size N`; with DeepSpeed, "
        "name the layers to set_z3_leaf_modules",
    )
