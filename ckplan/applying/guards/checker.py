"""Check a region's forward call by call against a recorded one.

While every call passes its guard, saved tensors are dropped as in the recorded forward,
since the same program rebuilds them. From the first miss on, the rest is recorded op by
op (``resume.py``). If a miss is found only after the call's ops ran, the rest is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckplan.applying.guards.guarded_program import (
    CallGuard,
    CallSite,
    Capture,
    GuardedProgram,
)
from ckplan.applying.guards.input_checker import InputChecker
from ckplan.applying.guards.resume import Beginning, OpenInner, resume
from ckplan.applying.moving.mover import Form, Mover
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.recording.module_path import ModulePath
from ckplan.applying.recording.op_keys import OpKey, Saves
from ckplan.applying.recording.recorder import Recorder
from ckplan.applying.recording.saved_tensors import (
    Dropped,
    Handle,
    otherwise_saved,
    unpack,
)
from ckplan.applying.tensors.arguments import is_query
from ckplan.applying.tensors.compiled import is_within_compiled, still_uncompiled
from ckplan.applying.tensors.expected_calls import ExpectedCalls
from ckplan.applying.tensors.kept import Kept, keep
from ckplan.applying.tensors.random_state import random_state
from ckplan.applying.tensors.retained import Retained, retain, retain_copy, tensors_in


class GuardChecker(ExpectedCalls[CallGuard]):
    """One forward of a region, compared with a guarded program."""

    rerecorder: Recorder | None = None  # from the first miss on
    kept = False  # the rest, since it could not be recorded
    _num_begun = 0  # regions inside

    def __init__(
        self,
        name: str,
        top: str,
        expected: GuardedProgram,
        record: Callable[[], Recorder],
        mover: Mover,
    ) -> None:
        """Set up the check.

        Args:
            name: Name of the region in errors.
            top: FQN of the module that op paths are relative to.
            expected: Guarded program to compare the forward with.
            record: Makes the recorder for the rest of a forward that misses.
            mover: Encodes and moves.
        """
        super().__init__(expected.calls)
        self.name = name
        self.path = ModulePath(top)
        self.expected = expected
        self._record, self._mover = record, mover
        self._inner: list[tuple[CallGuard | None, str, Saves]] = []  # open ones
        self._num_modes = torch._C._len_torch_dispatch_stack()
        self._packed = expected.packed
        self._held: dict[int, Retained] = {**expected.constants}
        self._inputs = InputChecker(expected, self._held, self.made)
        self.met = self._inputs.met
        self._encoded: dict[int, Form] = {}
        self._states: dict[int, torch.Tensor] = {}
        self.handle = Handle()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._uncompiled = still_uncompiled()

    def open(self) -> None:
        """Begin to check."""
        self._uncompiled.__enter__()
        self._hooks.__enter__()
        self.__enter__()

    def _close(self) -> None:
        self.__exit__(None, None, None)
        self._hooks.__exit__(None, None, None)
        self._uncompiled.__exit__(None, None, None)

    def begin_inner(self, top: str, saves: Saves) -> None:
        """Begin a nested region."""
        if self.recorder is not None:
            self.recorder.begin_inner(top, saves)
        else:
            self._inner.append((self.next, top, saves))
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
        found = self.rerecorder
        return found if found is not None and found.watches else None

    def close(self) -> None:
        """End the forward; retain only tensors that the program needs."""
        self._close()
        missing = self.next is not None or self.num_packed < len(self._packed)
        if self.rerecorder is None and missing:
            self._rerecord_from(self._place(self.next))
        if self.rerecorder is not None:
            self.rerecorder.close()
        else:
            self.handle.rebuilder = Rebuilder(
                self.name,
                self.expected.schedule,
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
        self._close()
        self._encoded.clear()
        if self.rerecorder is not None:
            self.rerecorder.abandon()

    def _forget(self) -> None:
        """Drop references that would form cycles, or keep tensors."""
        self.next = None
        del self._hooks, self.handle  # saved tensors hold this: their hook is _pack
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
            made=self.made,
            retained=self._held,
            encoded=self._encoded,
            states=self._states,
            packed=self._packed[: self.num_packed],
            handle=self.handle,
        )
        resume(rerecorder, begun)
        for tensors in (self._held, self._encoded, self._states):
            tensors.clear()
        self.next = None
        return rerecorder

    def _miss_before_call(self) -> None:
        """Handle a miss before the call's ops ran: record from here on."""
        call = self.next
        as_expected = self.num_packed == self._packed_before(call)
        alone = torch._C._len_torch_dispatch_stack() == self._num_modes
        alone &= not is_within_compiled()
        alone &= call is None or not call.finds_written(self.made, self.versions)
        rerecorder = self._rerecord_from(self._place(call))
        if as_expected and alone:
            rerecorder.go_on()
        else:
            self.kept = True

    def _miss_after_call(self, call: CallGuard | None, stop: int) -> None:
        """Handle a miss after the call's ops ran: keep the rest.

        Raises:
            ApplyError: A tensor that the call saved is already dropped.
        """
        saved = self._packed[self._packed_before(call) : self.num_packed]
        if call is not None and any(one.ref is not None for one in saved):
            raise otherwise_saved(self.name)
        self._keep_rest(stop)

    def _packed_before(self, call: CallGuard | None) -> int:
        """How many tensors were saved before a call, or in all."""
        return len(self._packed) if call is None else call.packed_before

    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether the next tensor from outside passes its guard."""
        return self._inputs.meet(number, tensor)

    def other(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call that is not the next one, as it was recorded."""
        if self.rerecorder is None:
            if is_query(func):
                return func(*args, **kwargs)
            self._miss_before_call()
        assert self.rerecorder is not None
        return self.rerecorder.log.__torch_function__(func, types, args, kwargs)

    def begin(self, call: CallGuard) -> bool:
        """Whether a call is at its place; what it will change is retained."""
        if call.place is not None and not self._is_at(call.place):
            return False
        self._retain_before(call)
        return True

    def fail(self, call: CallGuard) -> None:
        """Keep the rest after a call that raised an error."""
        self._keep_rest(call.stop)

    def number(self, call: CallGuard, out: Any) -> bool:
        """Number what a call returned and saved, if it is as recorded."""
        same = self.num_packed == call.packed_after
        if same and call.number(out, self.made, self.versions, self.met):
            return True
        self._miss_after_call(call, call.start)
        return False

    def end(self, call: CallGuard, out: Any) -> None:
        """Retain of what a call returned what the program needs."""
        self._take(call, tensors_in(out))

    def _keep_rest(self, stop: int) -> None:
        """Keep what the rest of the forward saves, from a step on."""
        if self.rerecorder is None:
            self._rerecord_from(stop)
            self.kept = True

    def _retain_before(self, call: CallGuard) -> None:
        """Retain random states and statistics that the call will change."""
        for step in call.random_steps:
            self._states[step] = random_state(self.expected.steps[step].device, None)
        for value in call.statistics:
            self._held[value] = retain_copy(self._held[value].tensor)

    def _take(self, call: CallGuard, returned: list[torch.Tensor]) -> None:
        """Retain returned tensors if they and the constants pass their guards."""
        constants, sized = call.returned_constants, call.sized
        same = sized is None or sized.passes(returned[0])
        if same and constants:
            same = self._inputs.match_constants(constants, returned)
        if not same:
            self._keep_rest(call.stop)
            return
        for capture in call.captures:
            self._capture(capture, returned[capture.place])

    def _is_at(self, place: CallSite) -> bool:
        """Whether the call runs there, and not in another of several equal layers."""
        site, num_begun, num_open = place
        inside = num_begun == self._num_begun and num_open == len(self._inner)
        return inside and site == self.path.sites[-1]

    def _capture(self, capture: Capture, tensor: torch.Tensor) -> None:
        if capture.form is None:
            self._held[capture.value] = retain(tensor)
            return
        if capture.view is not None:
            tensor = tensor.detach().as_strided(*capture.view, 0)
        small = self._mover.encode(capture.form, tensor)
        assert small is not None, "the template's tensor was dense"
        self._encoded[capture.value] = small

    def _pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        """Keep or drop what autograd saves."""
        if self.rerecorder is not None:
            return self._pack_rest(tensor)
        call = self.current
        if call is None:  # custom functions pack outside of any call
            with torch._C.DisableTorchFunction():
                expected = self._packed_before(self.next)
                return self._pack_next(tensor, None, expected)
        return self._pack_next(tensor, call, call.packed_after)

    def _pack_rest(self, tensor: torch.Tensor) -> Kept | Dropped:
        assert self.rerecorder is not None
        if self.kept:
            return keep(tensor, self.name)
        return self.rerecorder.pack(tensor)

    def _pack_next(
        self, tensor: torch.Tensor, call: CallGuard | None, expected: int
    ) -> Kept | Dropped:
        """Pack a tensor as the recorded forward did, by its number."""
        number = self.num_packed
        size, _, dropped, _ = self._packed[number] if number < expected else _NOTHING
        if size != tensor.shape:
            self._miss_after_call(call, self._place(call or self.next))
            return keep(tensor, self.name)
        self.num_packed = number + 1
        captures = self.expected.captures
        if captures and number in captures:
            self._capture(captures[number], tensor)
        if dropped is not None:
            return Dropped(self.handle, number)
        return keep(tensor, self.name)


_NOTHING = (None, -1, None, 0)  # is packed here
