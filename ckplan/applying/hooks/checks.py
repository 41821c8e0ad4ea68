"""Checks that refuse a plan before the model changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ckplan.applying.hooks.choices import Choice
from ckplan.errors import PlanError, did_you_mean
from ckplan.graph.fqn import is_around
from ckplan.plan.plan import PlannedRegion


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; lists and other containers never are."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def check_modules(choice: Choice, modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules that take no hooks, and those that never run."""
    if any(isinstance(modules[fqn], torch.jit.ScriptModule) for fqn in choice.ends):
        compiled = PlanError(
            f"cannot make a region of {choice.name}: it is compiled by TorchScript",
            needed="modules that run in Python",
            hint="the call around it, if that is one",
        )
        raise choice.region.located(compiled)
    for fqn in choice.ends:
        module = modules[fqn]
        if not has_forward(module):
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


def check_ops(regions: Iterable[PlannedRegion]) -> None:
    """Refuse op names that no registered library has."""
    named = [
        (region, place, op.name)
        for region in regions
        for place, op in enumerate(region.ops, start=1)
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


def check_together(choice: Choice, other: Choice) -> None:
    """Refuse two choices of one module that share a call."""
    both = choice.numbers is None or other.numbers is None
    if both or (choice.numbers or set()) & (other.numbers or set()):
        raise _overlap(choice, f"{choice.name} is named twice")


def check_apart(choices: Mapping[str, Sequence[Choice]]) -> None:
    """Refuse planned modules that always run inside other planned modules.

    ``resolve`` checks which single calls lie inside calls of another module.
    """
    for fqn, (choice, *_) in choices.items():
        for outer, (around, *_) in choices.items():
            every = around.numbers is None and (choice.numbers is None or not outer)
            if every and fqn != outer and is_around(outer, fqn):
                raise _overlap(choice, f"{fqn} is inside {outer or '.'}")


def check_run(
    run: Choice, runs: Iterable[Choice], choices: Mapping[str, Sequence[Choice]]
) -> None:
    """Refuse choices that always overlap a run; ``resolve`` checks the rest."""
    for fqn, found in choices.items():
        every = any(choice.numbers is None for choice in found)
        for end in run.ends if every else ():
            if fqn != end and (is_around(fqn, end) or is_around(end, fqn)):
                raise _overlap(run, f"{fqn or '.'} is inside {run.name}, or around it")
        for choice in found:
            if _meets(run, fqn, choice.numbers):
                raise _overlap(run, f"{choice.name} is in {run.name}, too")
    for other in runs:
        if other is not run and _meets(run, other.fqn, other.numbers):
            raise _overlap(run, f"{other.name} begins in {run.name}")


def _meets(run: Choice, fqn: str, numbers: frozenset[int] | None) -> bool:
    """Whether calls of a module are the first or last of a run, or between them."""
    assert run.numbers is not None and run.last is not None
    (first,) = run.numbers
    fqn_last, last = run.last
    if fqn == run.fqn == fqn_last:
        return numbers is None or any(first <= number <= last for number in numbers)
    at = {run.fqn: first, fqn_last: last}.get(fqn)
    return at is not None and (numbers is None or at in numbers)


def _overlap(choice: Choice, found: str) -> PlanError:
    error = PlanError(
        f"regions overlap: {found}",
        needed="regions that do not overlap",
        hint="remove one of the two",
    )
    return choice.region.located(error)
