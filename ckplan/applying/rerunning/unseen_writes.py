"""Writes that no version of a tensor tells: a second run must not make them again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch

from ckplan.applying.tensors.arguments import moves, storage_of, version_of
from ckplan.applying.tensors.geometry import UnknownArgumentError
from ckplan.applying.tensors.retained import tensors_in

_DATA = torch.Tensor.data.__get__


class UnseenWrites:
    """Follows what a forward does to tensors from outside through their ``data``."""

    def __init__(self) -> None:
        """Nothing was written yet."""
        self.changed: list[ref[torch.Tensor]] = []
        # Tensors that share an outside one's bytes and not its versions, their
        # versions, and that one.
        self._bare: list[tuple[ref[torch.Tensor], int, ref[torch.Tensor]]] = []

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        out: Any,
        is_outside: Callable[[torch.Tensor], bool],
    ) -> bool:
        """Look at a call that has run.

        Returns:
            Whether such tensors are followed: each forward must be looked at.
        """
        of_outside = func == _DATA or moves(func)
        if of_outside and is_outside(args[0]):
            if moves(func):
                self.changed.append(ref(args[0]))
            else:
                self._bare.append((ref(out), version_of(out), ref(args[0])))
        elif self._bare:
            self._add_views(out)
        for one, version, owner in self._bare:
            bare = one()
            if bare is not None and version_of(bare) != version:
                self.changed.append(owner)
        return bool(self._bare or self.changed)

    def _add_views(self, out: Any) -> None:
        """Follow what a call returned, too, if it has the same bytes."""
        with suppress(UnknownArgumentError):
            for tensor in tensors_in(out):
                address = storage_of(tensor)._cdata
                for one, _, owner in [*self._bare]:
                    bare = one()
                    if bare is tensor:
                        break
                    if bare is not None and storage_of(bare)._cdata == address:
                        self._bare.append((ref(tensor), version_of(tensor), owner))
                        break
