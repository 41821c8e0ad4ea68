"""Rebuild what a region dropped, op by op, with the module's own forward untouched.

A ``Rebuilder`` belongs to one forward of a region. When autograd needs a dropped
tensor, only the ops behind it are rerun. Those ops were recorded in that forward
(``recording/recorder.py``), or in an earlier one whose guards this forward passed
(``guards/checker.py``). So another shape, branch or number gives another program,
never a stale one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from ckplan.applying.tensors.random_state import random_state, set_random_state
from ckplan.applying.tensors.retained import (
    Ref,
    Retained,
    check_gathered,
    copy_of,
    tensors_in,
    view_of,
)
from ckplan.applying.tensors.streams import stream_order
from ckplan.encodings import Encoded, decode
from ckplan.simulating.program import Flow, Program
from ckplan.simulating.rebuild import Rebuild

_Place: TypeAlias = tuple[torch.device, torch.Generator | None]
"""Owner of a random state: a generator, or a device."""


class Step(NamedTuple):
    """An op that ran."""

    func: Any  # an OpOverload
    args: list[Any]  # tensors as Ref, also inside lists
    kwargs: dict[str, Any]
    generator: torch.Generator | None
    device: torch.device
    in_grad_mode: bool  # some kernels ask: LSTMs keep a workspace


class Rebuilder:
    """Program and retained tensors of one forward, for its backward."""

    def __init__(
        self,
        name: str,
        program: Program,
        steps: Mapping[int, Step],
        retained: Mapping[int, Retained],
        encoded: Mapping[int, Encoded],
        states: Mapping[int, torch.Tensor],
    ) -> None:
        """Take over the tensors and states of a forward.

        Args:
            name: Name of the region in errors.
            program: Program that rebuilds its dropped values.
            steps: At least those that the program runs.
            retained: Values to rebuild from, at least those that the program retains.
            encoded: Encoded values, at least those that it decodes.
            states: Of the random generator before every random step that it runs.
        """
        self.name = name
        runs = program.runs()
        self._left = _RegionState(
            name,
            program.flow,
            steps,
            {value: retained[value] for value in program.retained},
            {value: encoded[value] for value in program.decodes},
            {step: states[step] for step in runs.keys() & states.keys()},
            runs,
        )
        for one in self._left.retained.values():
            one.settle()
        values = {value: one.tensor for value, one in self._left.retained.items()}
        self._rebuild = Rebuild(program, _Kernels(self._left, values))
        self._order = stream_order(values.values())
        self._warned = False

    def unpack(self, ref: Ref, part: int) -> torch.Tensor:
        """Rebuild a dropped tensor.

        Args:
            ref: The tensor.
            part: The inner region that saved it, counted from 1; 0 if none did.

        Raises:
            ApplyError: A tensor that it is rebuilt from changed.
        """
        level = self._rebuild.owner(ref.value, part)
        values = level.machine.values
        if self._order is not None:
            self._order.follow(self._left.tensors())
        in_grad_mode = torch.is_grad_enabled()  # with create_graph
        try:
            if ref.value not in values:
                with _below_autograd():
                    level.materialize(ref.value)
            if torch.is_grad_enabled():
                torch.set_grad_enabled(False)
            tensor = view_of(values[ref.value], ref)
        finally:
            if torch.is_grad_enabled() != in_grad_mode:
                torch.set_grad_enabled(in_grad_mode)
            if self._left.generators:
                self._left.leave_generators_as_found()
        level.release(ref.value)
        return tensor

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


@dataclass(slots=True)
class _RegionState:
    """What a forward leaves behind, for a region and those inside it."""

    name: str
    flow: Flow
    steps: Mapping[int, Step]
    retained: dict[int, Retained]
    encoded: dict[int, Encoded]
    states: dict[int, torch.Tensor]
    runs: Counter[int]  # of steps, still to come
    generators: dict[_Place, torch.Tensor] = field(default_factory=dict)  # as found
    present: list[dict[int, torch.Tensor]] = field(default_factory=list)  # of machines

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is there now."""
        for values in self.present:
            yield from values.values()
        for encoded in self.encoded.values():
            yield encoded.data

    def draw_again(self, step: int) -> None:
        """Set the random state that a step had in forward."""
        self.runs[step] -= 1
        state = self.states.get(step)
        if state is not None:
            place = (self.steps[step].device, self.steps[step].generator)
            if place not in self.generators:
                self.generators[place] = random_state(*place)
            set_random_state(*place, state)
            if not self.runs[step]:
                del self.states[step]

    def leave_generators_as_found(self) -> None:
        """Restore the random states from before."""
        for place, state in self.generators.items():
            set_random_state(*place, state)
        self.generators.clear()


