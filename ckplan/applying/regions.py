"""Attach regions to the calls of a model, and take them off again.

A region is a pair of hooks on its module: names, types, ``state_dict`` and ``forward``
stay as they were, and a copy of the model has regions of its own. Only ``by: rerun``
stands in for ``forward``, as an attribute of the instance.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckplan.applying.calls import settings
from ckplan.applying.choices import Choice, RegionStatus, choices_of, is_around
from ckplan.applying.forwards import GuardedForward, RerunForward, StandIn
from ckplan.applying.notices import (
    missing_ops,
    warn_of_differences,
    warn_of_larger_batch,
    warn_of_other_device,
)
from ckplan.applying.record import Recorder
from ckplan.applying.replay import Replay
from ckplan.errors import ApplyError
from ckplan.names import Call, call_name
from ckplan.plan import Plan, load
from ckplan.region import RERUN

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Status:
    """The plan on a model, and what its regions did so far."""

    plan: Plan
    regions: tuple[RegionStatus, ...]

    def __str__(self) -> str:
        """One line per region."""
        return "\n".join(
            f"{r.call}: {r.by}, ran {r.runs} times, recorded {r.recorded}, kept "
            f"{r.kept}, dropped {r.dropped_bytes} B"
            for r in self.regions
        )


class _OpenInner(NamedTuple):
    """A region inside another one, whose forward runs now."""

    choice: Choice
    last: Call  # that ends it


@dataclass
class _Open:
    """A region whose forward runs now."""

    choice: Choice
    region: Recorder | Replay
    key: Hashable
    session: _Session
    last: Call  # that ends it
    switched_off: list[nn.Module]  # modules that would checkpoint themselves
    inner: list[_OpenInner] = field(default_factory=list)  # innermost last
    missing: list[str] = field(default_factory=list)  # saves of theirs

    def begin_inner(self, choices: Sequence[tuple[Choice, Choice]], call: Call) -> None:
        """Open the regions inside that begin with a call; a replay knows them."""
        while isinstance(self.region, Recorder):
            around = self.inner[-1].choice if self.inner else self.choice
            choice = _chosen((c for outer, c in choices if outer is around), call[1])
            if choice is None:
                return
            self.region.begin_inner(choice.top, choice.saves)
            self.inner.append(_OpenInner(choice, choice.last or call))

    def end_inner(self, call: Call) -> None:
        """Close the regions inside that end with a call."""
        while self.inner and self.inner[-1].last == call:
            assert isinstance(self.region, Recorder)
            choice, _ = self.inner.pop()
            self.missing += choice.missing_of(self.region.end_inner())

    def close(self) -> None:
        """Its forward is over."""
        self._switch_on()
        self.choice.end(self.region, self.key, self.missing)
        if isinstance(self.region, Recorder) and self.choice.missing:
            self.session.warn_once("ops", missing_ops(self.choice, self.region))

    def abandon(self) -> None:
        """Its forward was interrupted."""
        self._switch_on()
        self.region.abandon()

    def _switch_on(self) -> None:
        for module in self.switched_off:
            module.gradient_checkpointing = True


class _Running(threading.local):
    """What runs now in this thread, innermost last."""

    def __init__(self) -> None:
        # Of modules at which regions begin or end:
        self.calls: list[tuple[_Session, Call]] = []
        self.regions: list[_Open] = []
        self.numbers: dict[int, dict[str, int]] = {}  # of replicas, by session

    def abandon(self, session: _Session) -> None:
        """Forget a forward that never ended: hooks are not called on Ctrl-C."""
        self.calls = [call for call in self.calls if call[0] is not session]
        while any(found.session is session for found in self.regions):
            self.regions.pop().abandon()

    @property
    def recorder(self) -> Recorder | None:
        """Who wants to know whose ops run."""
        region = self.regions[-1].region if self.regions else None
        return region if isinstance(region, Recorder) else None


_running = _Running()


@dataclass
class _Session:
    """All that a plan attached to one model; copied with it."""

    plan: Plan
    calls: dict[str, int] = field(default_factory=dict)  # FQN -> forwards in this step
    choices: list[Choice] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    stand_ins: list[StandIn] = field(default_factory=list)
    larger: bool = False  # a batch was larger than planned, which was said
    warned: set[str] = field(default_factory=set)  # of what else
    began: bool = False  # the model ran, on whatever device it is now

    @torch.compiler.disable
    def begin_step(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Hook of the model itself: call numbers begin anew."""
        _running.abandon(self)
        self.calls.clear()
        _running.numbers[id(self)] = {}
        if not self.began:
            self.began = True
            if warn_of_other_device(self.plan, module):
                self.warned.add("ops")  # which are other ones there
        if not self.larger and torch.is_grad_enabled():
            self.larger = warn_of_larger_batch(self.plan, args, kwargs)

    def stand_in(self, forward: StandIn) -> None:
        """Put something in the place of a module's forward."""
        self.stand_ins.append(forward)
        self.handles.append(_hook_begin(forward.module, forward.begin))
        forward.module.forward = forward

    def warn_once(self, of: str, what: str) -> None:
        """Say what of the plan cannot be carried out; of each kind the first."""
        if of not in self.warned:
            self.warned.add(of)
            rest = "results are the same, memory is not; see ckplan.status(model)"
            warnings.warn(f"{what}: {rest}", stacklevel=4)

    def interrupted(self) -> None:
        """A forward ended by what is no ``Exception``."""
        _running.abandon(self)

    def count(self, fqn: str) -> int:
        """The number of the call that begins now, in this thread's forward if any."""
        calls = _running.numbers.get(id(self), self.calls)
        number = calls.get(fqn, 0)
        calls[fqn] = number + 1
        return number


