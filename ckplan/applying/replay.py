"""Watch a region's forward call by call: it repeats one that was written down.

As long as every call is the one expected, what autograd saves can be dropped as it was
then, since the same program rebuilds it. From the first call that differs on, all is
kept: the result is right, only the memory is not what was planned.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ckplan.applying.calls import (
    Slots,
    UnknownArgumentError,
    asks_only,
    geometry_of,
    storage_of,
    switches,
)
from ckplan.applying.random_state import random_state
from ckplan.applying.recompute import (
    Dropped,
    Handle,
    Held,
    Kept,
    Rebuilder,
    hold,
    keep,
    tensors_in,
    unpack,
)
from ckplan.applying.template import CallRecord, Capture, Given, Template
from ckplan.encodings import Encoded, encode
from ckplan.errors import ApplyError
from ckplan.program import EXTERNAL, Program, compile_program


class Replay(TorchFunctionMode):
    """One forward of a region, compared with a template."""

    def __init__(self, name: str, template: Template) -> None:
        super().__init__()
        self.name = name
        self.template = template
        self.repeats = True  # as far as was seen
        self.frozen = False  # what differs is that something wants gradients, or not
        self._slots = Slots(self._meet)
        self._calls = iter(template.calls)
        self._next = next(self._calls, None)
        self._num_given = 0
        self._num_packed = 0
        self._in_call = False
        self._dropped_in_call = False
        self._packing = False
        self._storages: dict[int, int] = {}  # address -> storage of the template
        self._met: set[int] = set()  # those storages
        self._held: dict[int, Held] = {**template.constants}
        self._encoded: dict[int, Encoded] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._wanted: list[tuple[int, int]] = []  # value, part
        self._handle = Handle()
        self._contexts = ExitStack()

    def open(self) -> None:
        """Begin to watch."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._contexts.enter_context(hooks)
        self._contexts.enter_context(self)

    def close(self) -> None:
        """Forward is over: hold only what the program needs."""
        self._contexts.close()
        template = self.template
        self.repeats &= self._next is None
        self.repeats &= self._num_packed == len(template.packed)
        self._handle.rebuilder = Rebuilder(
            self.name,
            template.program if self.repeats else self._shorter_program(),
            template.steps,
            self._held,
            self._encoded,
            self._states,
        )
        self._slots.close()
        for tensors in (self._held, self._encoded, self._states):
            tensors.clear()

    def abandon(self) -> None:
        """Forward was interrupted: watch no longer."""
        self._contexts.close()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.repeats or self._packing:
            return func(*args, **kwargs)
        call = self._next
        if (call is None or call.func is not func) and asks_only(func):
            return func(*args, **kwargs)
        if call is None or not self._matches(call, func, args, kwargs):
            self.repeats = False
            return func(*args, **kwargs)
        for step in call.random_steps:
            self._states[step] = random_state(self.template.steps[step].device, None)
        self._in_call, self._dropped_in_call = True, False
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.repeats = False
            raise
        finally:
            self._in_call = False
        if self._num_packed != call.packed_after:
            self._give_up()
            return out
        self._slots.returned(out)
        if call.captures or call.brought:
            returned = tensors_in(out)
            if not self._brings(call, returned):
                self.repeats = False
                return out
            for capture in call.captures:
                self._capture(capture, returned[capture.place])
        self._next = next(self._calls, None)
        return out

    def _matches(
        self, call: CallRecord, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call is the one of the template."""
        if call.func is not func and call.func != func:
            return False
        try:
            same = call.arguments == self._slots.freeze(args, kwargs)
        except UnknownArgumentError:
            return False
        packed = self._num_packed == call.packed_before
        return same and packed and call.switches == switches(func)

    def _brings(self, call: CallRecord, returned: list[torch.Tensor]) -> bool:
        """Whether what a call brought from elsewhere is like the template's."""
        try:
            for place, given in call.brought:
                self._meet_as(given, returned[place])
        except (IndexError, UnknownArgumentError):
            return False
        return True

    def _meet(self, tensor: torch.Tensor) -> None:
        if self._num_given == len(self.template.given):
            raise UnknownArgumentError
        self._meet_as(self.template.given[self._num_given], tensor)
        self._num_given += 1

    def _meet_as(self, given: Given, tensor: torch.Tensor) -> None:
        """A tensor from elsewhere must be like the template's, and shared as there."""
        before, now = given.geometry, geometry_of(tensor)
        if before != now:
            grad = before.requires_grad
            self.frozen = before == now._replace(requires_grad=grad)
            raise UnknownArgumentError
        storage, address = given.storage, storage_of(tensor)._cdata
        value = self.template.value_of.get(storage)
        if address in self._storages:
            shared = self._storages[address] == storage
        else:
            shared = storage not in self._met
        if not shared:
            raise UnknownArgumentError
        self._storages[address] = storage
        self._met.add(storage)
        if value is not None and value not in self._held:
            self._held[value] = hold(tensor)

    def _capture(self, capture: Capture, tensor: torch.Tensor) -> None:
        if capture.form is None:
            self._held[capture.value] = hold(tensor)
            return
        small = encode(capture.form, tensor)
        assert small is not None, "the template's tensor was dense"
        self._encoded[capture.value] = small

    def _pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        self._packing = True  # own functions pack outside of any call
        try:
            return self._packed_as(tensor)
        finally:
            self._packing = False

    def _packed_as(self, tensor: torch.Tensor) -> Kept | Dropped:
        template, number = self.template, self._num_packed
        self._num_packed += 1
        there = self.repeats and number < self._num_expected
        if not there or template.packed[number].size != tensor.size():
            if self.repeats and self._in_call:
                self._give_up()
            self.repeats = False
            return keep(tensor, self.name)
        if number in template.captures:
            self._capture(template.captures[number], tensor)
        _, ref, part = template.packed[number]
        if ref is None:
            return keep(tensor, self.name)
        self._dropped_in_call |= self._in_call
        self._wanted.append((ref.value, part))
        return Dropped(self._handle, ref, part)

    @property
    def _num_expected(self) -> int:
        """How many tensors autograd had saved by the end of what runs now."""
        if self._next is None:
            return len(self.template.packed)
        return self._next.packed_after if self._in_call else self._next.packed_before

    def _give_up(self) -> None:
        """The same call saves other tensors: keep them, if none of it was dropped.

        Raises:
            ApplyError: One was, for the one that the template's call saved then.
        """
        if self._dropped_in_call:
            raise self._changed()
        self.repeats = False

    def _shorter_program(self) -> Program:
        """What rebuilds what was dropped before a call differed."""
        flow, parts = self.template.flow, self.template.parts
        kept = [value for value in self._held if flow.maker_of[value] != EXTERNAL]
        encoded = self._encoded.keys()
        program = compile_program(flow, self._wanted, kept, encoded, parts)
        known = program.runs().keys() <= self.template.steps.keys()
        if not known or not program.holds <= self._held.keys():
            raise self._changed()
        return program

    def _changed(self) -> ApplyError:
        return ApplyError(
            f"cannot rebuild {self.name}: the same calls of torch saved other tensors "
            "than in an earlier forward",
            needed="forwards that torch runs in the same way, op by op",
            hint="run it again (by: rerun), or leave this call out of the plan",
        )
