"""A tensor that is elsewhere, and those of a region together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias
from weakref import ref

import torch

from ckplan import encodings
from ckplan.applying.moving.spill_file import Jobs
from ckplan.applying.tensors.arguments import version_of
from ckplan.encodings import Encoded
from ckplan.errors import ApplyError

FILE = "file"
"""The form of a value that is kept in a file, or in host memory."""
OF_ENCODED = " to "
"""Between an encoding and ``FILE``: the encoded form moves."""

Geometry: TypeAlias = tuple[Sequence[int], Sequence[int], torch.dtype]


def geometry_of(one: torch.Tensor | Encoded) -> Geometry:
    """Size, stride and dtype of a tensor, or of one that is encoded."""
    if isinstance(one, Encoded):
        return one.size, one.stride, one.dtype
    return one.size(), one.stride(), one.dtype


class AbstractMover(Protocol):
    """What moves values, as they know it."""

    def fetch(self, moved: Moved) -> torch.Tensor:
        """Return what moved to memory."""

    def forget(self, moved: Moved) -> None:
        """Nobody wants a value any more."""

    def add(self, group: Group) -> None:
        """Add the values of a region whose forward is over."""

    def begin(self, group: Group) -> None:
        """Begin to return the last values of a region."""


class Moved:
    """A value that is elsewhere, with its size, stride and dtype."""

    def __init__(
        self,
        mover: AbstractMover,
        number: int,
        tensor: torch.Tensor,
        offset: int,
        version: int,
        small: Encoded | None = None,
    ) -> None:
        value = tensor if small is None else small
        self.form = FILE if small is None else small.form + OF_ENCODED + FILE
        self.encoding = None if small is None else small.form
        self.number = number  # in the order of moves
        self.data: torch.Tensor | None = tensor  # until its copy out is over
        self.size, self.stride, self.dtype = geometry_of(value)
        self.moves, self.device = geometry_of(tensor), tensor.device
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.version = version  # of the tensor, as long as it has not changed
        self.address = 0  # of its memory, as copies know it
        self.process = os.getpid()  # whose file has it: a fork has another
        self.offset = offset  # in the file or in pinned memory
        self.jobs: Jobs = ()  # copies under way
        self.back: torch.Tensor | None = None  # from the beginning of its copy back
        self.group: ref[Group] | None = None
        self.lost: ApplyError | None = None  # why it cannot come back
        self.mover = mover

    def decode(self) -> torch.Tensor:
        """Return the tensor to memory, once."""
        found = self.mover.fetch(self)
        if self.encoding is None:
            return found
        like = self.size, self.stride, self.dtype
        return encodings.decode(Encoded(self.encoding, found, *like))

    def __del__(self) -> None:
        """Leave the room in the file to later tensors."""
        self.mover.forget(self)


class Group:
    """The moved tensors of one forward of a region, for its backward."""

    def __init__(self, moved: Iterable[Moved]) -> None:
        self.away = list(moved)  # in the order in which they were moved
        self.ahead: list[Moved] = []  # on their way back, not wanted yet
        self.begun = False  # to come back
        mover = self.away[0].mover
        for one in self.away:
            one.group = ref(self)
        self._mover = mover
        mover.add(self)

    def ask(self) -> None:
        """Backward asks for a dropped tensor of the region."""
        if not self.begun:
            self._mover.begin(self)


def is_changed(moved: Moved, tensor: torch.Tensor) -> bool:
    """Whether a tensor was written to, or given other memory, while it was copied."""
    if version_of(tensor) != moved.version:
        return True
    return bool(moved.address) and tensor.data_ptr() != moved.address


def changed_error(moved: Moved) -> ApplyError:
    """The error for a tensor that was written to while it was copied."""
    return ApplyError(
        f"a tensor of shape {tuple(moved.size)} was changed in place while a plan "
        "moved it away",
        needed="offloaded tensors that stay as they are",
        hint="leave its op out of offload",
    )
