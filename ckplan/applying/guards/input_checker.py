"""Guards of tensors from outside a region: inputs, parameters, constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard
from weakref import ref

import torch

from ckplan.applying.guards.guarded_program import GuardedProgram, TensorGuard
from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.retained import Retained, retain


class InputChecker:
    """Compares the tensors that one forward takes with those of a guarded program.

    Tensors that the program rebuilds from are retained as they are met.
    """

    def __init__(
        self,
        expected: GuardedProgram,
        held: dict[int, Retained],
        made: Sequence[ref[torch.Tensor]],
    ) -> None:
        """Begin a forward.

        Args:
            expected: What its inputs are compared with.
            held: Retained values; those of inputs are added.
            made: The tensors that calls returned, so far.
        """
        self._guards = expected.inputs
        self._held = held
        self._made = made
        self.met: list[ref[torch.Tensor]] = []
        self._storages: dict[int, int] = {}  # address -> storage of the program
        self._addresses: dict[int, int] = {}  # the other way round

    def meet(self, number: int, tensor: object) -> bool:
        """Whether the next tensor from outside passes its guard."""
        if type(tensor) is not _Parameter and not self._is_from_outside(tensor):
            return False
        self.met.append(ref(tensor))
        return self._passes(self._guards[number], tensor)

    def _is_from_outside(self, tensor: object) -> TypeGuard[torch.Tensor]:
        return isinstance(tensor, torch.Tensor) and not any(
            one() is tensor for one in self._made
        )

    def match_constants(
        self,
        constants: Iterable[tuple[int, TensorGuard]],
        returned: Sequence[torch.Tensor],
    ) -> bool:
        """Whether the constants that a call returned pass their guards, by place."""
        return all(
            place < len(returned) and self._passes(guard, returned[place])
            for place, guard in constants
        )

    def _passes(self, guard: TensorGuard, tensor: torch.Tensor) -> bool:
        """Check the geometry, and which inputs share a storage."""
        geometry, place, storage, value = guard
        if not geometry.passes(tensor):
            return False
        address = tensor.untyped_storage()._cdata
        if self._storages.setdefault(address, storage) != storage:
            return False
        if self._addresses.setdefault(storage, address) != address:
            return False
        if value >= 0 and value not in self._held:
            self._held[value] = (
                Retained(tensor, version_of(tensor), place)
                if type(tensor) is _Parameter
                else retain(tensor)
            )
        return True


_Parameter = torch.nn.Parameter  # saves looking up
