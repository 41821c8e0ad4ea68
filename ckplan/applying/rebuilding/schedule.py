"""What backward does of a recompute program, one saved tensor after the other.

``simulating.rebuild.Rebuild`` decides which steps run and what is freed when autograd
asks for a dropped tensor. Its decisions depend on what was asked for before, and on
nothing else. So they are made once for each order in which backward asks, compiled,
and repeated by the backwards of later forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import NamedTuple, TypeAlias

import torch

from ckplan.applying.rebuilding.script import RETAINED, Code, Kind, Script
from ckplan.applying.rebuilding.step import Step
from ckplan.applying.tensors.retained import Ref
from ckplan.simulating.program import EXTERNAL, Program
from ckplan.simulating.rebuild import Rebuild

_MOST_ANSWERS = 4096  # compiled for orders in which backward asked; then begins anew


class Packed(NamedTuple):
    """A saved tensor, as recorded."""

    size: tuple[int, ...]
    value: int  # -1 for a tensor from elsewhere
    ref: Ref | None = None  # of a tensor that is dropped
    part: int = 0  # the inner region that saved it, counted from 1


Asked: TypeAlias = tuple["Asked", int] | None
"""The numbers of the saved tensors that backward asked for: all but the last, last."""


@dataclass(slots=True, eq=False)
class Stage:
    """A moment of backward: some saved tensors were asked for, in some order."""

    asked: Asked = None
    answers: dict[int, Answer] = field(default_factory=dict)  # by number


class Answer(NamedTuple):
    """What is done when backward asks for a saved tensor at a stage."""

    code: Code
    computes: bool  # whether it runs ops, beside views
    stage: Stage  # the next one


class Schedule:
    """The compiled program of a region; forwards that ran the same ops share it."""

    def __init__(
        self,
        program: Program,
        steps: Mapping[int, Step],
        packed: Sequence[Packed],
        drawn: Collection[int],
    ) -> None:
        """Compile nothing yet.

        Args:
            program: Program that rebuilds dropped values.
            steps: At least those that the program runs.
            packed: The saved tensors of the forward, by number.
            drawn: Steps whose random state is kept, at least those that the program
                runs.
        """
        self.program = program
        self.steps = steps
        self.packed = packed
        self.runs = program.runs()
        self.default_dtype = _default_dtype_of(steps)
        self.drawn = self.runs.keys() & drawn
        self.on_gpu = any(step.device.type == "cuda" for step in steps.values())
        self.written = _written(program)
        self.start = Stage()
        self._num_answers = 0
        self._lock = Lock()
        self._at: tuple[Stage, Rebuild[_Machine], Script] | None = None

    def answer(self, stage: Stage, number: int) -> Answer:
        """Compile what is to be done when backward asks for a saved tensor."""
        with self._lock:
            found = stage.answers.get(number)
            if found is None:
                found = stage.answers[number] = self._compile(stage, number)
            return found

    def _compile(self, stage: Stage, number: int) -> Answer:
        if self._at is None or self._at[0] is not stage:
            rebuild, script = self._begin()
            for before in _in_order(stage.asked):
                self._write(rebuild, script, before)
        else:
            _, rebuild, script = self._at
        self._at = None  # what an interrupt leaves half written is not gone on with
        self._write(rebuild, script, number)
        after = Stage((stage.asked, number))
        self._num_answers += 1
        if self._num_answers % _MOST_ANSWERS == 0:
            self.start = Stage()  # backwards that began go on where they are
        self._at = after, rebuild, script
        return Answer(script.end(), script.computes, after)

    def _begin(self) -> tuple[Rebuild[_Machine], Script]:
        kinds: dict[int, Kind] = dict.fromkeys(self.program.retained, RETAINED)
        flow = self.program.flow
        script = Script(
            flow,
            self.steps,
            self.drawn,
            self.default_dtype,
            dict(self.runs),
            kinds,
        )
        return Rebuild(self.program, _Machine(script, count())), script

    def _write(self, rebuild: Rebuild[_Machine], script: Script, number: int) -> None:
        _, _, ref, part = self.packed[number]
        assert ref is not None, "internal error: a kept tensor is not rebuilt"
        script.begin()
        level = rebuild.owner(ref.value, part)
        level.materialize(ref.value)
        script.take(level.machine.base + ref.value, ref.place)
        level.release(ref.value)


def _written(program: Program) -> list[int]:
    """Retained values that the region wrote to tensors from outside."""
    flow = program.flow
    given = {flow.storage_of[v] for v, at in enumerate(flow.maker_of) if at == EXTERNAL}
    made = (v for v in program.retained if flow.maker_of[v] != EXTERNAL)
    return [value for value in made if flow.storage_of[value] in given]


def _default_dtype_of(steps: Mapping[int, Step]) -> torch.dtype:
    """The default type in which most programs run from end to end."""
    for step in steps.values():
        return step.default_dtype
    return torch.get_default_dtype()


def _in_order(asked: Asked) -> list[int]:
    numbers = []
    while asked is not None:
        asked, number = asked
        numbers.append(number)
    return numbers[::-1]


class _Machine:
    """Writes down what ``Rebuild`` decides, one machine for each nested region."""

    def __init__(self, script: Script, numbers: Iterator[int], around: int = 0) -> None:
        self.base = next(numbers) * len(script.flow.storage_of)
        self._script = script
        self._numbers = numbers
        self._around = around  # where the values of the region around it begin

    def nested(self) -> _Machine:
        """Create the machine of an inner region."""
        return _Machine(self._script, self._numbers, self.base)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run a step."""
        self._script.run(self.base, step, copies, keep)

    def decode(self, value: int) -> None:
        """Decode a value."""
        self._script.decode(self.base + value, value)

    def fetch(self, value: int) -> None:
        """Take a value from the machine of the outer region."""
        self._script.fetch(self.base + value, self._around + value)

    def free(self, value: int) -> None:
        """Free a value."""
        self._script.free(self.base + value)
