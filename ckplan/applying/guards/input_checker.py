"""Guards of tensors from outside a region: inputs, parameters, constants."""

from __future__ import annotations

from weakref import ref

import torch

from ckplan.applying.guards.guarded_program import (
    CallGuard,
    GuardedProgram,
    TensorGuard,
)
from ckplan.applying.tensors.arguments import has_geometry
from ckplan.applying.tensors.retained import Retained, retain, retain_parameter


class InputChecker:
    """Compares the tensors that one forward takes with those of a guarded program.

    Tensors that the program rebuilds from are retained as they are met.
    """

    def __init__(self, expected: GuardedProgram, held: dict[int, Retained]) -> None:
        self._expected = expected
        self._held = held
        self.met: list[ref[torch.Tensor]] = []
        self._storages: dict[int, int] = {}  # address -> storage of the program
        self._addresses: dict[int, int] = {}  # the other way round

    def meet(self, number: int, tensor: object) -> bool:
        """Whether the next tensor from outside passes its guard."""
        if type(tensor) is not _Parameter and not isinstance(tensor, _Tensor):
            return False
        self.met.append(ref(tensor))
        return self._passes(self._expected.inputs[number], tensor)

    def match_constants(self, call: CallGuard, returned: list[torch.Tensor]) -> bool:
        """Whether the constants that a call returned pass their guards."""
        return all(
            place < len(returned) and self._passes(guard, returned[place])
            for place, guard in call.returned_constants
        )

    def _passes(self, guard: TensorGuard, tensor: torch.Tensor) -> bool:
        """Check the geometry, and which inputs share a storage."""
        geometry, storage, value = guard
        if not has_geometry(tensor, geometry):
            return False
        address = tensor.untyped_storage()._cdata
        if self._storages.setdefault(address, storage) != storage:
            return False
        if self._addresses.setdefault(storage, address) != address:
            return False
        if value >= 0 and value not in self._held:
            self._held[value] = (
                retain_parameter(tensor, geometry)
                if type(tensor) is _Parameter
                else retain(tensor)
            )
        return True


_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter  # saves looking up
