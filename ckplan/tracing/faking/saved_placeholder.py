"""What stands in for a saved tensor while a step is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Geometry:
    """A tensor without its content, and the bytes of its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Describe a tensor."""
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
        """A tensor of this geometry on a storage of its own.

        Args:
            content: What to copy there, storage and all.
        """
        spans = ((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        length = 1 + sum(spans) if self.size.numel() else 0
        whole = length * self.dtype.itemsize == self.storage_bytes
        if whole and not self.offset:  # one op in place of three
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
            # Element by element is not possible where they share memory.
            tensor.untyped_storage().copy_(content.untyped_storage())
        return tensor


class SavedPlaceholder:
    """Stands in for a saved tensor; its end is autograd's letting go."""

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
