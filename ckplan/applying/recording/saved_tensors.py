"""Saved tensors of a region: kept, or dropped and rebuilt in backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from ckplan.applying.rebuilding.digest import Digest, digest, is_alike
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.rebuilding.schedule import Packed
from ckplan.applying.tensors.kept import Kept, keep, unpack_kept
from ckplan.applying.tensors.retained import ref_of, values_in
from ckplan.applying.tensors.storages import Storages
from ckplan.errors import ApplyError


@dataclass(eq=False)
class Handle:
    """The rebuilder that saved tensors of a forward share."""

    rebuilder: Rebuilder | None = None
    filled: set[int] = field(
        default_factory=set
    )  # saved tensors that an op filled then


class Dropped:
    """A saved tensor that is rebuilt when backward needs it."""

    __slots__ = ("handle", "lent", "like", "number", "tensor")

    def __init__(self, handle: Handle, number: int) -> None:
        self.handle = handle
        self.number = number  # among the saved tensors of its forward
        self.like: Digest | None = None  # its digest, in a first forward
        self.tensor: torch.Tensor | None = None  # rebuilt, until its node frees this
        self.lent: ref[torch.Tensor] | None = None  # or to a backward that keeps this


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
        self.dropped_bytes = 0
        self._region = region
        self._storages = storages
        self._checks_digest = checks_digest
        self._seen: set[int] = set()  # values that are dropped
        self._fresh = 0  # how many were packed when the last op began

    def go_on(self, handle: Handle, packed: Iterable[Packed]) -> None:
        """Rebuild what was dropped before, too."""
        self.handle = handle
        self.packed += packed
        self._seen.update(value for value, _ in self.dropped)
        num_bytes, storage_of = self._storages.num_bytes, self._storages.flow.storage_of
        self.dropped_bytes += sum(num_bytes[storage_of[value]] for value in self._seen)

    @property
    def dropped(self) -> list[tuple[int, int]]:
        """Value and part of each saved tensor that was dropped."""
        return [(one.value, one.part) for one in self.packed if one.ref is not None]

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
        ref = ref_of(tensor, value)
        self.packed.append(Packed(ref.place.size, value, ref, part))
        dropped = Dropped(self.handle, len(self.packed) - 1)
        if self._checks_digest:
            dropped.like = digest(tensor)
        return dropped

    def fill(self, since: int, filled: Mapping[int, int], own: Any) -> None:
        """Map tensors saved before their op fills them to the filled values.

        Such as the noise of ``rrelu_with_noise``, which is no new version.

        Args:
            since: How many were packed before the first of those that count.
            filled: Values, and what they became.
            own: What an op in place is done to, as its step has it: saved as it was.
        """
        own = values_in(own)
        for place in range(since, len(self.packed)):
            old = self.packed[place]
            if old.value not in filled or old.value in own:
                continue
            new = filled[old.value]
            self.handle.filled.add(place)  # its digest was taken before
            self._seen.add(new)
            ref = old.ref and old.ref._replace(value=new)
            self.packed[place] = old._replace(value=new, ref=ref)


def unpack(packed: Kept | Dropped) -> torch.Tensor:
    """Give autograd a saved tensor, rebuilt if it was dropped."""
    if not isinstance(packed, Dropped):
        return unpack_kept(packed)
    tensor = packed.tensor
    if tensor is None and packed.lent is not None:
        tensor = packed.lent()
    if tensor is None:
        rebuilder = packed.handle.rebuilder
        if rebuilder is None:
            raise ApplyError(
                "a region's saved tensor is needed before its forward is over",
                needed="backward after forward",
                hint="leave this call out of the plan",
            )
        tensor = rebuilder.unpack(packed.number)
        if rebuilder.keeps_graph:
            packed.lent = ref(tensor)
        else:
            packed.tensor = tensor
        like = None if packed.number in packed.handle.filled else packed.like
        if like is not None and not is_alike(like, tensor):
            rebuilder.warn_of(tensor)
    return tensor


def otherwise_saved(name: str) -> ApplyError:
    """The error for equal calls that saved different tensors."""
    return ApplyError(
        f"cannot rebuild {name}: the same calls of torch saved other tensors than in "
        "an earlier forward",
        needed="forwards that torch runs in the same way, op by op",
        hint="run it again (by: rerun), or leave this call out of the plan",
    )
