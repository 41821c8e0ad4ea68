"""Recompute programs: the ops that rebuild a region's dropped values.

A *value* is one content of a storage. An op that makes a storage makes a value. An op
that writes in place makes the next value of the same storage. Values are assigned once,
so an op's inputs are always well defined.

Regions nest. While the outer region is rebuilt, an inner region passes on the values
that others need. It keeps only the values that it needs to rebuild itself: its retained
values. Backward reads them from the outer region like any other value. A step inside
``d`` inner regions may run ``1 + d`` times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

EXTERNAL = -1
"""Maker of a value from outside the region: an input, a parameter, a constant."""


class AbstractStep(Protocol):
    """The part of an op that a program needs."""

    @property
    def reads(self) -> Sequence[int]:
        """Storages that the op reads."""
        ...

    @property
    def writes(self) -> Sequence[int]:
        """Storages that the op changes in place."""
        ...

    @property
    def outputs(self) -> Sequence[int]:
        """Storage of every tensor returned, in order."""
        ...


@dataclass(slots=True)
class Flow:
    """The values of a sequence of steps, appended as the steps run."""

    storage_of: list[int] = field(default_factory=list)  # value -> storage
    maker_of: list[int] = field(default_factory=list)  # value -> step, or EXTERNAL
    current: dict[int, int] = field(default_factory=dict)  # storage -> current value
    inputs: list[tuple[int, ...]] = field(default_factory=list)  # step -> values read
    outputs: list[tuple[int, ...]] = field(default_factory=list)  # step -> values made
    overwrites: list[dict[int, int]] = field(default_factory=list)  # old -> new value
    returned: list[tuple[int, ...]] = field(default_factory=list)  # one per output

    def value(self, storage: int) -> int:
        """The current value of a storage; external if no step made it."""
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
        """Whether nothing has overwritten the value."""
        return self.current[self.storage_of[value]] == value

    def _make(self, storage: int, maker: int) -> int:
        self.storage_of.append(storage)
        self.maker_of.append(maker)
        return len(self.storage_of) - 1


@dataclass(frozen=True, slots=True)
class NestedRegion:
    """A region inside another region."""

    start: int  # first step
    stop: int  # the step after its last one
    kept: frozenset[int]  # values it saves while the outer region is rebuilt
    outer: int = 0  # number of the enclosing part, from 1; 0: the whole region


@dataclass(frozen=True, slots=True)
class Program:
    """The steps and values that rebuild the dropped values of a region."""

    flow: Flow
    steps: frozenset[int]  # rerun, each once
    uses: dict[int, int]  # value -> reads by steps, by backward and by inner regions
    retained: frozenset[int]  # kept by the region or by the region around it
    decodes: frozenset[int]  # values decoded from their encoded form
    overwritten_inputs: frozenset[int]  # retained values that forward overwrote
    needed: frozenset[int] = frozenset()  # values that backward reads
    outer: int = 0  # as in NestedRegion
    inner: tuple[Program, ...] = ()  # one per part, in the order of parts

    def runs(self) -> Counter[int]:
        """Step -> how often it reruns, inner regions included."""
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
        dropped: (value, part) of every saved tensor that is not kept. ``part`` is the
            number, from 1, of the innermost part that saved it; 0 outside all parts.
        kept: Values that stay after forward, unless something overwrites them.
        encoded: Values whose encoded form stays, even if something overwrites them.
        parts: Inner regions; outer ones before those inside them.
    """
    current = frozenset(value for value in kept if flow.is_current(value))
    whole = NestedRegion(0, len(flow.inputs), current)
    available = [current]  # per part: values that it need not rebuild
    for part in parts:
        available.append(available[part.outer] | part.kept | {*encoded})
    needed: list[list[int]] = [
        [] for _ in available
    ]  # per part: values that backward reads
    inner_retained: list[list[int]] = [
        [] for _ in available
    ]  # per part: values that its inner parts retain
    for value, number in dropped:
        needed[number].append(value)
    inner: list[Program] = []
    for number in range(len(parts), 0, -1):
        part = parts[number - 1]
        made_here, from_outer = _split_by_maker(
            flow, part, available[number], needed[number]
        )
        needed[part.outer] += from_outer
        program = _compile(
            flow, part, made_here, inner_retained[number], available[number], ()
        )
        inner_retained[part.outer] += program.retained
        inner.append(program)
    program = _compile(flow, whole, needed[0], inner_retained[0], current, encoded)
    overwritten_inputs = {
        value for value in program.retained if not flow.is_current(value)
    }
    return replace(
        program,
        overwritten_inputs=frozenset(overwritten_inputs),
        inner=tuple(reversed(inner)),
    )


def _split_by_maker(
    flow: Flow, part: NestedRegion, available: Collection[int], values: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Split values into those that a part rebuilds and those its outer region has."""
    made_here: list[int] = []
    from_outer: list[int] = []
    for value in values:
        inside = part.start <= flow.maker_of[value] < part.stop
        (made_here if inside and value not in available else from_outer).append(value)
    return made_here, from_outer


def _compile(
    flow: Flow,
    part: NestedRegion,
    dropped: Sequence[int],
    inner_retained: Sequence[int],
    available: Collection[int],
    encoded: Collection[int],
) -> Program:
    needed = [*dropped, *inner_retained]
    uses = Counter(needed)
    steps: set[int] = set()
    retained: set[int] = set()
    decodes: set[int] = set()
    while needed:
        value = needed.pop()
        maker = flow.maker_of[value]
        if value in available or not part.start <= maker < part.stop:
            retained.add(value)
        elif value in encoded:
            decodes.add(value)
        elif maker not in steps:
            steps.add(maker)
            uses.update(flow.inputs[maker])
            needed.extend(flow.inputs[maker])
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
