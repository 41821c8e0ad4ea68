"""Measure a short run of steps on this machine, with plans and without.

Three steps run in turns in this process: unplanned; with every layer as a program that
keeps nothing; and with programs that keep what is dear to recompute. Each has its own
model and optimizer. What they take fits the costs of the graph (``in_step.py``). With
one thread, seconds are CPU seconds of the process, of which other programs take none.
With several, they are seconds of the wall, and a busy machine is refused.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ckplan import units
from ckplan.applying import apply, status
from ckplan.available import available_bytes
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe
from ckplan.simulating.recomputing import num_followed, num_recorded
from ckplan.simulating.simulate import Simulator
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import CostCache
from ckplan.tracing.costs.spread import machine_load, standard_error, undisturbed
from ckplan.tracing.steps.first_steps import WARM_STEPS, take_first_steps
from ckplan.tracing.steps.fitting import Added, fit
from ckplan.tracing.steps.in_step import (
    StepCosts,
    StepSeconds,
    keep_phases,
    keep_step_costs,
    known_phases,
    known_step_costs,
    with_step_costs,
)
from ckplan.tracing.steps.ops_in_step import (
    OpSeconds,
    again_factor,
    factors_of,
    time_ops,
)
from ckplan.tracing.steps.trial_plans import trial_plans
from ckplan.training.failures import first_line
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.training.workload import Workload

NOTE_NOT_IN_STEP = "seconds: not measured in a step: "
SHORTEST_SECONDS = 0.02  # shorter steps are not measured unless asked
LONGEST_SECONDS = 5.0  # of all steps together, unless asked
MOST_ERROR = 0.05  # standard error of an overhead, as a fraction of the step
MOST_RELATIVE_ERROR = 0.1  # of the overhead itself, if that is more
_ENOUGH = 0.003  # a standard error that needs no more rounds
_LEAST_ROUNDS = 3
_UNPLANNED_ROUNDS = 10
_LOOK_EVERY = 5  # rounds
_LIMITS = (15, LONGEST_SECONDS / 2)  # rounds, and seconds of them all
_LIMITS_ASKED = (60, 30.0)
_SLOWER_WARM = 2.0  # steps that are recorded take longer
_LEAST_WIDTH = 2e-3  # of what a plan adds, as a fraction of the step


_Phases = tuple[float, float, float]  # seconds: forward, backward, optimizer
_Round = list[_Phases]  # of the unplanned step, and of each with a plan


class NotMeasuredError(Exception):
    """Why steps were not measured, in words."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to take the step."""

    regions: tuple[Region, ...]
    step: TrainingStep


def with_seconds_in_step(
    graph: Graph,
    build: Callable[[], Workload],
    training: Training,
    cache: CostCache,
    *,
    asked: bool = False,
    progress: Progress | None = None,
) -> Graph:
    """Take the seconds of real steps into a graph, kept ones or new ones.

    Arguments are those of ``measure_step``, with the cost cache of the CPU. If steps
    cannot be measured, only a note is added.
    """
    known = known_step_costs(graph, cache)
    if known is None:
        try:
            found = measure_step(graph, build, training, asked=asked, progress=progress)
        except NotMeasuredError as why:
            return replace(graph, notes=(*graph.notes, f"{NOTE_NOT_IN_STEP}{why}"))
        known = keep_step_costs(graph, found, cache)
    return with_step_costs(graph, known)


def phases_in_step(
    graph: Graph, build: Callable[[], Workload], training: Training, cache: CostCache
) -> StepSeconds | None:
    """Seconds of the phases of real steps without a plan, kept ones or new ones.

    Arguments are those of ``with_seconds_in_step``. None if steps cannot be measured.
    """
    known = known_phases(graph, cache)
    if known is not None:
        return known
    try:
        _check_worth(graph, training, 0, asked=False)
        with _steps_fail():
            way = _begin(graph, build, training, ())
            rounds = [_timed(way.step) for _ in range(_UNPLANNED_ROUNDS)]
    except NotMeasuredError:
        return None
    found = StepSeconds(*map(undisturbed, zip(*rounds, strict=True)))
    return keep_phases(graph, found, cache)


