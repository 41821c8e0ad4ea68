"""Recompute programs: which ops rebuild a region's dropped values, and when.

A *value* is one content of a storage: an op that makes a storage makes a value, an op
that writes in place makes the next value of the same storage. Values are assigned
once, so what an op has read is always well defined.

``Rebuild`` decides what runs and what is let go, step by step. The simulator and the
engine both drive it, one counting bytes and one running kernels, so that what was
predicted is what happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

EXTERNAL = -1
"""Maker of a value that the region was given: an input, a parameter, a constant."""


class AbstractStep(Protocol):
    """What a program must know of an op."""

    @property
    def reads(self) -> Sequence[int]:
        """Storages read."""
        ...

    @property
    def writes(self) -> Sequence[int]:
        """Storages changed in place."""
        ...

    @property
    def outputs(self) -> Sequence[int]:
        """Storage of every tensor returned, in order."""
        ...


@dataclass(slots=True)
class Flow:
    """The values of a sequence of steps, grown as the steps run."""

    storage_of: list[int] = field(default_factory=list)  # value -> storage
    maker_of: list[int] = field(default_factory=list)  # value -> step, or EXTERNAL
    current: dict[int, int] = field(default_factory=dict)  # storage -> its value now
    inputs: list[tuple[int, ...]] = field(default_factory=list)  # step -> values read
    outputs: list[tuple[int, ...]] = field(default_factory=list)  # step -> values made
    overwrites: list[dict[int, int]] = field(default_factory=list)  # old -> new value
    returned: list[tuple[int, ...]] = field(default_factory=list)  # one per output

    def value(self, storage: int) -> int:
        """The value that a storage holds now; external if no step made it."""
        if storage not in self.current:
            self.current[storage] = self._make(storage, EXTERNAL)
        return self.current[storage]

    def add(self, step: AbstractStep) -> int:
        """Append a step that has run; returns its number."""
        number = len(self.inputs)
        current = self.current
        read = dict.fromkeys(map(self.value, (*step.reads, *step.writes)))
        overwritten: dict[int, int] = {}
        for storage in dict.fromkeys(step.writes):
            old = current[storage]
            overwritten[old] = current[storage] = self._make(storage, number)
        made = list(overwritten.values())
        for storage in step.outputs:
            if storage not in current:
                current[storage] = self._make(storage, number)
                made.append(current[storage])
        self.inputs.append(tuple(read))
        self.overwrites.append(overwritten)
        self.returned.append(tuple([current[storage] for storage in step.outputs]))
        self.outputs.append(tuple(made))
        return number

    def is_current(self, value: int) -> bool:
        """Whether nothing has overwritten the value since."""
        return self.current[self.storage_of[value]] == value

    def _make(self, storage: int, maker: int) -> int:
        self.storage_of.append(storage)
        self.maker_of.append(maker)
        return len(self.storage_of) - 1


@dataclass(frozen=True, slots=True)
class Program:
    """What rebuilding the dropped values of a region takes."""

    flow: Flow
    steps: frozenset[int]  # run again, each once
    uses: dict[int, int]  # value -> reads by steps and by backward
    holds: frozenset[int]  # values the region itself keeps for its steps
    decodes: frozenset[int]  # values that come back from their encoded form
    lost: frozenset[int]  # external values that steps need and forward overwrote

    def given(self, value: int) -> bool:
        """Whether the value is held rather than rebuilt."""
        return value in self.holds


def compile_program(
    flow: Flow,
    dropped: Iterable[int],
    kept: Collection[int],
    encoded: Collection[int] = (),
) -> Program:
    """Find the steps that rebuild ``dropped`` values.

    Args:
        flow: The region's forward, complete.
        dropped: One value for every saved tensor that is not kept.
        kept: Values that stay from forward on, as far as nothing overwrites them.
        encoded: Values of which an encoded form stays, whatever overwrites them.
    """
    wanted = list(dropped)
    uses = Counter(wanted)
    steps: set[int] = set()
    holds: set[int] = set()
    decodes: set[int] = set()
    lost: set[int] = set()
    while wanted:
        value = wanted.pop()
        maker = flow.maker_of[value]
        if maker == EXTERNAL or (value in kept and flow.is_current(value)):
            holds.add(value)
            if not flow.is_current(value):
                lost.add(value)
        elif value in encoded:
            decodes.add(value)
        elif maker not in steps:
            steps.add(maker)
            uses.update(flow.inputs[maker])
            wanted.extend(flow.inputs[maker])
    return Program(
        flow,
        frozenset(steps),
        dict(uses),
        frozenset(holds),
        frozenset(decodes),
        frozenset(lost),
    )


class AbstractMachine(Protocol):
    """What carries out a rebuild: kernels in the engine, a tally in the simulator."""

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run a step; first copy the values it would overwrite that are still needed.

        Of the values it makes, only those in ``keep`` stay.
        """

    def decode(self, value: int) -> None:
        """Make a value from its encoded form, which goes."""

    def free(self, value: int) -> None:
        """Let a value go."""


class Rebuild:
    """One execution of a program in one backward pass."""

    __slots__ = ("_left", "_machine", "_present", "_program")

    def __init__(self, program: Program, machine: AbstractMachine) -> None:
        self._program = program
        self._machine = machine
        self._left = dict(program.uses)
        self._present = set(program.holds)

    def want(self, value: int) -> None:
        """Make a value present, running again what it needs, in forward's order."""
        if value in self._present:
            return
        for step, decoded in self._missing(value):
            if decoded is None:
                self._run(step)
            else:
                self._machine.decode(decoded)
                self._present.add(decoded)

    def release(self, value: int) -> None:
        """Count one use of a value as done; the last one lets it go."""
        self._left[value] -= 1
        if self._left[value] == 0:
            self._present.discard(value)
            self._machine.free(value)

    def exhausted(self, value: int) -> bool:
        """Whether every use of a value is done."""
        return self._left[value] == 0

    def _missing(self, value: int) -> list[tuple[int, int | None]]:
        """Steps to run, and values to decode in place of their makers, in order."""
        flow, decodes = self._program.flow, self._program.decodes
        steps: set[int] = set()
        decoded: set[int] = set()
        wanted = [value]
        while wanted:
            value = wanted.pop()
            maker = flow.maker_of[value]
            if value in self._present or maker in steps:
                continue
            if value in decodes:
                decoded.add(value)
            else:
                steps.add(maker)
                wanted.extend(flow.inputs[maker])
        runs = ((step, None) for step in sorted(steps))
        decodings = ((flow.maker_of[v], v) for v in sorted(decoded))
        return sorted([*decodings, *runs], key=lambda item: item[0])

    def _run(self, step: int) -> None:
        flow = self._program.flow
        copies = [
            value
            for value in flow.overwrites[step]
            if self._program.given(value) or self._left[value] > 1
        ]
        keep = [
            value
            for value in flow.outputs[step]
            if self._left.get(value, 0) and value not in self._present
        ]
        self._machine.run(step, copies, keep)
        self._present.update(keep)
        for value in flow.inputs[step]:
            self.release(value)
