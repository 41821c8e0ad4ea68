"""Guards of tensors from outside a region: inputs, parameters, constants."""

from __future__ import annotations

import torch

from ckplan.applying.guards.guarded_program import (
    CallGuard,
    GuardedProgram,
    TensorGuard,
)
from ckplan.applying.tensors.arguments import (
    UnknownArgumentError,
    geometry_of,
    storage_of,
)
from ckplan.applying.tensors.retained import Retained, retain


class InputChecker:
    """Compares the tensors that one forward takes with those of a guarded program.

    Tensors that the program rebuilds from are retained as they are met.
    """

    def __init__(self, expected: GuardedProgram, held: dict[int, Retained]) -> None:
        self._expected = expected
        self._held = held
        self._num_checked = 0
        self._storages: dict[int, int] = {}  # address -> storage of the program
        self._met: set[int] = set()  # those storages

    def check_next(self, tensor: torch.Tensor) -> None:
        """Check the next input.

        Raises:
            UnknownArgumentError: It misses its guard, or the program has no such input.
        """
        guards = self._expected.inputs
        if self._num_checked == len(guards):
            raise UnknownArgumentError
        self._check(guards[self._num_checked], tensor)
        self._num_checked += 1

    def match_constants(self, call: CallGuard, returned: list[torch.Tensor]) -> bool:
        """Whether the constants that a call returned pass their guards."""
        try:
            for place, guard in call.returned_constants:
                self._check(guard, returned[place])
        except (IndexError, UnknownArgumentError):
            return False
        return True

    def _check(self, guard: TensorGuard, tensor: torch.Tensor) -> None:
        """Check the geometry, and which inputs share a storage."""
        if guard.geometry != geometry_of(tensor):
            raise UnknownArgumentError
        storage, address = guard.storage, storage_of(tensor)._cdata
        if address in self._storages:
            shared = self._storages[address] == storage
        else:
            shared = storage not in self._met
        if not shared:
            raise UnknownArgumentError
        self._storages[address] = storage
        self._met.add(storage)
        value = self._expected.value_of.get(storage)
        if value is not None and value not in self._held:
            self._held[value] = retain(tensor)
