"""Recompute programs: which ops rebuild a region's dropped values, and when.

A *value* is one content of a storage: an op that makes a storage makes a value, an op
that writes in place makes the next value of the same storage. Values are assigned
once, so what an op has read is always well defined.

``Rebuild`` decides what runs and what is let go, step by step. The simulator and the
engine both drive it, one counting bytes and one running kernels, so that what was
predicted is what happens.

Regions nest. While the outer one is rebuilt, an inner one hands on what others need and
keeps only what it needs to rebuild itself: its holds, which are wanted of the outer one
like any value. So a step inside ``d`` inner regions may run ``1 + d`` times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass


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
class NestedRegion:
    """A region inside another one."""

    start: int  # first step
    stop: int  # the step after its last one
    kept: frozenset[int]  # values that stay when the region around it is rebuilt
    outer: int = 0  # the part around it, counted from 1; 0 for the whole region


@dataclass(frozen=True, slots=True)
class Program:
    """What rebuilding the dropped values of a region takes."""

    flow: Flow
    steps: frozenset[int]  # run again, each once
    uses: dict[int, int]  # value -> reads by steps, by backward and by inner regions
    retained: frozenset[int]  # kept by the region itself, or by the one around it
    decodes: frozenset[int]  # values that come back from their encoded form
    overwritten_inputs: frozenset[
        int
    ]  # external values that steps need and forward overwrote
    wanted: frozenset[int] = frozenset()  # by backward
    outer: int = 0  # as in Part
    inner: tuple[Program, ...] = ()  # one for every part, in their order

    def runs(self) -> Counter[int]:
        """How often every step runs again, in inner regions, too."""
        found = Counter(self.steps)
        for part in self.inner:
            found.update(part.steps)
        return found


def compile_program(
    flow: Flow,
    dropped: Iterable[tuple[int, int]],
    kept: Collection[int],
    encoded: Collection[int] = (),
    parts: Sequence[NestedRegion] = (),
) -> Program:
    """Find the steps that rebuild dropped values.

    Args:
        flow: The region's forward, complete.
        dropped: For every saved tensor that is not kept its value, and the innermost
            part in which it was saved, counted from 1; 0 outside of all parts.
        kept: Values that stay from forward on, as far as nothing overwrites them.
        encoded: Values of which an encoded form stays, whatever overwrites them.
        parts: Regions inside, outer ones before those inside them.
    """
    current = frozenset(value for value in kept if flow.is_current(value))
    whole = NestedRegion(0, len(flow.inputs), current)
    there = [current]  # for every part, what needs no rebuilding in it
    for part in parts:
        there.append(there[part.outer] | part.kept | {*encoded})
    wanted: list[list[int]] = [[] for _ in there]  # by backward
    handed_on: list[list[int]] = [[] for _ in there]  # what inner parts hold
    for value, number in dropped:
        wanted[number].append(value)
    inner: list[Program] = []
    for number in range(len(parts), 0, -1):
        part = parts[number - 1]
        mine, passed_on = _divide(flow, part, there[number], wanted[number])
        wanted[part.outer] += passed_on
        program = _compile(flow, part, mine, handed_on[number], there[number], ())
        handed_on[part.outer] += program.retained
        inner.append(program)
    program = _compile(flow, whole, wanted[0], handed_on[0], current, encoded)
    overwritten_inputs = {
        value for value in program.retained if not flow.is_current(value)
    }
    return replace(
        program,
        overwritten_inputs=frozenset(overwritten_inputs),
        inner=tuple(reversed(inner)),
    )


def _divide(
    flow: Flow, part: NestedRegion, there: Collection[int], values: Iterable[int]
) -> tuple[list[int], list[int]]:
    """What a part makes and lets go, and what the region around it has for it."""
    mine: list[int] = []
    passed_on: list[int] = []
    for value in values:
        inside = part.start <= flow.maker_of[value] < part.stop
        (mine if inside and value not in there else passed_on).append(value)
    return mine, passed_on


def _compile(
    flow: Flow,
    part: NestedRegion,
    dropped: Sequence[int],
    handed_on: Sequence[int],
    there: Collection[int],
    encoded: Collection[int],
) -> Program:
    wanted = [*dropped, *handed_on]
    uses = Counter(wanted)
    steps: set[int] = set()
    retained: set[int] = set()
    decodes: set[int] = set()
    while wanted:
        value = wanted.pop()
        maker = flow.maker_of[value]
        if value in there or not part.start <= maker < part.stop:
            retained.add(value)
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
        frozenset(retained),
        frozenset(decodes),
        frozenset(),
        frozenset(dropped),
        part.outer,
    )