def measure_step(
    graph: Graph,
    build: Callable[[], Workload],
    training: Training,
    *,
    asked: bool = False,
    progress: Progress | None = None,
) -> StepCosts:
    """Take steps of a workload on the CPU, and fit the costs of its graph.

    Args:
        graph: The recorded step; ops and engine were measured alone.
        build: Makes its workload, on real tensors.
        training: Options of the step.
        asked: Whether to measure steps of any length.
        progress: Called with the progress.

    Raises:
        NotMeasuredError: The step is too short, too long or too large, it has no layer
            to recompute, it fails, or the machine is busy.
    """
    trials = trial_plans(graph)
    if not trials:
        raise NotMeasuredError("no layer can be recomputed")
    _check_worth(graph, training, len(trials), asked)
    tell = progress or (lambda what, done, total: None)
    tell("measuring steps", 0, 0)
    with _steps_fail():
        ways = [_begin(graph, build, training, one) for one in ((), *trials)]
        limits = _LIMITS_ASKED if asked else _LIMITS
        rounds = _take_turns(ways, *limits, tell)
        ops = [time_ops(way.step, _clock()) for way in ways[:2]]
    return _judged(graph, trials, rounds, ops)


@contextmanager
def _steps_fail() -> Iterator[None]:
    """A scope of real steps; what fails there means that they are not measured."""
    try:
        warm_up_vector_kernels()
        yield
    except NotMeasuredError:
        raise
    except Exception as error:
        raise NotMeasuredError(f"{type(error).__name__}: {first_line(error)}") from None
    finally:
        gc.collect()


def _check_worth(graph: Graph, training: Training, num_plans: int, asked: bool) -> None:
    """Refuse steps that cannot be taken, take too long, or share the machine."""
    load = machine_load()
    if load.is_high and torch.get_num_threads() > 1:
        raise NotMeasuredError(
            f"the machine is busy (load average {load.running:.1f}, {load.cores} cores)"
        )
    if training.predicted_only:
        raise NotMeasuredError(f"{training.optimizer} cannot train")
    steps = (1 + num_plans) * (_SLOWER_WARM * WARM_STEPS + _LEAST_ROUNDS)
    seconds = steps * graph.step_seconds
    if not asked and graph.step_seconds < SHORTEST_SECONDS:
        raise NotMeasuredError("the step is short")
    if not asked and seconds > LONGEST_SECONDS:
        raise NotMeasuredError(
            f"about {units.format_seconds(seconds)}, `--in-step` takes them"
        )
    kinds = graph.bytes_by_kind
    kept = sum(kinds[kind] for kind in ("parameter", "buffer", "optimizer", "gradient"))
    peak = Simulator(graph).run().peak_bytes
    if 2 * peak + num_plans * kept > available_bytes():
        raise NotMeasuredError("it is too large")


def _begin(
    graph: Graph,
    build: Callable[[], Workload],
    training: Training,
    regions: tuple[Region, ...],
) -> _Way:
    """Build a workload, apply a plan and take the first steps."""
    workload = build()
    if regions:
        apply(workload.model, Plan(regions=describe(graph, regions)))
    step, simulator = make_step(workload, training), Simulator(graph)
    views = [simulator.view(one.call, one.last) for one in regions]
    expected = graph.num_batches * sum(view.varies for view in views)
    if take_first_steps(step, workload.model if regions else None, expected):
        raise NotMeasuredError("a layer calls torch otherwise in each step")
    if regions and any(not one.runs for one in status(workload.model).regions):
        raise NotMeasuredError("a layer runs otherwise than in the trace")
    return _Way(regions, step)


def _take_turns(
    ways: Sequence[_Way], most: int, seconds: float, tell: Progress
) -> list[_Round]:
    """Rounds of steps, every second one in reverse, until they say enough."""
    rounds: list[_Round] = []
    begin = time.perf_counter()
    while len(rounds) < most:
        done = len(rounds)
        tell("measuring steps", done, most)
        turn = -1 if done % 2 else 1
        rounds.append([_timed(way.step) for way in ways[::turn]][::turn])
        if time.perf_counter() - begin > seconds:
            most = max(_LEAST_ROUNDS, done + 1)
        elif (done + 1) % _LOOK_EVERY == 0 and _say_enough(rounds):
            break
    return rounds


