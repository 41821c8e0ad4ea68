"""What autograd keeps in place of a tensor that it saves in a region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckplan.applying.calls import version_of
from ckplan.applying.held import Ref
from ckplan.applying.likeness import Likeness, is_alike
from ckplan.applying.recompute import Rebuilder
from ckplan.errors import ApplyError


@dataclass(slots=True)
class Handle:
    """Where saved tensors of a forward find what rebuilds them."""

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
    """A saved tensor that is rebuilt when it is wanted."""

    handle: Handle
    ref: Ref
    part: int  # the inner region that saved it, counted from 1
    like: Likeness | None = None  # what it looked like, in a first forward
    tensor: torch.Tensor | None = None  # once wanted, until its node lets this go


def unpack(packed: Kept | Dropped) -> torch.Tensor:
    """Give autograd what it saved."""
    if isinstance(packed, Dropped):
        if packed.tensor is not None:
            return packed.tensor
        rebuilder = packed.handle.rebuilder
        if rebuilder is None:
            raise ApplyError(
                "a region's saved tensor is wanted before its forward is over",
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
            needed="parameters and results that stay as they are until backward",
            hint="torch refuses this without a plan, too; change a copy",
        )
    return packed.tensor


def keep(tensor: torch.Tensor, name: str) -> Kept:
    """What stays of what autograd saves in a region.

    Not the graph behind it: an op's own output would hold the op that holds it, until
    backward comes by, which it may never do.
    """
    bare = tensor if tensor.grad_fn is None else tensor.detach()
    return Kept(bare, version_of(bare), name)
