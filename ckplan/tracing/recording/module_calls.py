"""Record module calls: their start and end, their inputs and their side effects."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ckplan.applying.rerunning.attributes import state_of
from ckplan.graph.fqn import is_around
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.tracing.recording.flattening import flatten
from ckplan.tracing.recording.recording import RawCall, Recording
from ckplan.tracing.recording.side_effects import SideEffects
from ckplan.tracing.recording.storages import Storages

_PACKED = "takes as many steps as lengths decide"


class ModuleCalls:
    """The calls of a model's modules in the forward of a recorded step."""

    def __init__(
        self, model: nn.Module, recording: Recording, storages: Storages
    ) -> None:
        """Start without calls.

        Args:
            model: The model whose modules are followed.
            recording: The recording that calls are added to.
            storages: The storages of the step, for inputs and state of calls.
        """
        self._recording = recording
        self._storages = storages
        named = {
            name: module
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # these take no hooks
        }
        self._modules = list(named.values())
        self._fqns = {id(module): name for name, module in named.items()}
        self._times_called = Counter[str]()
        self._stack: list[int] = []
        self._watch = SideEffects()
        self._boundaries: list[tuple[int, int]] = []  # (autograd sequence, call)
        self._over = False
        self._unseen = False  # the model itself runs without gradients

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A scope with all hooks that must be active during the step."""
        module = nn.modules.module
        hooks = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
            *(  # global hooks do not see keyword arguments
                module.register_forward_pre_hook(
                    self._given, prepend=True, with_kwargs=True
                )
                for module in self._modules
            ),
        ]
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            yield

    def end(self) -> None:
        """Mark the end of forward."""
        self._over = True

    def resume(self) -> None:
        """Mark the end of a backward that another forward can follow."""
        self._over = False

    def forget(self) -> None:
        """Drop references to the modules."""
        self._modules.clear()  # finalizers of their storages hold the recorder

    @property
    def current(self) -> int:
        """The innermost running call."""
        return self._stack[-1] if self._stack else OUTSIDE_CALLS

    def call_of_node(self, node: torch.autograd.graph.Node) -> int:
        """The innermost call that ran when autograd made a node."""
        sequence = node._sequence_nr()
        place = bisect_right(self._boundaries, sequence, key=lambda b: b[0]) - 1
        return self._boundaries[place][1] if place >= 0 else OUTSIDE_CALLS

    def _counts(self, module: nn.Module) -> bool:
        return not (self._over or self._unseen) and id(module) in self._fqns

    def _enter(self, module: nn.Module, args: object) -> None:
        del args
        if id(module) not in self._fqns:
            return
        fqn = self._fqns[id(module)]
        if self._over:
            self._recording.run_again[fqn] = self._is_switched(fqn)
            return
        is_apart = not (fqn or self._stack or torch.is_grad_enabled())
        self._unseen = self._unseen or is_apart
        if self._unseen:
            return
        self._look()
        self._watch.enter(module)
        state = state_of(module.modules())
        call = RawCall(
            fqn,
            self._times_called[fqn],
            parent=self.current,
            start=len(self._recording.ops),
            module=type(module).__name__,
            state=tuple(self._storages.numbers(state, "buffer", BEFORE_STEP)),
        )
        self._times_called[fqn] += 1
        self._stack.append(len(self._recording.calls))
        self._recording.calls.append(call)
        self._mark_boundary()

    def _is_switched(self, fqn: str) -> bool:
        """Whether a switch of transformers causes a module to be recomputed."""
        return any(
            getattr(module, "gradient_checkpointing", False)
            for module in self._modules
            if is_around(self._fqns[id(module)], fqn)
        )

    def _given(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._counts(module):
            self._watch.arguments(args, kwargs)
            found = self._storages.numbers_made_in_step(flatten(args, kwargs)[0])
            self._recording.calls[self.current].given = tuple(dict.fromkeys(found))
            if isinstance(module, nn.RNNBase) and any(
                isinstance(one, PackedSequence) for one in (*args, *kwargs.values())
            ):
                self._recording.changes.append((self.current, "shapes", _PACKED))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        del args, output
        if self._unseen and not self._over and not self._fqns.get(id(module), "?"):
            self._unseen = False
        elif self._counts(module):
            self._look()
            self._watch.leave()
            self._recording.calls[self._stack.pop()].stop = len(self._recording.ops)
            self._mark_boundary()

    def _look(self) -> None:
        changes = self._watch.changes()
        self._recording.changes += ((self.current, *found) for found in changes)

    def _mark_boundary(self) -> None:
        # Nodes made from here on have this sequence number or a later one.
        sequence = torch.autograd._get_sequence_nr()
        self._boundaries.append((sequence, self.current))
