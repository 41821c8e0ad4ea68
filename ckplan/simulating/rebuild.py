"""Run a recompute program step by step, when backward needs a dropped value.

``Rebuild`` decides which step runs next and which value is freed. The simulator and the
engine both drive it. The simulator counts bytes and the engine runs kernels, so both
follow the same order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import proxy

from ckplan.simulating.program import Program

if TYPE_CHECKING:
    from typing_extensions import Self


class AbstractMachine(Protocol):
    """Carries out a rebuild: the engine runs kernels, the simulator counts bytes."""

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run a step, after copying the values in ``copies``, which it overwrites.

        Of its outputs, only the values in ``keep`` stay.
        """

    def decode(self, value: int) -> None:
        """Decode a value and free its encoded form."""

    def fetch(self, value: int) -> None:
        """Take a value from the machine of the outer region."""

    def free(self, value: int) -> None:
        """Free a value."""

    def nested(self) -> Self:
        """Create the machine of an inner region."""
        ...


MachineT = TypeVar("MachineT", bound=AbstractMachine)


class Rebuild(Generic[MachineT]):
    """One execution of a program in one backward pass."""

    __slots__ = (
        "__weakref__",
        "_inner",
        "_left",
        "_outer",
        "_present",
        "_program",
        "machine",
    )

    def __init__(
        self,
        program: Program,
        machine: MachineT,
        outer: Rebuild[MachineT] | None = None,
    ) -> None:
        self.machine = machine
        self._program = program
        self._left = dict(program.uses)
        self._present = set() if outer else set(program.retained)
        self._outer = outer and proxy(outer)  # no cycles: they would outlive a step
        self._inner: list[Rebuild[MachineT]] = []
        for part in program.inner:
            outer_rebuild = self._inner[part.outer - 1] if part.outer else self
            self._inner.append(
                Rebuild(part, outer_rebuild.machine.nested(), outer_rebuild)
            )

    def owner(self, value: int, part: int) -> Rebuild[MachineT]:
        """The rebuild of the region that drops ``value``, which ``part`` saved."""
        found = self._inner[part - 1] if part else self
        while value not in found._program.needed and found._outer is not None:
            found = found._outer
        return found

    def materialize(self, value: int) -> None:
        """Make a value present; reruns the steps that it needs, in forward order."""
        if value in self._present:
            return
        fetched, missing = self._missing(value)
        for retained in fetched:
            assert self._outer is not None, (
                "the outermost region retains its values itself"
            )
            self._outer.materialize(retained)
            self.machine.fetch(retained)
            self._present.add(retained)
        for step, decoded in missing:
            if decoded is None:
                self._run(step)
            else:
                self.machine.decode(decoded)
                self._present.add(decoded)

    def release(self, value: int) -> None:
        """Count one use of a value as done; the last use frees it."""
        self._left[value] -= 1
        if self._left[value] == 0:
            self._present.discard(value)
            self.machine.free(value)
            if self._outer is not None and value in self._program.retained:
                self._outer.release(value)

    def _missing(self, value: int) -> tuple[list[int], list[tuple[int, int | None]]]:
        """Values to fetch; (step, None) to run or (step, value) to decode, in order."""
        flow, decodes = self._program.flow, self._program.decodes
        fetched: set[int] = set()
        steps: set[int] = set()
        decoded: set[int] = set()
        needed = [value]
        while needed:
            value = needed.pop()
            maker = flow.maker_of[value]
            if value in self._present:
                continue
            if value in self._program.retained:
                fetched.add(value)
            elif value in decodes:
                decoded.add(value)
            elif maker not in steps:
                steps.add(maker)
                needed.extend(flow.inputs[maker])
        ordered: list[tuple[int, int | None]] = [(step, None) for step in sorted(steps)]
        if decoded:
            decodings = [(flow.maker_of[value], value) for value in sorted(decoded)]
            ordered = sorted([*decodings, *ordered], key=lambda item: item[0])
        return sorted(fetched), ordered

    def _run(self, step: int) -> None:
        flow, retained, left = self._program.flow, self._program.retained, self._left
        copies = [
            value
            for value in flow.overwrites[step]
            if value in retained or left[value] > 1
        ]
        keep = [
            value
            for value in flow.outputs[step]
            if left.get(value, 0)
            and value not in self._present
            and value not in retained
        ]
        self.machine.run(step, copies, keep)
        self._present.update(keep)
        for value in flow.inputs[step]:
            self.release(value)
