"""Saved tensors that stay, with the versions that backward must find."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.retained import bare
from ckplan.errors import ApplyError


class Kept(NamedTuple):
    """A saved tensor that stays, and the version autograd expects."""

    tensor: torch.Tensor
    version: int
    name: str  # of the region, for errors


def keep(tensor: torch.Tensor, name: str) -> Kept:
    """Keep a saved tensor with its version."""
    tensor = bare(tensor)
    return _new(Kept, (tensor, version_of(tensor), name))


_new = tuple.__new__  # saves a Python frame


def unpack_kept(kept: Kept) -> torch.Tensor:
    """Give autograd a tensor that stayed.

    Raises:
        ApplyError: It was changed in place.
    """
    tensor, version, name = kept
    now = version_of(tensor)
    if now != version:
        raise changed(name, tensor, version, now)
    return tensor


def changed(name: str, tensor: torch.Tensor, version: int, now: int) -> ApplyError:
    """The error for a tensor that a region kept and that was changed in place."""
    return ApplyError(
        f"{name} kept a tensor of shape {tuple(tensor.shape)} for backward, "
        f"which was changed in place (version {version} then, {now} now)",
        needed="parameters and results that do not change until backward",
        hint="torch refuses this without a plan, too; change a copy",
    )
