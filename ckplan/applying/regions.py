"""Attach regions to the calls of a model, and take them off again.

A region is a pair of hooks on its module: names, types, ``state_dict`` and ``forward``
stay as they were, and a copy of the model has regions of its own. Only ``by: rerun``
stands in for ``forward``, as an attribute of the instance.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import (
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
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckplan.applying.calls import settings
from ckplan.applying.record import OpKey, Recorder, Template
from ckplan.applying.replay import Replay
from ckplan.applying.rerun import RerunForward
from ckplan.errors import ApplyError, PlanError
from ckplan.names import call_name, expand_modules, relative_path
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

    fqn: str
    region: PlannedRegion
    numbers: frozenset[int] | None  # of calls; None for every call
    runs: int = 0
    recorded: int = 0
    kept: int = 0
    dropped_bytes: int = 0
    missing: tuple[str, ...] = ()
    templates: _Templates = field(default_factory=_Templates)

    @property
    def name(self) -> str:
        """What status and errors call it."""
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


class _Run(NamedTuple):
    """The forward of a planned module, while it runs."""

    fqn: str
    choice: _Choice | None  # None: this call is no region
    region: Recorder | Replay | None
    key: Hashable


class _Running(threading.local):
    """Planned modules whose forward runs now, in this thread, innermost last."""

    def __init__(self) -> None:
        self.regions: list[_Run] = []


_running = _Running()


@dataclass
class _Session:
    """All that a plan attached to one model; copied with it."""

    plan: Plan
    calls: dict[str, int] = field(default_factory=dict)  # FQN -> forwards in this step
    choices: list[_Choice] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    replaced: list[tuple[nn.Module, Any]] = field(default_factory=list)
    larger: bool = False  # a batch was larger than planned, which was said

    def begin_step(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Hook of the model itself: call numbers begin anew."""
        del module
        self.calls.clear()
        if not self.larger and torch.is_grad_enabled():
            self.larger = _warn_of_larger_batch(self.plan, args, kwargs)

    def choose(self, fqn: str, choices: Sequence[_Choice]) -> _Choice | None:
        """The choice for the call that begins now, if it is a region."""
        number = self.calls.get(fqn, 0)
        self.calls[fqn] = number + 1
        if torch.is_grad_enabled():
            for choice in choices:
                if choice.numbers is None or number in choice.numbers:
                    return choice
        return None


@dataclass
class _RegionHooks:
    """Hooks around the forward of a module of which some calls are programs."""

    fqn: str
    session: _Session
    choices: list[_Choice]

    def begin(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Open a region if the plan has one for this call."""
        choice = self.session.choose(self.fqn, self.choices)
        region, key = None, None
        if choice is not None:
            key = _key(module, args, kwargs)
            region = choice.begin(self.fqn or type(module).__name__, key)
            region.open()
        _running.regions.append(_Run(self.fqn, choice, region, key))

    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Close the region; called even when forward raised."""
        del module, args, kwargs, output
        _, choice, region, key = _running.regions.pop()
        if choice is not None and region is not None:
            choice.end(region, key)


@dataclass
class _PathHooks:
    """Hooks around a module inside a region: they tell whose ops run."""

    fqn: str

    def begin(self, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        """Enter the module."""
        del module, args, kwargs
        run = _running.regions[-1] if _running.regions else None
        if run is not None and isinstance(run.region, Recorder):
            run.region.path.append(relative_path(self.fqn, run.fqn))

    def end(
        self, module: nn.Module, args: _Args, kwargs: _Kwargs, output: object
    ) -> None:
        """Leave the module."""
        del module, args, kwargs, output
        run = _running.regions[-1] if _running.regions else None
        if run is not None and isinstance(run.region, Recorder):
            run.region.path.pop()


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
    choices = _choices(plan, modules)
    _warn_of_differences(plan, model)
    remove(model)
    session = _Session(plan, choices=[c for found in choices.values() for c in found])
    session.handles.append(
        model.register_forward_pre_hook(
            session.begin_step, prepend=True, with_kwargs=True
        )
    )
    for fqn, found in choices.items():
        if found[0].region.by == RERUN:
            _attach_rerun(session, fqn, modules[fqn], found)
        else:
            _attach_program(session, fqn, modules, found)
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take off what ``apply`` attached; a model without a plan is left as it is."""
    session = _session_of(model)
    if session is not None:
        for handle in session.handles:
            handle.remove()
        for module, previous in session.replaced:
            del module.forward
            if previous is not None:
                module.forward = previous
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
        for fqn, numbers in _expand(region, modules):
            choice = _Choice(fqn, region, numbers)
            for other in found.get(fqn, ()):
                _check_apart(choice, other)
            found.setdefault(fqn, []).append(choice)
    for fqn in found:
        for outer in found:
            if fqn != outer and (not outer or fqn.startswith(f"{outer}.")):
                raise _overlap(found[fqn][0], f"{fqn} is inside {outer or '.'}")
    return found


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


def _attach_program(
    session: _Session,
    fqn: str,
    modules: Mapping[str, nn.Module],
    choices: list[_Choice],
) -> None:
    hooks: list[tuple[nn.Module, _RegionHooks | _PathHooks]] = [
        (modules[fqn], _RegionHooks(fqn, session, choices))
    ]
    if any(choice.region.save or choice.region.encode for choice in choices):
        prefix = f"{fqn}." if fqn else ""
        hooks += [
            (module, _PathHooks(name))
            for name, module in modules.items()
            if name != fqn and name.startswith(prefix)
        ]
    for module, pair in hooks:
        begin = module.register_forward_pre_hook(
            pair.begin, prepend=True, with_kwargs=True
        )
        end = module.register_forward_hook(
            pair.end, prepend=True, with_kwargs=True, always_call=True
        )
        session.handles += (begin, end)


def _attach_rerun(
    session: _Session, fqn: str, module: nn.Module, choices: list[_Choice]
) -> None:
    session.replaced.append((module, module.__dict__.get("forward")))
    module.forward = RerunForward(module, _Chooser(session, fqn, choices))


@dataclass
class _Chooser:
    """Tells a re-run module whether this call is a region."""

    session: _Session
    fqn: str
    choices: list[_Choice]

    def __call__(self) -> bool:
        choice = self.session.choose(self.fqn, self.choices)
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