@dataclass
class _RegionHooks:
    """Hooks around a module at whose calls regions begin or end."""

    fqn: str
    session: _Session
    choices: list[Choice] = field(default_factory=list)  # of regions that begin here
    inner: list[tuple[Choice, Choice]] = field(default_factory=list)  # inside others
    switches: list[nn.Module] = field(default_factory=list)  # of transformers, inside

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Open a region if one begins with this call."""
        call = self.fqn, self.session.count(self.fqn)
        _running.calls.append((self.session, call))
        choice = _chosen(self.choices, call[1])
        if choice is not None and _running.regions:
            self._warn_inside(choice, _running.regions[-1])
        elif choice is not None:
            key = _key(module, args, kwargs)
            region = choice.begin(choice.title or type(module).__name__, key)
            switched_off = [m for m in self.switches if m.gradient_checkpointing]
            for switched in switched_off:
                switched.gradient_checkpointing = False
            region.open()
            _running.regions.append(
                _Open(
                    choice, region, key, self.session, choice.last or call, switched_off
                )
            )
        if _running.regions:
            _running.regions[-1].begin_inner(self.inner, call)

    def _warn_inside(self, choice: Choice, around: _Open) -> None:
        if around.session is self.session:
            what = f"{choice.name} runs inside {around.choice.name}, a region already"
            self.session.warn_once("inside", what)

    @torch.compiler.disable
    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Close the region that ends with this call; called even if forward raised."""
        del module, args, kwargs, output
        if not _running.calls:
            return  # abandoned: something around this call was interrupted and went on
        session, call = _running.calls.pop()
        if _running.regions:
            found = _running.regions[-1]
            if found.session is session:
                found.end_inner(call)
                if found.last == call:
                    _running.regions.pop().close()


@dataclass
class _ParentHooks:
    """A hook around a module that makes the calls of runs: none outlives it."""

    choices: list[Choice]

    @torch.compiler.disable
    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Close what is open since the last call of its run never came."""
        del module, args, kwargs
        found = _running.regions[-1] if _running.regions else None
        if found is not None and any(found.choice is choice for choice in self.choices):
            _running.regions.pop().close()
            if output is not None:  # else it raised
                what = f"{found.choice.name} is no run: its last call never came"
                found.session.warn_once("run", what)


@dataclass
class _PathHooks:
    """Hooks around a module inside a region: they tell whose ops run."""

    fqn: str

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Enter the module."""
        del module, args, kwargs
        recorder = _running.recorder
        if recorder is not None:
            recorder.path.append(self.fqn)

    @torch.compiler.disable
    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Leave the module."""
        del module, args, kwargs, output
        recorder = _running.recorder
        if recorder is not None:
            recorder.path.pop()


def _chosen(choices: Iterable[Choice], number: int) -> Choice | None:
    """The choice for a call, if it is a region now."""
    if torch.is_grad_enabled():
        for choice in choices:
            if choice.numbers is None or number in choice.numbers:
                return choice
    return None


def _key(module: nn.Module, args: _Args, kwargs: _Kwargs) -> Hashable:
    """What forwards that may do the same have in common."""
    inputs = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    return module.training, settings(), tuple((x.shape, x.dtype) for x in inputs)


def apply(model: nn.Module, plan: Plan | str | Path) -> nn.Module:
    """Rewrite a model in place so that its regions drop and rebuild activations.

    Names, types, ``state_dict`` and results stay as they are. Applying replaces what an
    earlier plan attached. Regions act only with gradients enabled.

    Args:
        model: The model that the plan was made for.
        plan: A plan, or the path of a plan file.

    Returns:
        The same model.

    Raises:
        PlanError: The plan names calls that the model does not have, or regions that
            overlap; the model is left as it was.
    """
    plan = load(Path(plan)) if isinstance(plan, (str, Path)) else plan
    modules = dict(model.named_modules())
    choices = choices_of(plan.regions, modules)
    warn_of_differences(plan, model)
    remove(model)
    session = _Session(plan, choices=choices)
    reruns: dict[str, list[Choice]] = {}
    for choice in choices:
        if choice.region.by == RERUN:
            reruns.setdefault(choice.fqn, []).append(choice)
    for fqn, found in reruns.items():
        _attach_rerun(session, fqn, modules[fqn], found)
    programs = [choice for choice in choices if choice.region.by != RERUN]
    _attach_programs(session, modules, programs)
    session.handles.append(_hook_begin(model, session.begin_step))
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take off what ``apply`` attached; a model without a plan is left as it is."""
    session = _session_of(model)
    if session is not None:
        _running.abandon(session)
        _running.numbers.pop(id(session), None)
        for handle in session.handles:
            handle.remove()
        for one in session.stand_ins:
            del one.module.forward
            if one.previous is not None:
                one.module.forward = one.previous
    return model


