"""Verify a plan inside ``torch.compile``: compiled steps with it and without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckplan.applying import apply, remove
from ckplan.compiling import backend
from ckplan.compiling.eager_code import has_eager_code, read_wanted
from ckplan.compiling.lowering import in_order
from ckplan.compiling.search import Progress
from ckplan.compiling.step import (
    compiled_loss,
    loss_of_model,
    parted_loss,
    parts_of,
    under_autocast,
)
from ckplan.errors import GraphBreakError
from ckplan.plan.plan import COMPILED, EAGER, Plan
from ckplan.training.loading import WorkloadSpec, as_spec
from ckplan.training.workload import Workload, on_device
from ckplan.verifying.compiled_differences import (
    ROUNDING,
    differences,
    in_float64,
    rounding_alone,
    rounding_of,
    same_draws,
)
from ckplan.verifying.compiled_plans import PlannedStep, planned_step
from ckplan.verifying.compiled_runs import (
    CERTAIN,
    Chance,
    Results,
    eager_results,
    names_apart,
    place_of,
    repeated,
    results_of,
    values_of,
)
from ckplan.verifying.verify import step_device

_MOST_NAMES = 20
_FAR = 0.1  # relative difference that no rounding makes


@dataclass(frozen=True, kw_only=True)
class CompiledVerification:
    """Compiled steps with a plan, compared with compiled steps without one."""

    budget_bytes: int | None
    fits: bool
    graphs: int = 1  # compiled graphs of forward, which share the budget
    uncompiled_bytes: dict[str, int] = field(default_factory=dict)  # kept, by module
    # Parameters and batch included, like all peaks here. Of several graphs, the most
    # that they can take, with what code between them saves.
    replayed_peak_bytes: int
    measured_peak_bytes: int
    unplanned_replayed_peak_bytes: int
    unplanned_measured_peak_bytes: int
    loss_equal: bool
    gradients_equal: bool
    buffers_equal: bool
    random_state_equal: bool
    different: tuple[str, ...]  # the first names
    # Of loss, gradients and buffers, each relative to its largest number.
    largest_difference: float
    rounding: float = ROUNDING  # the most that may be rounding
    # The same against uncompiled steps, which draw other random numbers: None if any.
    largest_difference_from_eager: float | None
    # Names left out of both: float64 finds them to be rounding alone.
    rounding_alone: tuple[str, ...] = ()
    # By how much steps without a plan differ from each other, by name. Such a value
    # counts as equal if it has the bits of any of them, and is else left out of
    # the largest difference if it is no further from them.
    unplanned_differences: dict[str, float] = field(default_factory=dict)
    predicted_overhead: float | None
    overhead: float | None
    step_seconds: float | None
    unplanned_step_seconds: float | None

    @property
    def passed(self) -> bool:
        """Whether the plan fits and changes no more than rounding may."""
        same_draws = self.random_state_equal
        return self.fits and same_draws and self.largest_difference <= self.rounding

    @property
    def compiled_wrongly(self) -> bool:
        """Whether compiled steps, with a plan or without, are far from uncompiled."""
        far = self.largest_difference_from_eager
        return far is not None and far > _FAR

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for ``--json``."""
        wrongly = {"compiled_wrongly": self.compiled_wrongly}
        return {"passed": self.passed, **asdict(self), **wrongly}


