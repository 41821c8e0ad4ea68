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
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckplan.applying.calls import settings
from ckplan.applying.forwards import GuardedForward, RerunForward, StandIn
from ckplan.applying.record import OpKey, Recorder, Template
from ckplan.applying.replay import Replay
from ckplan.errors import ApplyError, PlanError
from ckplan.names import (
    Call,
    call_name,
    expand_modules,
    parse_call,
    relative_path,
)
from ckplan.plan import Plan, PlannedRegion, differences, load, plan_fingerprint
from ckplan.simulate import RERUN
from ckplan.training.fingerprint import (
    batch_shapes,
    count_elements,
    parameter_shapes,
    torch_version,
)
from ckplan.units import format_bytes

_MOST_TEMPLATES = 8  # of one call: training and evaluation, a few shapes
_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What one planned call did so far."""

    call: str  # FQN#n, or the FQN where every call is planned
    by: str
    runs: int  # forwards that were regions
    recorded: int  # those that were written down op by op
    kept: int  # those that began like an earlier one and then kept what differed
    dropped_bytes: int  # by its last run; 0 for re-runs, which do not count
    missing: tuple[str, ...]  # saves of the plan that named no op in its last run


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


class _Templates(dict[Hashable, "Template | None"]):
    """What forwards of a region were seen to do; None where they differ each time.

    A copy of a model begins without.
    """

    def __reduce__(self) -> tuple[type[_Templates], tuple[()]]:
        return type(self), ()


@dataclass
class _Choice:
    """A planned region of one module, and what it did."""

    fqn: str  # of the call that begins it
    region: PlannedRegion
    numbers: frozenset[int] | None  # of calls; None for every call
    last: Call | None = None  # that ends it, if it is a run of calls
    top: str = ""  # what paths are below: the FQN of its module, or of a run's parent
    runs: int = 0
    recorded: int = 0
    kept: int = 0
    dropped_bytes: int = 0
    missing: tuple[str, ...] = ()
    templates: _Templates = field(default_factory=_Templates)

    @property
    def title(self) -> str:
        """What errors of its ops call it; empty for the model."""
        return self.fqn if self.last is None else self.region.title

    @property
    def name(self) -> str:
        """What status and errors of the plan call it."""
        if self.last is not None:
            return self.region.title
        if self.numbers is None:
            return self.fqn or "."
        return ", ".join(call_name(self.fqn, n) for n in sorted(self.numbers))

    def begin(self, name: str, key: Hashable) -> Recorder | Replay:
        """Watch a forward: call by call if one like it is known, else op by op."""
        template = self.templates.get(key)
        if template is None:
            return Recorder(name, self.saves, self.encodes)
        return Replay(name, template)

    def end(self, region: Recorder | Replay, key: Hashable) -> None:
        """Note what one forward of it did."""
        region.close()
        self.runs += 1
        if isinstance(region, Recorder):
            self.recorded += 1
            self.dropped_bytes = region.dropped_bytes
            self._note_missing(region.found)
            if key not in self.templates:
                self._learn(key, region.template)
        elif not region.repeats:
            self.kept += 1
            self.templates[key] = None  # they differ: each is written down from now on

    def _learn(self, key: Hashable, template: Template | None) -> None:
        while len(self.templates) >= _MOST_TEMPLATES:
            del self.templates[next(iter(self.templates))]
        self.templates[key] = template

    def _note_missing(self, found: Collection[OpKey]) -> None:
        named = (*self.region.save, *(op for op, _ in self.region.encode))
        self.missing = tuple(
            str(op) for op in named if (op.path, op.name, op.occurrence) not in found
        )

    def status(self) -> RegionStatus:
        """For people."""
        return RegionStatus(
            self.name,
            self.region.by,
            self.runs,
            self.recorded,
            self.kept,
            self.dropped_bytes,
            self.missing,
        )

    @cached_property
    def saves(self) -> dict[OpKey, frozenset[int] | None]:
        found: dict[OpKey, frozenset[int] | None] = {}
        for op in self.region.save:
            key = (op.path, op.name, op.occurrence)
            outputs = found.get(key, frozenset())
            if op.output is None or outputs is None:
                found[key] = None
            else:
                found[key] = outputs | {op.output}
        return found

    @cached_property
    def encodes(self) -> dict[OpKey, dict[int | None, str]]:
        found: dict[OpKey, dict[int | None, str]] = {}
        for op, form in self.region.encode:
            found.setdefault((op.path, op.name, op.occurrence), {})[op.output] = form
        return found


class _Open(NamedTuple):
    """A region whose forward runs now."""

    choice: _Choice
    region: Recorder | Replay
    key: Hashable
    session: _Session
    last: Call  # that ends it
    switched_off: list[nn.Module]  # modules that would checkpoint themselves

    def close(self) -> None:
        """Its forward is over."""
        self._switch_on()
        self.choice.end(self.region, self.key)

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
    choices: list[_Choice] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    stand_ins: list[StandIn] = field(default_factory=list)
    larger: bool = False  # a batch was larger than planned, which was said

    @torch.compiler.disable
    def begin_step(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Hook of the model itself: call numbers begin anew."""
        del module
        _running.abandon(self)
        self.calls.clear()
        if not self.larger and torch.is_grad_enabled():
            self.larger = _warn_of_larger_batch(self.plan, args, kwargs)

    def stand_in(self, forward: StandIn) -> None:
        """Put something in the place of a module's forward."""
        self.stand_ins.append(forward)
        forward.module.forward = forward

    def interrupted(self) -> None:
        """A forward ended by what is no ``Exception``."""
        _running.abandon(self)

    def count(self, fqn: str) -> int:
        """The number of the call that begins now."""
        number = self.calls.get(fqn, 0)
        self.calls[fqn] = number + 1
        return number


