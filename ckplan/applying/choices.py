"""What a plan chooses for the modules of a model, checked before anything changes."""

from __future__ import annotations

from collections.abc import (
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile

import torch
from torch import nn

from ckplan.applying.known import Templates
from ckplan.applying.naming import OpKey
from ckplan.applying.record import Recorder
from ckplan.applying.replay import Replay
from ckplan.errors import PlanError, did_you_mean
from ckplan.names import Call, call_name, expand_modules, parse_call
from ckplan.plan import PlannedRegion
from ckplan.region import RERUN


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What one planned call did so far."""

    call: str  # FQN#n, or the FQN where every call is planned
    by: str
    runs: int  # forwards that were regions
    recorded: int  # those written down op by op, if only from where they differed
    kept: int  # those that differed where that was seen too late, and kept the rest
    dropped_bytes: int  # by its last run; 0 for re-runs, which do not count
    missing: tuple[str, ...]  # saves of the plan that named no op in its last run


@dataclass
class Choice:
    """A planned region of one module, and what it did."""

    fqn: str  # of the call that begins it
    region: PlannedRegion
    numbers: frozenset[int] | None  # of calls; None for every call
    last: Call | None = None  # that ends it, if it is a run of calls
    top: str = ""  # what paths are below: the FQN of its module, or of a run's maker
    makers: tuple[str, ...] = ()  # what may make the calls of a run, innermost first
    runs: int = 0
    recorded: int = 0
    kept: int = 0
    dropped_bytes: int = 0
    missing: tuple[str, ...] = ()
    templates: Templates = field(default_factory=Templates)
    inner: list[Choice] = field(default_factory=list)

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

    @property
    def ends(self) -> tuple[str, ...]:
        """FQNs of the modules with whose calls it begins and ends."""
        return (self.fqn,) if self.last is None else (self.fqn, self.last[0])

    @property
    def reach(self) -> str:
        """FQN of a module that all of it is in."""
        return self.makers[-1] if self.makers else self.top

    def below(self, running: Collection[str]) -> None:
        """Begin its paths below the innermost of its makers that runs."""
        self.top = next((fqn for fqn in self.makers if fqn in running), self.top)

    def begin(self, name: str, key: Hashable) -> Recorder | Replay:
        """Watch a forward: call by call if one like it is known, else op by op."""
        template = self.templates.find(key)
        record = partial(Recorder, name, self.top, self.saves, self.encodes)
        if template is None:
            recorder = record(looks=not self.recorded)
            recorder.log.broken = not self.templates.can_learn(key)
            return recorder
        looks = self.templates.are_steady(key)
        return Replay(name, self.top, template, partial(record, looks=looks))

    def end(
        self,
        region: Recorder | Replay,
        key: Hashable,
        missing: Iterable[str],
        *,
        learn: bool,
    ) -> None:
        """Note what one forward of it did, and which saves inside named no op.

        Args:
            region: The forward.
            key: What it has in common with others that may do the same.
            missing: Those saves.
            learn: Whether others may be compared with it: it did not raise.
        """
        region.close()
        self.runs += 1
        recorder = region.watched
        if recorder is not None:
            self.recorded += 1
            self.dropped_bytes = recorder.dropped_bytes
            self.missing = (*self.missing_of(recorder.names.found), *missing)
            if learn:
                self.templates.learn(key, recorder.template)
        if isinstance(region, Recorder):
            return
        if region.repeats:
            self.dropped_bytes = region.template.dropped_bytes
            self.templates.repeat(key)
        elif learn:
            self.kept += region.kept
            self.templates.differ(key, late=region.kept)

    def missing_of(self, found: Collection[OpKey]) -> Iterator[str]:
        """Saves and encodings of the plan that named no op."""
        for op in (*self.region.save, *(op for op, _ in self.region.encode)):
            if (op.path, op.name, op.occurrence) not in found:
                yield str(op)

    @property
    def names_ops(self) -> bool:
        """Whether it, or a region inside, says which ops it keeps."""
        named = self.region.save or self.region.encode
        return bool(named) or any(inner.names_ops for inner in self.inner)

    def within(self) -> Iterator[tuple[Choice, Choice]]:
        """The regions inside, each behind the one around it."""
        for inner in self.inner:
            yield self, inner
            yield from inner.within()

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
        """What to keep, as the recorder takes it."""
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
        """What to keep in a smaller form, as the recorder takes it."""
        found: dict[OpKey, dict[int | None, str]] = {}
        for op, form in self.region.encode:
            found.setdefault((op.path, op.name, op.occurrence), {})[op.output] = form
        return found


def choices_of(
    regions: Sequence[PlannedRegion], modules: Mapping[str, nn.Module]
) -> list[Choice]:
    """What is planned for which modules, checked against the model."""
    whole, runs = _whole_choices(regions, modules), _run_choices(regions, modules)
    found = [*(choice for same in whole.values() for choice in same), *runs]
    for choice in found:
        _check_runs_in_python(choice, modules)
        _check_is_called(choice, modules)
    _check_ops(regions)
    for run in runs:
        _check_run(run, runs, whole)
    for region in regions:
        inner = choices_of(region.inner, modules)
        for choice in (one for one in found if one.region is region):
            choice.inner = [one for one in inner if _is_inside(one, choice)]
        placed = [one for choice in found for one in choice.inner]
        for one in inner:
            if not any(one is other for other in placed):
                apart = PlanError(
                    f"{one.name} is not inside {region.title!r}",
                    needed="calls that run inside the region around them",
                    hint="move it to the regions of the plan",
                )
                raise one.region.located(apart)
    return found


def _check_runs_in_python(choice: Choice, modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules that TorchScript compiled: they take no hooks."""
    if any(isinstance(modules[fqn], torch.jit.ScriptModule) for fqn in choice.ends):
        compiled = PlanError(
            f"cannot make a region of {choice.name}: it is compiled by TorchScript",
            needed="modules that run in Python",
            hint="the call around it, if that is one",
        )
        raise choice.region.located(compiled)


def _check_is_called(choice: Choice, modules: Mapping[str, nn.Module]) -> None:
    """Refuse lists and other containers, which never run themselves."""
    for fqn in choice.ends:
        module = modules[fqn]
        if not _has_forward(module):
            inside = next((name for name, _ in module.named_children()), None)
            never = PlanError(
                f"cannot make a region of {choice.name}: {type(module).__name__} has "
                "no forward, so it never runs",
                needed="modules that are called",
                hint="the module that calls what is in it"
                if inside is None
                else f"the modules in it: {fqn}.{inside}, ...",
            )
            raise choice.region.located(never)


def _check_ops(regions: Iterable[PlannedRegion]) -> None:
    """Refuse ops that torch has not, in any library; which ones run is seen later."""
    named = [
        (region, place, op.name)
        for region in regions
        for place, op in enumerate(
            (*region.save, *(op for op, _ in region.encode)), start=1
        )
    ]
    if not named:
        return
    full_names = torch._C._dispatch_get_all_op_names()  # as aten::addmm.out
    known = {name.partition("::")[2].partition(".")[0] for name in full_names}
    for region, place, name in named:
        if name.rpartition(".")[2] not in known:  # it may begin with its library
            near = did_you_mean(name, sorted(known))
            error = PlanError(
                f"torch {torch.__version__} has no op {name!r}",
                needed="ops of this torch, or of a library that is imported by now",
                hint=f"did you mean {near!r}?" if near else "profile and solve again",
            )
            raise region.located(error, place)


def _is_inside(inner: Choice, outer: Choice) -> bool:
    """Whether one may run inside the other, as far as names tell."""
    same = inner.last == outer.last and inner.fqn == outer.fqn
    return not same and all(is_around(outer.reach, fqn) for fqn in inner.ends)


def _whole_choices(
    regions: Iterable[PlannedRegion], modules: Mapping[str, nn.Module]
) -> dict[str, list[Choice]]:
    """Planned FQNs, each with its choices.

    Which calls of a module lie inside some calls of another is for ``resolve``.
    """
    found: dict[str, list[Choice]] = {}
    for region in regions:
        for fqn, numbers in () if region.run else _expand(region, modules):
            choice = Choice(fqn, region, numbers, top=fqn)
            for other in found.get(fqn, ()):
                _check_apart(choice, other)
            found.setdefault(fqn, []).append(choice)
    for fqn, (choice, *_) in found.items():
        for outer, (around, *_) in found.items():
            every = around.numbers is None and (choice.numbers is None or not outer)
            if every and fqn != outer and is_around(outer, fqn):
                raise _overlap(choice, f"{fqn} is inside {outer or '.'}")
    return found


def _run_choices(
    regions: Iterable[PlannedRegion], modules: Mapping[str, nn.Module]
) -> list[Choice]:
    """Planned runs."""
    found: list[Choice] = []
    for region in regions:
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
        makers = tuple(_makers_of(fqn, last[0], modules))
        if not makers or (fqn == last[0] and number >= last[1]):
            apart = PlanError(
                f"cannot make one region of {region.title}",
                needed="two calls that the same module makes, the first one first",
                hint="run: [transformer.h.0, transformer.h.3]",
            )
            raise region.located(apart)
        found.append(Choice(fqn, region, frozenset({number}), last, makers[0], makers))
    return found


def _makers_of(
    first: str, last: str, modules: Mapping[str, nn.Module]
) -> Iterator[str]:
    """Modules around both that may call them, innermost first.

    Which one does is seen when it runs: a ``Sequential`` may be called, or be a list
    that somebody goes through.
    """
    if first != last and (is_around(first, last) or is_around(last, first)):
        return
    parts = zip(first.split("."), last.split("."), strict=False)
    same = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], parts)]
    for stop in range(len(same), -1, -1):
        fqn = ".".join(same[:stop])
        if fqn not in (first, last) and _has_forward(modules[fqn]):
            yield fqn
            if type(modules[fqn]).forward is not nn.Sequential.forward:
                return


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _check_run(
    run: Choice, runs: Iterable[Choice], choices: Mapping[str, Sequence[Choice]]
) -> None:
    """Refuse what is sure to overlap a run; the rest is for ``resolve``."""
    assert run.last is not None
    for fqn, found in choices.items():
        every = any(choice.numbers is None for choice in found)
        for end in (run.fqn, run.last[0]) if every else ():
            if fqn != end and (is_around(fqn, end) or is_around(end, fqn)):
                raise _overlap(run, f"{fqn or '.'} is inside {run.name}, or around it")
        for choice in found:
            rerun = choice.region.by == RERUN and fqn in (run.fqn, run.last[0])
            if rerun or _meets(run, fqn, choice.numbers):
                raise _overlap(run, f"{choice.name} is in {run.name}, too")
    for other in runs:
        if other is not run and _meets(run, other.fqn, other.numbers):
            raise _overlap(run, f"{other.name} begins in {run.name}")