def status(model: nn.Module) -> Status:
    """What the regions of a model did so far, in the order of the plan.

    Raises:
        ApplyError: The model has no plan.
    """
    session = _session_of(model)
    if session is None:
        raise ApplyError(
            f"{type(model).__name__} has no plan",
            needed="a model that ckplan.apply was called on",
            hint="ckplan.apply(model, 'plan.yaml')",
        )
    regions = tuple(choice.status() for choice in session.choices)
    return Status(session.plan, regions)


@contextmanager
def planned(model: nn.Module, plan: Plan | str | Path) -> Iterator[nn.Module]:
    """Put a plan on a model for a ``with`` block; what it had before comes back.

    Args and errors are those of ``apply``.
    """
    before = _session_of(model)
    apply(model, plan)
    try:
        yield model
    finally:
        remove(model)
        if before is not None:
            apply(model, before.plan)


def _session_of(model: nn.Module) -> _Session | None:
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Session):
            return owner
    return None


def _attach_programs(
    session: _Session, modules: Mapping[str, nn.Module], programs: Sequence[Choice]
) -> None:
    """Hooks where regions begin and end, around who makes runs, and for paths inside.

    Hooks go in front: what is attached later begins earlier, and ends earlier.
    """
    regions = _region_hooks(session, modules, programs)
    makers: dict[str, _ParentHooks] = {}
    for choice in programs:
        if choice.last is not None:
            makers.setdefault(choice.top, _ParentHooks([])).choices.append(choice)
    add = session.handles.append
    for fqn, hooks in regions.items():
        add(_hook_end(modules[fqn], hooks.end))
    for fqn in _inside(programs, modules):
        add(_hook_begin(modules[fqn], _PathHooks(fqn).begin))
        add(_hook_end(modules[fqn], _PathHooks(fqn).end))
    for fqn, hooks in regions.items():
        add(_hook_begin(modules[fqn], hooks.begin))
    for fqn, maker in makers.items():
        add(_hook_end(modules[fqn], maker.end))
    for fqn in {*(c.fqn for c in programs if c.last is None), *makers}:
        session.stand_in(GuardedForward(modules[fqn], session.interrupted))


def _region_hooks(
    session: _Session, modules: Mapping[str, nn.Module], programs: Sequence[Choice]
) -> dict[str, _RegionHooks]:
    """The modules at whose calls regions, or regions inside them, begin or end."""
    inner = [pair for choice in programs for pair in choice.within()]
    ends = [fqn for c in (*programs, *(one for _, one in inner)) for fqn in c.ends]
    hooks = {fqn: _RegionHooks(fqn, session) for fqn in ends}
    for choice in programs:
        hooks[choice.fqn].choices.append(choice)
        hooks[choice.fqn].switches += (
            module
            for name, module in modules.items()
            if is_around(choice.top, name) and hasattr(module, "gradient_checkpointing")
        )
    for pair in inner:
        hooks[pair[1].fqn].inner.append(pair)
    return hooks


def _inside(programs: Iterable[Choice], modules: Iterable[str]) -> set[str]:
    """Modules in whose forward a plan may name an op."""
    tops = {choice.top for choice in programs if choice.names_ops}
    return {
        name
        for name in modules
        if any(name != top and is_around(top, name) for top in tops)
    }


def _hook_begin(module: nn.Module, begin: Callable[..., None]) -> RemovableHandle:
    return module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)


def _hook_end(module: nn.Module, end: Callable[..., None]) -> RemovableHandle:
    return module.register_forward_hook(
        end, prepend=True, with_kwargs=True, always_call=True
    )


def _attach_rerun(
    session: _Session, fqn: str, module: nn.Module, choices: list[Choice]
) -> None:
    session.stand_in(RerunForward(module, _Chooser(session, fqn, choices)))


@dataclass
class _Chooser:
    """Tells a re-run module whether this call is a region."""

    session: _Session
    fqn: str
    choices: list[Choice]

    def __call__(self) -> str | None:
        """What errors call the region that begins now, if one does."""
        call = self.fqn, self.session.count(self.fqn)
        choice = _chosen(self.choices, call[1])
        if choice is None:
            return None
        choice.runs += 1
        return call_name(*call)