@dataclass
class _RegionHooks:
    """Hooks around a module at whose calls regions begin or end."""

    fqn: str
    session: _Session
    choices: list[_Choice]  # of the regions that begin here
    switches: list[nn.Module] = field(default_factory=list)  # of transformers, inside

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Open a region if one begins with this call."""
        call = self.fqn, self.session.count(self.fqn)
        _running.calls.append((self.session, call))
        choice = _chosen(self.choices, call[1])
        if choice is not None and not _running.regions:
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
            if found.session is session and found.last == call:
                _running.regions.pop().close()


@dataclass
class _ParentHooks:
    """A hook around a module that makes the calls of runs: none outlives it."""

    choices: list[_Choice]

    @torch.compiler.disable
    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Close what is open since the last call of its run never came."""
        del module, args, kwargs, output
        found = _running.regions[-1] if _running.regions else None
        if found is not None and any(found.choice is choice for choice in self.choices):
            _running.regions.pop().close()


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
            top = _running.regions[-1].choice.top
            recorder.path.append(relative_path(self.fqn, top))

    @torch.compiler.disable
    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Leave the module."""
        del module, args, kwargs, output
        recorder = _running.recorder
        if recorder is not None:
            recorder.path.pop()


def _chosen(choices: Iterable[_Choice], number: int) -> _Choice | None:
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
    choices, runs = _choices(plan, modules), _run_choices(plan, modules)
    for run in runs:
        _check_run(run, runs, choices)
    _warn_of_differences(plan, model)
    remove(model)
    whole = [choice for found in choices.values() for choice in found]
    session = _Session(plan, choices=[*whole, *runs])
    programs = list(runs)
    for fqn, found in choices.items():
        if found[0].region.by == RERUN:
            _attach_rerun(session, fqn, modules[fqn], found)
        else:
            programs += found
    _attach_programs(session, modules, programs)
    session.handles.append(_hook_begin(model, session.begin_step))
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take off what ``apply`` attached; a model without a plan is left as it is."""
    session = _session_of(model)
    if session is not None:
        _running.abandon(session)
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


