"""Check a region's forward call by call against a recorded one.

While every call passes its guard, saved tensors are dropped as in the recorded forward,
since the same program rebuilds them. From the first miss on, the rest is recorded op by
op (``resume.py``). If a miss is found only after the call's ops ran, the rest is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ckplan.applying.guards.guarded_program import (
    CallGuard,
    CallSite,
    Capture,
    GuardedProgram,
)
from ckplan.applying.guards.input_checker import InputChecker
from ckplan.applying.guards.resume import Beginning, OpenInner, resume
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.recording.op_keys import OpKey, Saves
from ckplan.applying.recording.recorder import Recorder, otherwise_saved
from ckplan.applying.recording.saved_tensors import Dropped, Handle, Kept, keep, unpack
from ckplan.applying.tensors.arguments import (
    Slots,
    UnknownArgumentError,
    is_query,
    moves,
    switches,
)
from ckplan.applying.tensors.compiled import is_within_compiled, uncompiled
from ckplan.applying.tensors.random_state import random_state
from ckplan.applying.tensors.retained import Retained, retain, retain_copy, tensors_in
from ckplan.encodings import Encoded, encode


class GuardChecker(TorchFunctionMode):
    """One forward of a region, compared with a guarded program."""

    def __init__(
        self,
        name: str,
        top: str,
        expected: GuardedProgram,
        record: Callable[[], Recorder],
    ) -> None:
        """Set up the check.

        Args:
            name: Name of the region in errors.
            top: FQN of the module that op paths are relative to.
            expected: Guarded program to compare the forward with.
            record: Makes the recorder for the rest of a forward that misses.
        """
        super().__init__()
        self.name = name
        self.path: list[str] = [top]  # FQNs of the modules that run, innermost last
        self.expected = expected
        self.rerecorder: Recorder | None = None  # from the first miss on
        self.kept = False  # the rest, since it could not be recorded
        self._record = record
        self._inner: list[tuple[CallGuard | None, str, Saves]] = []  # open ones
        self._num_begun = 0  # regions inside
        self._num_modes = 0
        self._calls = iter(expected.calls)
        self._next = next(self._calls, None)
        self._num_packed = 0
        self._in_call = False
        self._dropped_in_call = False
        self._packing = False
        self._held: dict[int, Retained] = {**expected.constants}
        self._inputs = InputChecker(expected, self._held)
        self._slots = Slots(self._inputs.check_next)
        self._encoded: dict[int, Encoded] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._wanted: list[tuple[int, int]] = []  # value, part
        self._handle = Handle()
        self._contexts = ExitStack()

    def open(self) -> None:
        """Begin to check."""
        self._num_modes = torch._C._len_torch_dispatch_stack()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._contexts.enter_context(uncompiled())
        self._contexts.enter_context(hooks)
        self._contexts.enter_context(self)

    def begin_inner(self, top: str, saves: Saves) -> None:
        """Begin a nested region."""
        if self.recorder is not None:
            self.recorder.begin_inner(top, saves)
        else:
            self._inner.append((self._next, top, saves))
            self._num_begun += 1

    def end_inner(self) -> set[OpKey] | None:
        """End the innermost nested region; return the saves that named an op."""
        if self.recorder is not None:
            return self.recorder.end_inner()
        self._inner.pop()
        return None

    @property
    def guards_hold(self) -> bool:
        """Whether all calls so far passed their guards."""
        return self.rerecorder is None

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of the rest after a miss; None if the rest is kept."""
        return (
            self.rerecorder
            if self.rerecorder is not None and self.rerecorder.watches
            else None
        )

    def close(self) -> None:
        """End the forward; retain only tensors that the program needs."""
        self._contexts.close()
        expected = self.expected
        missing = self._next is not None or self._num_packed < len(expected.packed)
        if self.rerecorder is None and missing:
            self._rerecord_from(self._place(self._next))
        if self.rerecorder is not None:
            self.rerecorder.close()
        else:
            self._handle.rebuilder = Rebuilder(
                self.name,
                expected.program,
                expected.steps,
                self._held,
                self._encoded,
                self._states,
            )
        self._forget()

    def release(self) -> None:
        """Free everything retained from the forward."""
        if self.rerecorder is not None:
            self.rerecorder.release()

    def abandon(self) -> None:
        """Stop checking: the forward was interrupted."""
        self._contexts.close()
        if self.rerecorder is not None:
            self.rerecorder.abandon()

    def _forget(self) -> None:
        self._slots.close()
        for tensors in (self._held, self._encoded, self._states):
            tensors.clear()

    def _place(self, call: CallGuard | None) -> int:
        """The first step of a call, or the number of steps if no call is left."""
        return len(self.expected.steps) if call is None else call.start

    def _rerecord_from(self, stop: int) -> Recorder:
        """Leave the guarded program at a step and record from there on."""
        inner = [OpenInner(self._place(c), top, saves) for c, top, saves in self._inner]
        rerecorder = self.rerecorder = self._record()
        begun = Beginning(
            expected=self.expected,
            stop=stop,
            path=self.path,
            inner=inner,
            made=self._slots.made(),
            retained=self._held,
            encoded=self._encoded,
            states=self._states,
            wanted=self._wanted,
            handle=self._handle,
        )
        resume(rerecorder, begun)
        self._forget()
        return rerecorder

    def _miss_before_call(self) -> None:
        """Handle a miss before the call's ops ran: record from here on."""
        call, packed = self._next, len(self.expected.packed)
        as_expected = self._num_packed == (call.packed_before if call else packed)
        alone = torch._C._len_torch_dispatch_stack() == self._num_modes
        alone &= not is_within_compiled()
        moved = any(moves(other.func) for other in self.expected.calls)
        rerecorder = self._rerecord_from(self._place(call))
        if as_expected and alone and not moved:
            rerecorder.go_on()
        else:
            self.kept = True

    def _miss_after_call(self, stop: int) -> None:
        """Handle a miss after the call's ops ran: keep the rest.

        Raises:
            ApplyError: A tensor that the call saved is already dropped.
        """
        if self._dropped_in_call:
            raise otherwise_saved(self.name)
        self._rerecord_from(stop)
        self.kept = True

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rerecorder, call = self.rerecorder, self._next
        if rerecorder is not None:
            return rerecorder.log.__torch_function__(func, types, args, kwargs)
        asks = (call is None or call.func is not func) and is_query(func)
        if asks or self._packing:
            return func(*args, **kwargs)
        if call is None or not self._matches(call, func, args, kwargs):
            self._miss_before_call()
            return self.__torch_function__(func, types, args, kwargs)
        self._retain_before(call)
        self._in_call, self._dropped_in_call = True, False
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self._dropped_in_call = False
            if self.rerecorder is None:
                self._miss_after_call(call.stop)
            raise
        finally:
            self._in_call = False
        if self.rerecorder is not None:
            return out
        if self._num_packed != call.packed_after:
            self._miss_after_call(call.start)
            return out
        self._slots.returned(out)
        self._next = next(self._calls, None)
        if call.captures or call.returned_constants:
            self._take(call, tensors_in(out))
        return out

    def _retain_before(self, call: CallGuard) -> None:
        """Retain random states and statistics that the call will change."""
        for step in call.random_steps:
            self._states[step] = random_state(self.expected.steps[step].device, None)
        for value in call.statistics:
            self._held[value] = retain_copy(self._held[value].tensor)

    def _take(self, call: CallGuard, returned: list[torch.Tensor]) -> None:
        """Retain returned tensors if the returned constants pass their guards."""
        if not self._inputs.match_constants(call, returned):
            self._dropped_in_call = False
            self._miss_after_call(call.stop)
            return
        for capture in call.captures:
            self._capture(capture, returned[capture.place])

    def _matches(
        self, call: CallGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call passes its guard."""
        if call.func is not func and call.func != func:
            return False
        here = CallSite(self.path[-1], self._num_begun, len(self._inner))
        if call.place not in (None, here):  # another of several equal layers
            return False
        try:
            same = call.arguments == self._slots.freeze(args, kwargs)
        except UnknownArgumentError:
            return False
        packed = self._num_packed == call.packed_before
        return same and packed and call.switches == switches(func)

    def _capture(self, capture: Capture, tensor: torch.Tensor) -> None:
        if capture.form is None:
            self._held[capture.value] = retain(tensor)
            return
        small = encode(capture.form, tensor)
        assert small is not None, "the template's tensor was dense"
        self._encoded[capture.value] = small

    def _pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        self._packing = True  # custom functions pack outside of any call
        try:
            return self._packed_as(tensor)
        finally:
            self._packing = False

    def _packed_as(self, tensor: torch.Tensor) -> Kept | Dropped:
        expected, number = self.expected, self._num_packed
        if self.rerecorder is not None:
            return (
                self.rerecorder.pack(tensor)
                if not self.kept
                else keep(tensor, self.name)
            )
        self._num_packed += 1
        there = number < self._num_expected
        if not there or expected.packed[number].size != tensor.size():
            self._dropped_in_call &= self._in_call
            self._miss_after_call(self._place(self._next))
            return keep(tensor, self.name)
        if number in expected.captures:
            self._capture(expected.captures[number], tensor)
        _, value, ref, part = expected.packed[number]
        if ref is None:
            return keep(tensor, self.name)
        self._dropped_in_call |= self._in_call
        self._wanted.append((value, part))
        return Dropped(self._handle, ref, part)

    @property
    def _num_expected(self) -> int:
        """Number of tensors saved in the recording by the end of the current call."""
        if self._next is None:
            return len(self.expected.packed)
        return self._next.packed_after if self._in_call else self._next.packed_before
