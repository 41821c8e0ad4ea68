"""Verify a plan: unplanned and planned steps side by side, each in its own process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ckplan.curve import PLANNED, UNPLANNED, Curves, curves_json
from ckplan.errors import CkplanError, WorkloadError
from ckplan.plan import Plan
from ckplan.resolve import describe
from ckplan.simulate import RERUN, Region, Simulator
from ckplan.solving.baselines import can_be_done, find_layers
from ckplan.solving.menu import Menus
from ckplan.tracing.target import find_target
from ckplan.training.step import Training
from ckplan.training.workload import WorkloadSpec
from ckplan.verifying.interleave import StepProcess, interleave, overhead_of
from ckplan.verifying.predicted import predict, side_by_side
from ckplan.verifying.worker import FirstSteps, OutOfMemoryError, Result

if TYPE_CHECKING:
    from ckplan.graph import Graph
    from ckplan.tracing.calibrate import Progress

NOTE_NOT_COMPARED = (
    "the unplanned step does not fit in memory: nothing to compare the results with"
)
NOTE_INSTEAD = (
    "the unplanned step does not fit in memory: compared with a step that runs every "
    "layer again, by the trace's account"
)
NOTE_NOT_TOGETHER = (
    "the unplanned and the planned process do not fit in memory together: not timed"
)
_MOST_NAMES = 10
_MOST_REPEATS = 2


@dataclass(frozen=True)
class Verification:
    """What planned steps did beside unplanned ones.

    What compares with the unplanned step is None where that one does not fit in memory,
    what is timed also where no timing was asked for, and what is predicted where the
    plan predicts nothing.
    """

    gradients_equal: bool | None  # equal means: the same bits, in both steps compared
    buffers_equal: bool | None
    loss_equal: bool | None
    random_state_equal: bool | None  # after the steps compared
    different: tuple[str, ...]  # the first results that differ
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    unplanned_measured_peak_bytes: int | None
    predicted_overhead: float | None
    step_seconds: float | None
    unplanned_step_seconds: float | None
    overhead: float | None
    budget_bytes: int | None
    fits: bool
    regions_ran: int
    regions_idle: tuple[str, ...]  # regions of the plan that never ran
    notes: tuple[str, ...] = ()
    curves: Curves = field(default_factory=dict)  # live bytes, predicted and measured

    @property
    def passed(self) -> bool:
        """Whether nothing differs and the measured peak is within the budget."""
        equal = (
            self.gradients_equal,
            self.buffers_equal,
            self.loss_equal,
            self.random_state_equal,
        )
        return self.fits and False not in equal

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for ``--json``."""
        plain = asdict(replace(self, curves={}))
        del plain["curves"]
        timeline = curves_json(self.curves)
        return {"passed": self.passed, **plain, "timeline": timeline}


