"""Saved tensors of a region: kept, or dropped and rebuilt in backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckplan.applying.rebuilding.digest import Digest, digest, is_alike
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.retained import Ref, bare, ref_of
from ckplan.applying.tensors.storages import Storages
from ckplan.errors import ApplyError


@dataclass(slots=True)
class Handle:
    """The rebuilder that saved tensors of a forward share."""

    rebuilder: Rebuilder | None = None
    # Values that autograd saved before an op filled them -> what they are then.
    filled: dict[int, int] = field(default_factory=dict)


class Kept(NamedTuple):
    """A saved tensor that stays, and the version autograd expects."""

    tensor: torch.Tensor
    version: int
    name: str  # of the region, for errors


@dataclass(slots=True, eq=False)
class Dropped:
    """A saved tensor that is rebuilt when backward needs it."""

    handle: Handle
    ref: Ref
    part: int  # the inner region that saved it, counted from 1
    like: Digest | None = None  # what it looked like, in a first forward
    tensor: torch.Tensor | None = None  # once wanted, until its node lets this go


class Packed(NamedTuple):
    """A saved tensor, as recorded."""

    size: torch.Size
    value: int  # -1 for a tensor from elsewhere
    ref: Ref | None = None  # of a tensor that is dropped
    part: int = 0  # the inner region that saved it, counted from 1


class Packing:
    """What autograd saves of one forward: kept, or dropped to be rebuilt."""

    def __init__(self, region: str, storages: Storages, *, checks_digest: bool) -> None:
        """Nothing is saved yet.

        Args:
            region: Name of the region in errors.
            storages: Of the same forward; what they hold is kept.
            checks_digest: Whether rebuilt tensors are compared with dropped ones.
        """
        self.handle = Handle()
        self.packed: list[Packed] = []
        self.wanted: list[tuple[int, int]] = []  # dropped saved tensors: value, part
        self.dropped_bytes = 0
        self._region = region
        self._storages = storages
        self._checks_digest = checks_digest
        self._seen: set[int] = set()  # values that are wanted
        self._fresh = 0  # how many were packed when the last op began

    def go_on(self, handle: Handle, wanted: Iterable[tuple[int, int]]) -> None:
        """Rebuild what was dropped before, too."""
        self.handle = handle
        self.wanted += wanted
        self._seen.update(value for value, _ in self.wanted)
        num_bytes, storage_of = self._storages.num_bytes, self._storages.flow.storage_of
        self.dropped_bytes += sum(num_bytes[storage_of[value]] for value in self._seen)

    def begin_op(self) -> int:
        """An op begins; returns how many were packed when the one before did."""
        before, self._fresh = self._fresh, len(self.packed)
        return before

    def pack(self, tensor: torch.Tensor, part: int) -> Kept | Dropped:
        """Keep what autograd saves, or drop it."""
        value = self._storages.value_inside(tensor)
        if value < 0 or value in self._storages.retained:
            self.packed.append(Packed(tensor.size(), value))
            return keep(tensor, self._region)
        if value not in self._seen:
            self.dropped_bytes += tensor.untyped_storage().nbytes()
        self._seen.add(value)
        self.wanted.append((value, part))
        ref = ref_of(tensor, value)
        self.packed.append(Packed(ref.size, value, ref, part))
        like = digest(tensor) if self._checks_digest else None
        return Dropped(self.handle, ref, part, like)

    def fill(self, since: int, filled: Mapping[int, int]) -> None:
        """Map tensors saved before their op fills them to the filled values.

        Such as the noise of ``rrelu_with_noise``, which is no new version.

        Args:
            since: How many were packed before the first of those that count.
            filled: Values, and what they became.
        """
        for place in range(since, len(self.packed)):
            old = self.packed[place]
            if old.value not in filled:
                continue
            new = self.handle.filled[old.value] = filled[old.value]
            self._seen.add(new)
            ref = old.ref and old.ref._replace(value=new)
            self.packed[place] = old._replace(value=new, ref=ref)
            if ref is not None:
                self.wanted.remove((old.value, old.part))
                self.wanted.append((new, old.part))


def unpack(packed: Kept | Dropped) -> torch.Tensor:
    """Give autograd a saved tensor, rebuilt if it was dropped."""
    if isinstance(packed, Dropped):
        if packed.tensor is not None:
            return packed.tensor
        rebuilder = packed.handle.rebuilder
        if rebuilder is None:
            raise ApplyError(
                "a region's saved tensor is needed before its forward is over",
                needed="backward after forward",
                hint="leave this call out of the plan",
            )
        ref, filled = packed.ref, packed.handle.filled
        if ref.value in filled:
            ref = ref._replace(value=filled[ref.value])
            packed.like = None  # it was looked at before
        packed.tensor = rebuilder.unpack(ref, packed.part)
        if packed.like is not None and not is_alike(packed.like, packed.tensor):
            rebuilder.warn_of(packed.tensor)
        return packed.tensor
    if version_of(packed.tensor) != packed.version:
        raise ApplyError(
            f"{packed.name} kept a tensor of shape {tuple(packed.tensor.shape)} for "
            f"backward, which was changed in place (version {packed.version} then, "
            f"{version_of(packed.tensor)} now)",
            needed="parameters and results that do not change until backward",
            hint="torch refuses this without a plan, too; change a copy",
        )
    return packed.tensor


def keep(tensor: torch.Tensor, name: str) -> Kept:
    """Keep a saved tensor with its version."""
    tensor = bare(tensor)
    return Kept(tensor, version_of(tensor), name)