def _choices(plan: Plan, modules: Mapping[str, nn.Module]) -> dict[str, list[_Choice]]:
    """Planned FQNs, each with its choices, checked against the model."""
    found: dict[str, list[_Choice]] = {}
    for region in plan.regions:
        for fqn, numbers in () if region.run else _expand(region, modules):
            choice = _Choice(fqn, region, numbers, top=fqn)
            for other in found.get(fqn, ()):
                _check_apart(choice, other)
            found.setdefault(fqn, []).append(choice)
    for fqn in found:
        for outer in found:
            if fqn != outer and (not outer or fqn.startswith(f"{outer}.")):
                raise _overlap(found[fqn][0], f"{fqn} is inside {outer or '.'}")
    return found


def _run_choices(plan: Plan, modules: Mapping[str, nn.Module]) -> list[_Choice]:
    """Planned runs, checked against the model."""
    found: list[_Choice] = []
    for region in plan.regions:
        if region.run is None:
            continue
        ends: list[Call] = []
        for name in region.run:
            fqn, number = parse_call(name)
            try:
                expand_modules(fqn or ".", modules)
            except PlanError as error:
                raise region.located(error) from None
            ends.append((fqn, number or 0))
        (fqn, number), last = ends
        top = _maker_of(fqn, last[0], modules)
        if top is None:
            apart = PlanError(
                f"cannot make one region of {region.title}",
                needed="two calls that the same module makes",
                hint="run: [transformer.h.0, transformer.h.3]",
            )
            raise region.located(apart)
        found.append(_Choice(fqn, region, frozenset({number}), last, top))
    return found


