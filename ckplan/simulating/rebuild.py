"""One execution of a recompute program, for the simulator and the engine alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import proxy

from ckplan.simulating.program import Program

if TYPE_CHECKING:
    from typing_extensions import Self


class AbstractMachine(Protocol):
    """What carries out a rebuild: kernels in the engine, a tally in the simulator."""

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run a step; first copy the values it would overwrite that are still needed.

        Of the values it makes, only those in ``keep`` stay.
        """

    def decode(self, value: int) -> None:
        """Make a value from its encoded form, which goes."""

    def fetch(self, value: int) -> None:
        """Take a value from the machine of the region around this one."""

    def free(self, value: int) -> None:
        """Let a value go."""

    def within(self) -> Self:
        """A machine for a region inside this one."""
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
            around = self._inner[part.outer - 1] if part.outer else self
            self._inner.append(Rebuild(part, around.machine.within(), around))

    def level(self, value: int, part: int) -> Rebuild[MachineT]:
        """The region that rebuilds a dropped value which was saved in a part."""
        found = self._inner[part - 1] if part else self
        while value not in found._program.wanted and found._outer is not None:
            found = found._outer
        return found

    def want(self, value: int) -> None:
        """Make a value present, running again what it needs, in forward's order."""
        if value in self._present:
            return
        fetched, missing = self._missing(value)
        for held in fetched:
            assert self._outer is not None, "the outermost region has what it holds"
            self._outer.want(held)
            self.machine.fetch(held)
            self._present.add(held)
        for step, decoded in missing:
            if decoded is None:
                self._run(step)
            else:
                self.machine.decode(decoded)
                self._present.add(decoded)

    def release(self, value: int) -> None:
        """Count one use of a value as done; the last one lets it go."""
        self._left[value] -= 1
        if self._left[value] == 0:
            self._present.discard(value)
            self.machine.free(value)
            if self._outer is not None and value in self._program.retained:
                self._outer.release(value)

    def _missing(self, value: int) -> tuple[list[int], list[tuple[int, int | None]]]:
        """Values to fetch; steps to run, and values to decode instead, in order."""
        flow, decodes = self._program.flow, self._program.decodes
        fetched: set[int] = set()
        steps: set[int] = set()
        decoded: set[int] = set()
        wanted = [value]
        while wanted:
            value = wanted.pop()
            maker = flow.maker_of[value]
            if value in self._present:
                continue
            if value in self._program.retained:
                fetched.add(value)
            elif value in decodes:
                decoded.add(value)
            elif maker not in steps:
                steps.add(maker)
                wanted.extend(flow.inputs[maker])
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