def verify(
    spec: WorkloadSpec,
    plan: Plan | None,
    *,
    optimizer: str | None = None,
    amp: str | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: bool = False,
    device: str | None = None,
    cap_bytes: int | None = None,
    seed: int = 0,
    steps: int = 5,
    trace: Graph | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Take the same steps without a plan and with it, and compare.

    Args:
        spec: Where the workload comes from; each process builds its own.
        plan: What to verify; None compares the workload with itself.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``momentum``, ``adafactor``, ``none``
            or ``own``; by default the workload's own if it has one, else AdamW.
        amp: ``bf16`` or ``fp16``: forward and loss run under autocast.
        accumulate: Backwards before the optimizer takes a step.
        clip: Largest norm of all gradients together: ``clip_grad_norm_``.
        scaler: Whether the loss goes through a gradient scaler.
        device: Where the steps are taken, by default where the plan is for.
        cap_bytes: What a GPU may give: as if the card were a smaller one.
        seed: Of every random number.
        steps: How many steps of each are timed, in turns; 0 for none.
        trace: Of this workload: what predicts live bytes over the step, and knows the
            layers to run again where the unplanned step does not fit.
        progress: Told how far the work has come.

    Returns:
        What was found. A difference or a peak over the budget is no exception.

    Raises:
        CkplanError: There is no such device here, or a cap on what has none.
        OutOfMemoryError: The planned step does not fit in memory.
        CkplanError: The workload or the plan cannot be used, or a step fails.
    """
    tell = progress or (lambda what, done, total: None)
    training = Training(optimizer, amp, accumulate, clip, scaler)
    if training.predicted_only:
        raise WorkloadError(
            f"cannot train with '{optimizer}': its memory is only predicted",
            needed="an optimizer that trains, like the workload's own",
            hint="--fake, which looks at memory alone",
        )
    here = device_here(device, plan)
    _check_cap(cap_bytes, here)

    def start(chosen: Plan | None) -> StepProcess:
        return StepProcess(spec, chosen, training, seed, here, cap_bytes)

    def instead() -> StepProcess | None:
        everything = every_layer(trace) if trace is not None else None
        return None if everything is None else start(everything)

    with ExitStack() as running:
        pair = _Pair([partial(start, None), partial(start, plan)], instead, running)
        reference, planned = pair.first_steps(tell)
        unplanned_seconds, seconds = pair.seconds(steps, tell)
    unplanned = reference if pair.fits else None
    predicted, said = predict(trace, plan, training, planned.fingerprint)
    found = _judge(
        plan,
        (unplanned, planned),
        _different(reference, planned),
        (unplanned_seconds, seconds),
        (*pair.notes, *said),
    )
    both = ((UNPLANNED, unplanned), (PLANNED, planned))
    measured = {which: one.curve for which, one in both if one and one.curve}
    return replace(found, curves=side_by_side(predicted=predicted, measured=measured))


def _check_cap(cap_bytes: int | None, device: str) -> None:
    if cap_bytes is not None and not device.startswith("cuda"):
        raise CkplanError(
            f"cannot cap the memory of {device}",
            needed="a GPU, whose allocator can be told how much there is",
            hint="--device cuda, or no cap: the peak is measured against the budget",
        )


def every_layer(trace: Graph) -> Plan | None:
    """Everyday practice as a plan: every layer is run again, as far as it can be."""
    simulator = Simulator(trace)
    layers = find_layers(trace, Menus(simulator))
    regions = [Region(layer, RERUN) for layer in layers]
    possible = [region for region in regions if can_be_done(simulator, region)]
    described = describe(trace, possible)
    return Plan(trace.model, regions=described) if described else None


def device_here(device: str | None, plan: Plan | None) -> str:
    """Where steps are taken: where they are asked for, or where the plan is for.

    Raises:
        CkplanError: This machine has no such device.
    """
    name = device or (plan.fingerprint.get("device") if plan else None) or "cpu"
    if not find_target(name, None).is_here:
        raise CkplanError(
            f"cannot take steps on {name}: this machine has no GPU",
            needed="the GPU that the plan is for",
            hint="ckplan verify --fake, which needs none",
        )
    return name


def _judge(
    plan: Plan | None,
    steps: tuple[FirstSteps | None, FirstSteps],
    different: tuple[Result, ...] | None,
    seconds: tuple[list[float], list[float]],
    notes: tuple[str, ...],
) -> Verification:
    """Put together what was predicted and what was seen, unplanned and planned."""
    unplanned, planned = steps
    unplanned_seconds, planned_seconds = seconds
    predicted = plan.predicted if plan else None
    budget_bytes = plan.budget_bytes if plan else None
    idle = tuple(call for call, runs in planned.runs if runs == 0)
    return Verification(
        gradients_equal=_equal("gradient", different),
        buffers_equal=_equal("buffer", different),
        loss_equal=_equal("loss", different),
        random_state_equal=_equal("random state", different),
        different=tuple(map(str, (different or ())[:_MOST_NAMES])),
        predicted_peak_bytes=predicted.peak_bytes if predicted else None,
        measured_peak_bytes=planned.peak_bytes,
        unplanned_measured_peak_bytes=unplanned.peak_bytes if unplanned else None,
        predicted_overhead=predicted.overhead if predicted else None,
        step_seconds=_median(planned_seconds),
        unplanned_step_seconds=_median(unplanned_seconds),
        overhead=(
            overhead_of(planned_seconds, unplanned_seconds)
            if unplanned_seconds
            else None
        ),
        budget_bytes=budget_bytes,
        fits=budget_bytes is None or planned.peak_bytes <= budget_bytes,
        regions_ran=len(planned.runs) - len(idle),
        regions_idle=idle,
        notes=notes,
    )


def _different(
    unplanned: FirstSteps | None, planned: FirstSteps
) -> tuple[Result, ...] | None:
    """Results that differ, in order; None if there is nothing to compare with."""
    if unplanned is None:
        return None
    old, new = unplanned.digests, planned.digests
    return tuple(key for key in {**old, **new} if old.get(key) != new.get(key))


def _equal(kind: str, different: tuple[Result, ...] | None) -> bool | None:
    if different is None:
        return None
    return all(result.kind != kind for result in different)


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def _chance(unplanned: Sequence[FirstSteps], planned: Sequence[FirstSteps]) -> str:
    """What to say of steps that are equal in some runs only."""
    runs, kinds = [], []
    for side in (unplanned, planned):
        runs.append(len(side))
        kinds.append(len({repr(sorted(one.digests.items())) for one in side}))
    return (
        f"the workload is not deterministic: {runs[0]} runs without the plan gave "
        f"{kinds[0]} different results and {runs[1]} with it {kinds[1]}; compared are "
        "two that agree"
    )


class _Pair:
    """An unplanned and a planned process; the latter alone where both are too much."""

    def __init__(
        self,
        sides: Sequence[Callable[[], StepProcess]],
        instead: Callable[[], StepProcess | None],
        running: ExitStack,
    ) -> None:
        """Start both; ``instead`` is what to compare with if the first is too much."""
        self.notes: list[str] = []
        self.fits = True  # the unplanned step does
        self._instead = instead
        self._sides = sides
        self._unplanned, self._planned = (
            running.enter_context(side()) for side in self._sides
        )
        self._together = True

    def first_steps(self, tell: Progress) -> tuple[FirstSteps | None, FirstSteps]:
        """First steps of both, one after the other; None if they do not fit.

        Kernels of torch on CPU are not always deterministic. Steps that differ are
        taken again in fresh processes, so that chance is told from a difference.
        """
        unplanned, planned = self._once(tell)
        if unplanned is None or not self.fits or unplanned.digests == planned.digests:
            return unplanned, planned
        seen = [[unplanned], [planned]]
        for side, start in [*enumerate(self._sides)] * _MOST_REPEATS:
            tell("results differ: stepping again", len(seen[0]) + len(seen[1]) - 2, 4)
            with start() as process:
                try:
                    seen[side].append(process.first_steps())
                except OutOfMemoryError:
                    break
            for without, with_plan in product(*seen):
                if without.digests == with_plan.digests:
                    self.notes.append(_chance(*seen))
                    return without, with_plan
        return unplanned, planned

    def _once(self, tell: Progress) -> tuple[FirstSteps | None, FirstSteps]:
        tell("stepping without the plan", 0, 2)
        unplanned: FirstSteps | None = None
        try:
            unplanned = self._unplanned.first_steps()
        except OutOfMemoryError:
            self.fits = False
            unplanned = self._other(tell)
            self._separate(NOTE_INSTEAD if unplanned else NOTE_NOT_COMPARED)
        tell("stepping with the plan", 1, 2)
        try:
            return unplanned, self._planned.first_steps()
        except OutOfMemoryError:
            if not self._together:
                raise
        self._separate(NOTE_NOT_TOGETHER)
        self._planned.start()
        return unplanned, self._planned.first_steps()

    def _other(self, tell: Progress) -> FirstSteps | None:
        """First steps of what stands in for the unplanned one, if that fits."""
        self._unplanned.close()
        process = self._instead()
        if process is None:
            return None
        tell("stepping with every layer run again", 0, 2)
        with process:
            try:
                return process.first_steps()
            except CkplanError:  # it is too much as well, or the trace of another model
                return None

    def seconds(self, steps: int, tell: Progress) -> tuple[list[float], list[float]]:
        """Seconds of unplanned and planned steps, taken in turns."""
        if not self._together:
            return [], interleave([self._planned], steps, tell)[0]
        pair = [self._unplanned, self._planned]
        try:
            unplanned, planned = interleave(pair, steps, tell)
        except OutOfMemoryError:
            self._separate(NOTE_NOT_TOGETHER)
            return [], []
        return unplanned, planned

    def _separate(self, note: str) -> None:
        self._unplanned.close()
        self._together = False
        self.notes.append(note)
