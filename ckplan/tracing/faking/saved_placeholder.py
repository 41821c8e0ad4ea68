"""Placeholders of saved tensors while a step is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """The layout of a tensor in elements, and the bytes of its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of a tensor."""
        return cls(
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes(),
        )

    @torch.no_grad()
    def blank(self, content: torch.Tensor | None) -> torch.Tensor:
        """Make a tensor of this geometry with its own storage.

        Args:
            content: A tensor whose whole storage is copied; None for no content.
        """
        spans = ((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        length = 1 + sum(spans) if self.size.numel() else 0
        whole = length * self.dtype.itemsize == self.storage_bytes
        if whole and not self.offset:  # one op instead of three
            tensor = torch.empty_strided(
                self.size, self.stride, dtype=self.dtype, device=self.device
            )
        else:
            base = torch.empty(
                self.storage_bytes, dtype=torch.uint8, device=self.device
            )
            tensor = base.view(self.dtype).as_strided(
                self.size, self.stride, self.offset
            )
        if content is not None:
            # Elements that share memory cannot be copied one by one.
            tensor.untyped_storage().copy_(content.untyped_storage())
        return tensor


class SavedPlaceholder:
    """Replaces a saved tensor; calls ``released`` when autograd frees it."""

    __slots__ = ("__weakref__", "_released", "copy", "geometry", "number")

    def __init__(
        self,
        released: Callable[[int], None],
        number: int,
        geometry: Geometry,
        copy: torch.Tensor | None,
    ) -> None:
        self._released = released
        self.number = number
        self.geometry = geometry
        self.copy = copy

    def __del__(self) -> None:
        self._released(self.number)