def verify_compiled(
    spec: WorkloadSpec | str | Path,
    plan_or_budget: Plan | Path | str | int,
    *,
    eager: Plan | None = None,
    amp: str | None = None,
    device: str | None = None,
    steps: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[CompiledVerification, Plan]:
    """Take the same compiled steps without a plan and with it, and compare.

    A step is forward, loss and backward, compiled as one graph, or else as several,
    which share a budget.

    Args:
        spec: Where the workload comes from.
        plan_or_budget: A plan for compiled code, or a budget; see ``ckplan.compile``.
        eager: With a budget, a plan for what runs uncompiled.
        amp: ``bf16`` or ``fp16``: forward and loss run under autocast to this type.
        device: ``cpu`` or ``cuda``; by default that of the plan, else the CPU.
        steps: Number of timed steps of each, interleaved; 0 disables timing. With
            regions for eager code, nothing is timed: their hooks are on the model.
        seed: Seed of all random numbers.
        progress: Callback that reports progress.

    Returns:
        The comparison, and the plan. A difference does not raise.

    Raises:
        CkplanError: The plan or the budget cannot be used, or nothing that trains
            compiles.
    """
    wanted = read_wanted(plan_or_budget)
    place = step_device(device, wanted if isinstance(wanted, Plan) else None)
    torch.manual_seed(seed)
    workload = on_device(as_spec(spec).build(), torch.device(place))
    workload = under_autocast(workload, amp, place.partition(":")[0])
    if has_eager_code(wanted):
        wanted, eager = wanted.for_code(COMPILED), wanted.for_code(EAGER)
    planned_backend = backend(wanted, progress=progress)
    planned_backend.model = type(workload.model).__name__
    uncompiled = eager_results(workload, seed)
    loss = compiled_loss
    compiled = {False: loss(workload, in_order)}
    try:
        plain = results_of(workload, compiled[False], seed)
    except GraphBreakError:
        loss = parted_loss
        compiled[False] = loss(workload, in_order)
        plain = results_of(workload, compiled[False], seed)
    bare = None
    if eager is not None:
        bare = parts_of(workload, progress)
        apply(workload.model, eager)
        loss, steps = parted_loss, 0
    compiled[True] = loss(workload, planned_backend)
    first = {False: plain, True: results_of(workload, compiled[True], seed)}
    chosen = planned_step(planned_backend, bare)
    remove(workload.model)
    chance = repeated(
        first[True].values,
        plain.values,
        lambda: values_of(workload, compiled[False], seed),
        progress,
    )
    seconds = _seconds(workload, compiled, steps, seed)
    rounding = rounding_of(amp)
    given = workload, first, uncompiled, seed
    apart = _apart(*given, lambda one: loss(one, in_order), rounding, chance)
    return _judge(chosen, first, apart, seconds, rounding, chance), chosen.plan


@dataclass(frozen=True)
class _Apart:
    """Largest differences of the planned step, without what is rounding alone."""

    from_unplanned: float
    from_eager: float | None
    rounding_alone: tuple[str, ...]


def _apart(
    workload: Workload,
    first: dict[bool, Results],
    eager: Results | None,
    seed: int,
    compiled: Callable[[Workload], Callable[[], torch.Tensor]] | None = None,
    rounding: float = ROUNDING,
    chance: Chance = CERTAIN,
) -> _Apart:
    """Compare; where much differs, an exact step decides, compiled if it draws."""
    draws = eager is None
    loss_of = compiled if draws else (lambda w: lambda: loss_of_model(w.model, w))
    found = first[True].values
    others = [first[False].values] + ([] if eager is None else [eager.values])
    far = [differences(found, other) for other in others]
    for one in far:
        one.pop("random state", None)
    for name in chance.equal | chance.as_near:
        far[0].pop(name, None)
    exact = None
    doubtful = {name for one in far for name, by in one.items() if by > rounding}
    if doubtful and loss_of is not None:
        exact = in_float64(
            workload, lambda one: results_of(one, loss_of(one), seed).values
        )
    if draws and exact and not same_draws(first[False].values, exact, doubtful):
        exact = None
    settled: set[str] = set()
    if exact is not None:
        for one, other in zip(far, others, strict=True):
            here = [name for name, by in one.items() if by > rounding]
            alone = rounding_alone(here, found, other, exact)
            for name in alone:
                del one[name]
            settled |= alone
    largest = [max(one.values(), default=0.0) for one in far]
    from_eager = largest[1] if eager is not None else None
    return _Apart(largest[0], from_eager, tuple(sorted(settled)))


def _seconds(
    workload: Workload,
    compiled: dict[bool, Callable[[], torch.Tensor]],
    steps: int,
    seed: int,
) -> dict[bool, list[float]]:
    """Seconds of steps with and without the plan, by turns."""
    found: dict[bool, list[float]] = {False: [], True: []}
    on_card = place_of(workload).type == "cuda"
    finish = torch.cuda.synchronize if on_card else lambda: None
    for number in range(steps):
        for planned in (False, True) if number % 2 else (True, False):
            workload.model.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            finish()
            begin = time.perf_counter()
            compiled[planned]().backward()
            finish()
            found[planned].append(time.perf_counter() - begin)
    return found


def _judge(
    chosen: PlannedStep,
    first: dict[bool, Results],
    apart: _Apart,
    seconds: dict[bool, list[float]],
    rounding: float,
    chance: Chance,
) -> CompiledVerification:
    apart_names = names_apart(first[True].values, first[False].values)
    different = [name for name in apart_names if name not in chance.equal]
    held_bytes, budget_bytes = chosen.held_bytes, chosen.plan.budget_bytes
    measured_bytes = held_bytes + first[True].peak_bytes
    medians = {k: statistics.median(v) if v else None for k, v in seconds.items()}
    ratios = [p / u for p, u in zip(seconds[True], seconds[False], strict=True)]

    def equal(kind: str) -> bool:
        return not any(name.startswith(kind) for name in different)

    return CompiledVerification(
        budget_bytes=budget_bytes,
        fits=budget_bytes is None or measured_bytes <= budget_bytes,
        graphs=chosen.graphs,
        uncompiled_bytes=chosen.uncompiled_bytes,
        replayed_peak_bytes=chosen.peak_bytes,
        measured_peak_bytes=measured_bytes,
        unplanned_replayed_peak_bytes=chosen.unplanned_peak_bytes,
        unplanned_measured_peak_bytes=held_bytes + first[False].peak_bytes,
        loss_equal=equal("loss"),
        gradients_equal=equal("gradient"),
        buffers_equal=equal("buffer"),
        random_state_equal=equal("random state"),
        different=tuple(different[:_MOST_NAMES]),
        largest_difference=apart.from_unplanned,
        rounding=rounding,
        largest_difference_from_eager=apart.from_eager,
        rounding_alone=apart.rounding_alone,
        unplanned_differences=dict(sorted(chance.apart.items())),
        predicted_overhead=chosen.overhead,
        overhead=statistics.median(ratios) - 1 if ratios else None,
        step_seconds=medians[True],
        unplanned_step_seconds=medians[False],
    )
