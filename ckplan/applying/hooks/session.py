"""The hooks that a plan attached to a model, and its open regions."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckplan.applying.guards.checker import GuardChecker
from ckplan.applying.guards.program_cache import ForwardKind
from ckplan.applying.hooks.attached import Attached
from ckplan.applying.hooks.choices import Choice
from ckplan.applying.hooks.forwards import ForwardWrapper
from ckplan.applying.hooks.plan_warnings import (
    idle_regions,
    missing_ops,
    other_autocast,
    warn_of_larger_batch,
    warn_of_other_device,
    warn_of_smaller_batch,
)
from ckplan.applying.moving.mover import Mover
from ckplan.applying.recording.recorder import Recorder
from ckplan.applying.tensors.compiled import uncompiled_function
from ckplan.graph.fqn import Call, call_name
from ckplan.plan.plan import Plan

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))  # arguments without tensors inside
_saved_tensors_hooks_are_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled


class OpenInnerRegion(NamedTuple):
    """A nested region whose forward runs now."""

    choice: Choice
    last: Call  # that ends it


@dataclass
class OpenRegion:
    """A region whose forward runs now."""

    choice: Choice
    region: Recorder | GuardChecker
    kind: ForwardKind
    session: Session
    last: Call  # that ends it
    switched_off: list[nn.Module]  # modules that would checkpoint themselves
    inner: list[OpenInnerRegion] = field(default_factory=list)  # innermost last
    missing: list[str] = field(
        default_factory=list
    )  # saves of nested regions that named no op

    def begin_inner(self, choices: Sequence[tuple[Choice, Choice]], call: Call) -> None:
        """Open the nested regions that begin with a call."""
        while choices:
            around = self.inner[-1].choice if self.inner else self.choice
            choice = chosen((c for outer, c in choices if outer is around), call[1])
            if choice is None:
                return
            running.place(choice)
            self.region.begin_inner(choice.top, choice.saves)
            self.inner.append(OpenInnerRegion(choice, choice.last or call))

    def end_inner(self, call: Call) -> None:
        """Close the nested regions that end with a call."""
        while self.inner and self.inner[-1].last == call:
            choice, _ = self.inner.pop()
            found = self.region.end_inner()
            if found is not None:  # a guard check knows none
                self.missing += choice.missing_of(found)

    def close(self, *, learn: bool) -> None:
        """End its forward; store its program if later forwards can repeat it."""
        self._switch_on()
        self.choice.end(self.region, self.kind, self.missing, learn=learn)
        recorder = self.region.recorder
        if learn and recorder is not None and self.choice.missing:
            self.session.warn_once("ops", missing_ops(self.choice, recorder))

    def abandon(self) -> None:
        """Stop its forward, which was interrupted."""
        self._switch_on()
        self.region.abandon()

    def _switch_on(self) -> None:
        for module in self.switched_off:
            module.gradient_checkpointing = True


class _Running(threading.local):
    """Calls and regions that run now in this thread, innermost last."""

    def __init__(self) -> None:
        # Of modules at which regions begin or end:
        self.calls: list[tuple[Session, Call]] = []
        self.regions: list[OpenRegion] = []
        # Modules that may make the calls of runs:
        self.made_by: list[tuple[Session, str]] = []
        # Of models whose forwards began in this thread: FQN -> calls in this step.
        self.numbers: WeakKeyDictionary[Session, dict[str, int]] = WeakKeyDictionary()

    def abandon(self, session: Session) -> None:
        """Forget a forward that never ended: hooks are not called on Ctrl-C."""
        self.calls = [call for call in self.calls if call[0] is not session]
        self.made_by = [one for one in self.made_by if one[0] is not session]
        while any(found.session is session for found in self.regions):
            self.regions.pop().abandon()

    def place(self, choice: Choice) -> None:
        """Make op paths of a new region relative to the module that calls it."""
        if choice.makers:
            session = self.calls[-1][0]
            choice.below({fqn for around, fqn in self.made_by if around is session})


running = _Running()


@dataclass(eq=False)
class Session:
    """What the hooks of a plan on one model share; copied with it. It holds none."""

    plan: Plan
    mover: Mover
    # As running.numbers, for threads where no forward of the model began: backward's
    # on a GPU, where checkpoints run modules again.
    calls: dict[str, int] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    forwards: int = 0  # of the model under gradients, in this step
    larger: bool = False  # whether it warned of a batch larger than planned
    sizes: list[Any] = field(default_factory=list)  # of the last batch
    warned: set[str] = field(default_factory=set)  # kinds of warnings already given
    began: bool = False  # the model ran, on whatever device it is now
    ended: bool = False  # and came to the end of a forward under gradients

    def begin_step(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """The model itself runs: call numbers begin anew.

        If a step runs the model several times under gradients, they go on until then.
        """
        running.abandon(self)
        self.mover.settle(quiet=True)
        planned = self.plan.fingerprint.get("forwards", 1)
        if not (torch.is_grad_enabled() and 0 < self.forwards < planned):
            self.calls.clear()
            running.numbers[self] = {}
        if torch.is_grad_enabled():
            self.forwards = self.forwards % planned + 1
        if not self.began:
            self.began = True
            if warn_of_other_device(self.plan, module):
                self.warned.add("ops")  # which are other ones there
        if not torch.is_grad_enabled():
            return
        if not self.ended:
            warn_of_smaller_batch(self.plan, module, args, kwargs)
            self.check_autocast(module, "")
        if not self.larger and self._is_new(args, kwargs):
            self.larger = warn_of_larger_batch(self.plan, module, args, kwargs)
        if self.ended and (idle := idle_regions(self.choices)):
            self.warn_once("idle", idle)

    def _is_new(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether a batch may have other sizes than the one before."""
        given = (*args, *kwargs.values())
        sizes = [getattr(one, "shape", None) for one in given]
        known = sizes == self.sizes and all(
            size is not None or isinstance(one, _PLAIN)
            for one, size in zip(given, sizes, strict=True)
        )
        self.sizes = sizes
        return not known

    def end_step(self, gave_up: bool) -> None:
        """By now the regions have run, if they ever do.

        If forward raised, the step is given up: the next forward begins another one.
        """
        if gave_up:
            self.forwards = 0
            return
        self.mover.settle()
        is_last = self.forwards == self.plan.fingerprint.get("forwards", 1)
        self.ended = self.ended or (is_last and torch.is_grad_enabled())

    def wrap_forward(self, forward: ForwardWrapper) -> None:
        """Replace a module's forward by a wrapper."""
        forward.session = self
        forward.hook_begin(forward.module)
        forward.module.forward = forward

    def warn_once(self, of: str, what: str) -> None:
        """Warn that a part of the plan cannot be applied; once for each kind."""
        if of not in self.warned:
            self.warned.add(of)
            rest = "results are the same, memory is not; see ckplan.status(model)"
            warnings.warn(f"{what}: {rest}", stacklevel=4)

    def check_autocast(self, module: nn.Module, fqn: str) -> None:
        """Warn if the first region's forward runs under another autocast than planned.

        Trainers may begin autocast inside the model's call, where its parts see it, and
        the model itself does not.
        """
        if self.ended or (first := next(module.parameters(), None)) is None:
            return
        device = first.device.type
        other = other_autocast(self.plan, device)
        if other and (fqn or torch.is_autocast_enabled(device)):
            self.warn_once("autocast", other)

    def check_began(self, call: Call, choices: Iterable[Choice]) -> None:
        """Warn if call numbers never restart because the model is not called."""
        if self.began or not torch.is_grad_enabled():
            return
        fqn, number = call
        planned = [n for choice in choices for n in choice.numbers or ()]
        if planned and number > max(planned):
            what = (
                f"{call_name(*call)} is beyond all calls of {fqn} in the plan, and the "
                "model itself never ran: calls are numbered anew by model(...) alone, "
                "not by model.forward(...) or another method"
            )
            self.warn_once("numbers", what)

    def interrupted(self) -> None:
        """Forget a forward that a ``BaseException`` ended, such as Ctrl-C."""
        running.abandon(self)
        self.forwards = 0
        self.warned.add("idle")  # interrupted regions count as not run

    def count(self, fqn: str) -> int:
        """The number of the call that begins now, in this thread's forward if any."""
        calls = running.numbers.get(self, self.calls)
        number = calls.get(fqn, 0)
        calls[fqn] = number + 1
        return number


def chosen(choices: Iterable[Choice], number: int) -> Choice | None:
    """The choice for a call, if it is a region now.

    Some transforms of ``torch.func`` forbid saved-tensor hooks.
    """
    if torch.is_grad_enabled() and _saved_tensors_hooks_are_enabled():
        for choice in choices:
            if choice.numbers is None or number in choice.numbers:
                return choice
    return None


def raised(output: object) -> bool:
    """In a hook that is called even if forward raised: whether it did."""
    return output is None and sys.exc_info()[0] is not None


@dataclass(eq=False)
class StepHooks(Attached):
    """Hooks of the model itself."""

    session: Session
    handles: list[RemovableHandle] = field(default_factory=list)

    @uncompiled_function
    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Begin a step."""
        self.session.begin_step(module, args, kwargs)

    @uncompiled_function
    def end(
        self, module: nn.Module, args: Args, kwargs: Kwargs, output: object
    ) -> None:
        """End its forward."""
        del module, args, kwargs
        self.session.end_step(raised(output))