def _maker_of(first: str, last: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The innermost module around both that has a forward of its own."""
    if first != last and (_around(first, last) or _around(last, first)):
        return None
    parts = zip(first.split("."), last.split("."), strict=False)
    same = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], parts)]
    for stop in range(len(same), -1, -1):
        fqn = ".".join(same[:stop])
        if fqn not in (first, last) and _has_forward(modules[fqn]):
            return fqn
    return None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _check_run(
    run: _Choice, runs: Iterable[_Choice], choices: Mapping[str, Sequence[_Choice]]
) -> None:
    """Refuse what is sure to overlap a run; the rest is for ``resolve``."""
    assert run.last is not None
    for fqn, found in choices.items():
        for end in (run.fqn, run.last[0]):
            if fqn != end and (_around(fqn, end) or _around(end, fqn)):
                raise _overlap(run, f"{fqn or '.'} is inside {run.name}, or around it")
        for choice in found:
            rerun = choice.region.by == RERUN and fqn in (run.fqn, run.last[0])
            if rerun or _meets(run, fqn, choice.numbers):
                raise _overlap(run, f"{choice.name} is in {run.name}, too")
    for other in runs:
        if other is not run and _meets(run, other.fqn, other.numbers):
            raise _overlap(run, f"{other.name} begins in {run.name}")


def _meets(run: _Choice, fqn: str, numbers: frozenset[int] | None) -> bool:
    """Whether calls of a module are the first or last of a run, or between them."""
    assert run.last is not None
    (first,) = run.numbers or {0}
    fqn_last, last = run.last
    if fqn == run.fqn == fqn_last:
        return numbers is None or any(first <= number <= last for number in numbers)
    at = {run.fqn: first, fqn_last: last}.get(fqn)
    return at is not None and (numbers is None or at in numbers)


def _around(outer: str, inner: str) -> bool:
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _attach_programs(
    session: _Session, modules: Mapping[str, nn.Module], programs: Sequence[_Choice]
) -> None:
    """Hooks where regions begin and end, around who makes runs, and for paths inside.

    Hooks go in front: what is attached later begins earlier, and ends earlier.
    """
    regions: dict[str, _RegionHooks] = {}
    makers: dict[str, _ParentHooks] = {}
    for choice in programs:
        ends = (choice.fqn,) if choice.last is None else (choice.fqn, choice.last[0])
        for fqn in ends:
            regions.setdefault(fqn, _RegionHooks(fqn, session, []))
        regions[choice.fqn].choices.append(choice)
        regions[choice.fqn].switches += (
            module
            for name, module in modules.items()
            if _around(choice.top, name) and hasattr(module, "gradient_checkpointing")
        )
        if choice.last is not None:
            makers.setdefault(choice.top, _ParentHooks([])).choices.append(choice)
    inside = _inside(programs, modules)
    add = session.handles.append
    for fqn, hooks in regions.items():
        add(_hook_end(modules[fqn], hooks.end))
    for fqn in inside:
        add(_hook_begin(modules[fqn], _PathHooks(fqn).begin))
        add(_hook_end(modules[fqn], _PathHooks(fqn).end))
    for fqn, hooks in regions.items():
        add(_hook_begin(modules[fqn], hooks.begin))
    for fqn, maker in makers.items():
        add(_hook_end(modules[fqn], maker.end))
    for fqn in {*(c.fqn for c in programs if c.last is None), *makers}:
        session.stand_in(GuardedForward(modules[fqn], session.interrupted))


def _inside(programs: Iterable[_Choice], modules: Iterable[str]) -> set[str]:
    """Modules in whose forward a plan may name an op."""
    tops = {c.top for c in programs if c.region.save or c.region.encode}
    return {
        name
        for name in modules
        if any(name != top and _around(top, name) for top in tops)
    }


def _hook_begin(module: nn.Module, begin: Callable[..., None]) -> RemovableHandle:
    return module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)


def _hook_end(module: nn.Module, end: Callable[..., None]) -> RemovableHandle:
    return module.register_forward_hook(
        end, prepend=True, with_kwargs=True, always_call=True
    )


def _expand(
    region: PlannedRegion, fqns: Iterable[str]
) -> tuple[tuple[str, frozenset[int] | None], ...]:
    try:
        return expand_modules(region.calls, fqns)
    except PlanError as error:
        raise region.located(error) from None


def _check_apart(choice: _Choice, other: _Choice) -> None:
    if choice.region.by != other.region.by:
        raise _overlap(choice, f"{choice.name} is to be rebuilt in two ways")
    both = choice.numbers is None or other.numbers is None
    if both or (choice.numbers or set()) & (other.numbers or set()):
        raise _overlap(choice, f"{choice.name} is named twice")


def _overlap(choice: _Choice, found: str) -> PlanError:
    error = PlanError(
        f"regions overlap: {found}",
        needed="regions of which none lies inside another",
        hint="remove one of the two",
    )
    return choice.region.located(error)


def _attach_rerun(
    session: _Session, fqn: str, module: nn.Module, choices: list[_Choice]
) -> None:
    session.stand_in(RerunForward(module, _Chooser(session, fqn, choices)))


@dataclass
class _Chooser:
    """Tells a re-run module whether this call is a region."""

    session: _Session
    fqn: str
    choices: list[_Choice]

    def __call__(self) -> bool:
        choice = _chosen(self.choices, self.session.count(self.fqn))
        if choice is not None:
            choice.runs += 1
        return choice is not None


def _warn_of_differences(plan: Plan, model: nn.Module) -> None:
    here = {"torch": torch_version(), "parameters": parameter_shapes(model)}
    for difference in differences(plan.fingerprint, plan_fingerprint(here)):
        warnings.warn(
            f"the plan was made for another model: {difference}", stacklevel=3
        )


def _warn_of_larger_batch(plan: Plan, args: _Args, kwargs: _Kwargs) -> bool:
    """Whether a batch has more elements than the planned one; says so, too."""
    planned = plan.fingerprint.get("batch", {})
    for name, here in batch_shapes(args, kwargs).items():
        before = count_elements(planned.get(name, ""))
        times = count_elements(here) / before if before else 0.0
        if times > 1:
            what = f"{name} is {here}, planned was {planned[name]}"
            if plan.predicted is not None:
                most = format_bytes(round(times * plan.predicted.peak_bytes))
                what += f"; the peak may grow up to {most}"
            warnings.warn(f"the batch is larger than planned: {what}", stacklevel=4)
            return True
    return False
