"""Rebuild what a region dropped, op by op, with the module's own forward untouched.

A ``Rebuilder`` belongs to one forward of a region. When autograd needs a dropped
tensor, only the ops behind it are rerun. Those ops were recorded in that forward
(``recording/recorder.py``), or in an earlier one whose guards this forward passed
(``guards/checker.py``). So another shape, branch or number gives another program,
never a stale one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ckplan.applying.moving.moved import Group, Moved
from ckplan.applying.moving.mover import Form
from ckplan.applying.rebuilding.schedule import Answer, Schedule, Stage
from ckplan.applying.rebuilding.script import Code
from ckplan.applying.tensors.backwards import NOT_KEPT, kept_backward
from ckplan.applying.tensors.random_state import random_state, set_random_state
from ckplan.applying.tensors.retained import Retained, check_gathered
from ckplan.applying.tensors.streams import stream_order
from ckplan.errors import ApplyError

_Place: TypeAlias = tuple[torch.device, torch.Generator | None]
"""Owner of a random state: a generator, or a device."""


@dataclass
class _Start:
    """What a backward with ``retain_graph=True`` found, for the next one."""

    stage: Stage
    values: dict[int, Retained | torch.Tensor]
    encoded: dict[int, Form]
    states: dict[int, torch.Tensor]
    asked: set[int] = field(default_factory=set)  # saved tensors, since then


class Rebuilder:
    """Compiled program and retained tensors of one forward, for its backward."""

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        retained: Mapping[int, Retained],
        encoded: Mapping[int, Form],
        states: Mapping[int, torch.Tensor],
    ) -> None:
        """Take over the tensors and states of a forward.

        Args:
            name: Name of the region in errors.
            schedule: Program that rebuilds its dropped values.
            retained: Values to rebuild from, at least those that the program retains.
            encoded: Encoded and moved values, at least those that it decodes.
            states: Of the random generator before every random step that it runs.
        """
        program = schedule.program
        self.name = name
        self._schedule = schedule
        self._stage = schedule.start
        self._values: dict[int, Retained | torch.Tensor] = {}
        for value in program.retained:
            one = self._values[value] = retained[value]
            if type(one.tensor) is not _Parameter:
                one.settle()
        self._encoded = {value: encoded[value] for value in program.decodes}
        moved = [one for one in self._encoded.values() if isinstance(one, Moved)]
        self._moved = (
            Group(sorted(moved, key=lambda one: one.number)) if moved else None
        )
        self._states = {step: states[step] for step in schedule.drawn}
        self._found: dict[_Place, torch.Tensor] = {}  # random states to restore
        self._order = stream_order(self._tensors()) if schedule.on_gpu else None
        self._warned = self._interrupted = False
        self._backward = -1  # number of the one that asked last
        self._start: _Start | None = None

    @property
    def keeps_graph(self) -> bool:
        """Whether the backward that runs keeps all that it found, for another one."""
        return self._start is not None

    @property
    def holds_written(self) -> bool:
        """Whether it holds what its region wrote to tensors from outside."""
        return bool(self._schedule.written)

    def keep_written(self) -> None:
        """Copy what the region wrote outside, as its next forward writes there again.

        Until then it is no copy: most forwards come after the backward of the last one.
        """
        values = self._values if self._start is None else self._start.values
        for value in self._schedule.written:
            one = values.get(value)
            if isinstance(one, Retained):
                one.copy()

    def unpack(self, number: int) -> torch.Tensor:
        """Rebuild a dropped tensor.

        Args:
            number: Its number among the saved tensors of the forward.

        Raises:
            ApplyError: A tensor that it is rebuilt from changed, or a backward before
                was interrupted while it rebuilt.
        """
        if self._moved is not None:
            self._moved.ask()
        backward = torch._C._current_graph_task_id()
        if backward != self._backward or self._start is not None:
            self._begin(backward, number)
        stage = self._stage
        answer = stage.answers.get(number) or self._schedule.answer(stage, number)
        if self._interrupted:
            raise self._is_interrupted()
        if self._order is not None:
            self._order.follow(self._tensors())
        self._interrupted = True
        if answer.computes or _is_grad_enabled():  # with create_graph
            tensor = self._compute(answer)
        else:
            tensor = self._run(answer.code)
        self._stage, self._interrupted = answer.stage, False
        return tensor

    def _begin(self, backward: int, number: int) -> None:
        """Begin a backward; after one that kept the graph, with all that it found.

        So what the one before rebuilt need not stay. It does where backward is itself
        differentiated, whose graph holds it, and where values move, which come once.
        """
        start, is_new = self._start, backward != self._backward
        if start is not None and (is_new or number in start.asked):
            self._stage, self._values = start.stage, dict(start.values)
            self._encoded, self._states = dict(start.encoded), dict(start.states)
            start.asked.clear()
        if is_new:
            self._backward = backward
            if self._moved is not None or kept_backward() == NOT_KEPT:
                start = None
            elif start is None:
                start = _Start(
                    self._stage,
                    dict(self._values),
                    dict(self._encoded),
                    dict(self._states),
                )
            self._start = start
        if start is not None:
            start.asked.add(number)

    def _compute(self, answer: Answer) -> torch.Tensor:
        """Run ops as in forward, and leave modes and generators as they were."""
        in_grad_mode, dtype = _is_grad_enabled(), _get_default_dtype()
        if in_grad_mode:
            torch.set_grad_enabled(False)
        if dtype is not self._schedule.default_dtype:
            torch.set_default_dtype(self._schedule.default_dtype)
        try:
            with _below_autograd() if answer.computes else nullcontext():
                return self._run(answer.code)
        finally:
            if _is_grad_enabled() != in_grad_mode:
                torch.set_grad_enabled(in_grad_mode)
            if _get_default_dtype() is not dtype:
                torch.set_default_dtype(dtype)
            if self._found:
                self._leave_generators_as_found()

    def _run(self, code: Code) -> torch.Tensor:
        try:
            return code(
                self._values, self._encoded, self._states, self._draw, self.name
            )
        except RuntimeError as error:
            retained = (x.tensor for x in self._values.values() if type(x) is Retained)
            check_gathered(self.name, retained, error)
            raise

    def _draw(
        self,
        device: torch.device,
        generator: torch.Generator | None,
        state: torch.Tensor,
    ) -> None:
        """Set a random state; the one from before is restored at the end."""
        place = device, generator
        if place not in self._found:
            self._found[place] = random_state(device, generator)
        set_random_state(device, generator, state)

    def _leave_generators_as_found(self) -> None:
        for place, state in self._found.items():
            set_random_state(*place, state)
        self._found.clear()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """All that is there now."""
        for one in self._values.values():
            yield one.tensor if isinstance(one, Retained) else one
        for encoded in self._encoded.values():
            if encoded.data is not None:
                yield encoded.data

    def _is_interrupted(self) -> ApplyError:
        return ApplyError(
            f"cannot rebuild {self.name}: an earlier backward was interrupted while it "
            "rebuilt",
            needed="a backward that runs to its end, or a new forward",
            hint="run the step again from its forward",
        )

    def warn_of(self, tensor: torch.Tensor) -> None:
        """Warn once that a rebuilt tensor differs from the dropped one."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} was recomputed with a different result: a tensor of "
                "shape "
                f"{tuple(tensor.shape)} is not what its forward saved, so gradients "
                "may be wrong; see ckplan verify, or run it again (by: rerun)",
                stacklevel=3,
            )


def _below_autograd() -> AbstractContextManager[object]:
    """The state in which ops were recorded: below autograd and autocast.

    Grad mode can be on below autograd, as it was for the kernels of the forward.
    """
    below: AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    if not _is_autocast_enabled():
        return below
    casting = [
        device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]
    stack = ExitStack()
    stack.enter_context(below)
    for device in casting:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_Parameter = torch.nn.Parameter  # saves looking up
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_get_default_dtype = torch.get_default_dtype