class _Kernels:
    """The machine that ``Rebuild`` drives, one for every inner region, too."""

    def __init__(
        self,
        left: _RegionState,
        values: dict[int, torch.Tensor],
        around: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.values = values
        left.present.append(values)
        self._left = left
        self._around = around  # values of the region around this one

    def nested(self) -> _Kernels:
        return _Kernels(self._left, {}, self.values)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Rerun an op."""
        op, flow, values = self._left.steps[step], self._left.flow, self.values
        present, moved = self._inputs(step)
        for value in copies:
            present[value] = copy_of(present[value])
        args = [
            _give(x, present, moved) if type(x) in _WITH_TENSORS else x for x in op.args
        ]
        kwargs = {key: _give(x, present, moved) for key, x in op.kwargs.items()}
        self._left.draw_again(step)
        if torch.is_grad_enabled() != op.in_grad_mode:
            torch.set_grad_enabled(op.in_grad_mode)
        try:
            out = op.func(*args, **kwargs)
        except RuntimeError as error:
            check_gathered(self._left.name, present.values(), error)
            raise
        for old, new in flow.overwrites[step].items():
            if new in keep:
                values[new] = present[old]
        returned = [out] if type(out) is torch.Tensor else tensors_in(out)
        for value, tensor in zip(flow.returned[step], returned, strict=True):
            if value in keep:
                values.setdefault(value, tensor)

    def _inputs(self, step: int) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
        """What an op reads, and by how much that lies elsewhere now, where it does."""
        present: dict[int, torch.Tensor] = {}
        moved: dict[int, int] = {}
        values, retained = self.values, self._left.retained
        for value in self._left.flow.inputs[step]:
            if value in values:
                present[value] = values[value]
                if value in retained and (by := retained[value].moved(self._left.name)):
                    moved[value] = by
        return present, moved

    def decode(self, value: int) -> None:
        """Make a value from its encoded form."""
        self.values[value] = decode(self._left.encoded.pop(value))

    def fetch(self, value: int) -> None:
        """Take a value from the outer region."""
        assert self._around is not None, "the outermost region has what it holds"
        self.values[value] = self._around[value]

    def free(self, value: int) -> None:
        """Free a value."""
        self.values.pop(value, None)
        if self._around is None:
            self._left.retained.pop(value, None)


_WITH_TENSORS = (Ref, list)  # arguments that may be or have one


def _give(
    argument: Any, present: Mapping[int, torch.Tensor], moved: Mapping[int, int]
) -> Any:
    """An argument as the op takes it."""
    if type(argument) is Ref:
        if argument.value in moved:
            offset = argument.offset + moved[argument.value]
            argument = argument._replace(offset=offset)
        return view_of(present[argument.value], argument)
    if type(argument) is list:
        return [_give(item, present, moved) for item in argument]
    return argument


def _below_autograd() -> AbstractContextManager[object]:
    """The state in which ops were recorded: below autograd and autocast.

    Grad mode can be on below autograd, as it was for the kernels of the forward.
    """
    below: AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    casting = [
        device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]
    if not casting:
        return below
    stack = ExitStack()
    stack.enter_context(below)
    for device in casting:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
