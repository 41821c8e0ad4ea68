"""Match the regions of a plan with the modules of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from torch import nn

from ckplan.applying.hooks.checks import (
    check_apart,
    check_modules,
    check_ops,
    check_run,
    check_together,
    has_forward,
)
from ckplan.applying.hooks.choices import Choice
from ckplan.applying.tensors.compiled import MODEL_INSIDE
from ckplan.errors import PlanError
from ckplan.graph.fqn import is_around
from ckplan.graph.patterns import expand_modules, parse_call
from ckplan.plan.plan import PlannedRegion


def choices_of(
    regions: Sequence[PlannedRegion], modules: Mapping[str, nn.Module]
) -> list[Choice]:
    """The choices of a plan, checked against the model."""
    whole = _whole_choices(regions, modules)
    runs = [_run_choice(region, modules) for region in regions if region.run]
    found = [*(choice for same in whole.values() for choice in same), *runs]
    for choice in found:
        check_modules(choice, modules)
    check_ops(regions)
    for run in runs:
        check_run(run, runs, whole)
    for region in regions:
        mine = [choice for choice in found if choice.region is region]
        for inner in choices_of(region.inner, modules):
            _place(inner, region, mine)
    return found


def _whole_choices(
    regions: Iterable[PlannedRegion], modules: Mapping[str, nn.Module]
) -> dict[str, list[Choice]]:
    """Planned FQNs, each with its choices."""
    found: dict[str, list[Choice]] = {}
    for region in regions:
        for fqn, numbers in (
            () if region.run else _expand(region, region.calls, modules)
        ):
            choice = Choice(fqn, region, numbers, top=fqn)
            for other in found.get(fqn, ()):
                check_together(choice, other)
            found.setdefault(fqn, []).append(choice)
    check_apart(found)
    return found


def _run_choice(region: PlannedRegion, modules: Mapping[str, nn.Module]) -> Choice:
    """A planned run."""
    first, last = (_call(region, name, modules) for name in region.run or ())
    makers = tuple(_makers_of(first[0], last[0], modules))
    if not makers or (first[0] == last[0] and first[1] >= last[1]):
        apart = PlanError(
            f"cannot make one region of {region.title}",
            needed="two calls that the same module makes, the first one first",
            hint="run: [transformer.h.0, transformer.h.3]",
        )
        raise region.located(apart)
    fqn, number = first
    return Choice(fqn, region, frozenset({number}), last, makers[0], makers)


def _call(
    region: PlannedRegion, name: str, modules: Mapping[str, nn.Module]
) -> tuple[str, int]:
    """A call that a run begins or ends with."""
    fqn, number = parse_call(name)
    _expand(region, fqn or ".", modules)
    return fqn, number or 0


def _expand(
    region: PlannedRegion, pattern: str, fqns: Collection[str]
) -> tuple[tuple[str, frozenset[int] | None], ...]:
    try:
        return expand_modules(pattern, fqns)
    except PlanError as error:
        if MODEL_INSIDE in fqns:
            error = PlanError(
                error.what,
                needed="the model itself, not what torch.compile made of it",
                hint="torch.compile(ckplan.apply(model, plan))",
            )
        raise region.located(error) from None


def _makers_of(
    first: str, last: str, modules: Mapping[str, nn.Module]
) -> Iterator[str]:
    """Modules around both that may call them, innermost first.

    The caller is known only at run time: a ``Sequential`` may be called, or only
    iterated over.
    """
    if first != last and (is_around(first, last) or is_around(last, first)):
        return
    parts = zip(first.split("."), last.split("."), strict=False)
    same = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], parts)]
    for stop in range(len(same), -1, -1):
        fqn = ".".join(same[:stop])
        if fqn not in (first, last) and has_forward(modules[fqn]):
            yield fqn
            if type(modules[fqn]).forward is not nn.Sequential.forward:
                return


def _place(inner: Choice, region: PlannedRegion, choices: Iterable[Choice]) -> None:
    """Add a nested region to the choices around it, by module names."""
    around = [choice for choice in choices if _is_inside(inner, choice)]
    if not around:
        apart = PlanError(
            f"{inner.name} is not inside {region.title!r}",
            needed="calls that run inside the region around them",
            hint="move it to the regions of the plan",
        )
        raise inner.region.located(apart)
    for choice in around:
        choice.inner.append(inner)


def _is_inside(inner: Choice, outer: Choice) -> bool:
    begins_there = inner.last is None or inner.numbers == outer.numbers
    same = begins_there and (inner.fqn, inner.last) == (outer.fqn, outer.last)
    return not same and all(is_around(outer.reach, fqn) for fqn in inner.ends)