def _say_enough(rounds: Sequence[_Round]) -> bool:
    plans = range(1, len(rounds[0]))
    return all(standard_error(rounds, partial(_overhead, p)) < _ENOUGH for p in plans)


def _overhead(number: int, rounds: Sequence[_Round]) -> float:
    """Of the step with one of the plans."""
    unplanned, planned = (
        undisturbed([sum(one[way]) for one in rounds]) for way in (0, number)
    )
    return planned / unplanned - 1


def _added(number: int, rounds: Sequence[_Round]) -> float:
    """Seconds of forward and backward that one of the plans adds."""
    unplanned, planned = (
        undisturbed([sum(one[way][:2]) for one in rounds]) for way in (0, number)
    )
    return planned - unplanned


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _timed(step: TrainingStep) -> _Phases:
    """Seconds of forward, of backward, and of the optimizer with ``zero_grad``."""
    clock = _clock()
    phase, since = "optimizer", clock()
    seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)

    def enter(name: str) -> None:
        nonlocal phase, since
        now = clock()
        seconds[phase] += now - since
        phase, since = name, now

    replace(step, on_phase=enter).run()
    enter("")
    return seconds["forward"], seconds["backward"], seconds["optimizer"]


def _judged(
    graph: Graph,
    trials: Sequence[tuple[Region, ...]],
    rounds: Sequence[_Round],
    ops: Sequence[OpSeconds],
) -> StepCosts:
    """Fit the costs, if the rounds agree with each other."""
    phases = map(undisturbed, zip(*(one[0] for one in rounds), strict=True))
    known = StepCosts(StepSeconds(*phases), graph.engine, factors_of(graph, ops[0]))
    simulator, plans = Simulator(with_step_costs(graph, known)), []
    step = undisturbed([sum(one[0]) for one in rounds])
    for number, regions in enumerate(trials, 1):
        overhead = partial(_overhead, number)
        error = standard_error(rounds, overhead)
        if error > max(MOST_ERROR, MOST_RELATIVE_ERROR * abs(overhead(rounds))):
            raise NotMeasuredError(
                f"the machine is busy: {len(rounds)} rounds tell what a plan adds to "
                f"{units.format_percent(error)} of the step"
            )
        added = partial(_added, number)
        width = max(standard_error(rounds, added), _LEAST_WIDTH * step)
        parts = _parts(simulator, regions)
        plans.append(parts._replace(seconds=added(rounds), width_seconds=width))
    again = _again(simulator, trials[0], known.unplanned, ops)
    return replace(known, engine=fit(replace(graph.engine, again=again), plans))


def _again(
    simulator: Simulator,
    regions: tuple[Region, ...],
    unplanned: StepSeconds,
    ops: Sequence[OpSeconds],
) -> float:
    """Seconds of an op in backward, as a factor of its share of forward.

    The model's own Python is part of forward, but is not run again.
    """
    graph = simulator.graph
    steps = [op for region in regions for op in simulator.effect(region).steps]
    reruns = graph.num_batches * [graph.ops[op].name for op in steps]
    share = min(sum(ops[0].forward.values()) / unplanned.forward, 1.0)
    return share * (again_factor(ops[0], ops[1], reruns) or 1.0)


def _parts(simulator: Simulator, regions: tuple[Region, ...]) -> Added:
    """What a plan consists of in one step; its seconds are not known yet."""
    graph, batches = simulator.graph, simulator.graph.num_batches
    effects = [simulator.effect(region) for region in regions]
    views = [simulator.view(one.call, one.last) for one in regions]
    again = [op for effect in effects for op in effect.steps]
    saves = sum(len(view.saves) for view in views)
    followed = sum(map(num_followed, views, regions))
    recorded = sum(map(num_recorded, views, regions, effects))
    return Added(
        0.0,
        1.0,
        batches * sum(graph.critical_seconds[op] for op in again),
        batches * saves,
        batches * len(again),
        batches * len(regions),
        batches * followed,
        batches * recorded,
    )