def _meets(run: Choice, fqn: str, numbers: frozenset[int] | None) -> bool:
    """Whether calls of a module are the first or last of a run, or between them."""
    assert run.last is not None
    (first,) = run.numbers or {0}
    fqn_last, last = run.last
    if fqn == run.fqn == fqn_last:
        return numbers is None or any(first <= number <= last for number in numbers)
    at = {run.fqn: first, fqn_last: last}.get(fqn)
    return at is not None and (numbers is None or at in numbers)


def is_around(outer: str, inner: str) -> bool:
    """Whether a module, by its FQN, is another one or lies around it."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _expand(
    region: PlannedRegion, fqns: Iterable[str]
) -> tuple[tuple[str, frozenset[int] | None], ...]:
    try:
        return expand_modules(region.calls, fqns)
    except PlanError as error:
        raise region.located(error) from None


def _check_apart(choice: Choice, other: Choice) -> None:
    both = choice.numbers is None or other.numbers is None
    if both or (choice.numbers or set()) & (other.numbers or set()):
        raise _overlap(choice, f"{choice.name} is named twice")
    way, other_way = choice.region.by, other.region.by
    if way != other_way:
        error = PlanError(
            f"cannot rebuild {other.name} by {other_way} and {choice.name} by {way}: "
            "one module has both",
            needed="one way for all planned calls of a module",
            hint=f"by: {other_way} for {choice.name}, too",
        )
        raise choice.region.located(error)


def _overlap(choice: Choice, found: str) -> PlanError:
    error = PlanError(
        f"regions overlap: {found}",
        needed="regions of which none lies inside another",
        hint="remove one of the two",
    )
    return choice.region.located(error)
