"""Measure a short run of steps on this machine, with plans and without.

Three steps run in turns in this process: unplanned; with every layer as a program that
keeps nothing; and with programs that keep what is dear to recompute. Each has its own
model and optimizer. What they take fits the costs of the graph (``in_step.py``). Rounds
end when they say enough. With one thread, seconds are CPU seconds of the process, of
which other programs take none. With several, they are seconds of the wall, and a busy
machine is refused.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ckplan import units
from ckplan.applying import apply, status
from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.plan import Plan
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe
from ckplan.simulating.recomputing import num_followed
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import can_recompute, find_repeated_layers
from ckplan.solving.menu import Menus
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import CostCache
from ckplan.tracing.costs.spread import machine_load, standard_error, undisturbed
from ckplan.tracing.steps.fitting import Added
from ckplan.tracing.steps.in_step import (
    StepCosts,
    StepSeconds,
    fitted_costs,
    keep_step_costs,
    known_step_costs,
    with_step_costs,
)
from ckplan.training.failures import first_line
from ckplan.training.free_memory import available_bytes
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.training.workload import Workload

NOTE_NOT_IN_STEP = "seconds: not measured in a step: "
SHORTEST_SECONDS = 0.02  # shorter steps are not measured unless asked
LONGEST_SECONDS = 5.0  # of all steps together, unless asked
MOST_ERROR = 0.025  # standard error of an overhead, as a fraction of the step
MOST_RELATIVE_ERROR = 0.1  # of the overhead itself, if that is more
_ENOUGH = 0.003  # a standard error that needs no more rounds
_WARM_STEPS = 2  # the first one is recorded
_LEAST_ROUNDS = 3
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
    _check_worth(graph, training, len(trials), asked)
    load = machine_load()
    if load.is_high and torch.get_num_threads() > 1:
        raise NotMeasuredError(
            f"the machine is busy (load average {load.running:.1f}, {load.cores} cores)"
        )
    tell = progress or (lambda what, done, total: None)
    tell("measuring steps", 0, 0)
    try:
        warm_up_vector_kernels()
        ways = [_begin(graph, build, training, one) for one in ((), *trials)]
        limits = _LIMITS_ASKED if asked else _LIMITS
        taken = _take_turns(ways, *limits, tell)
    except NotMeasuredError:
        raise
    except Exception as error:
        raise NotMeasuredError(f"{type(error).__name__}: {first_line(error)}") from None
    finally:
        gc.collect()
    return _judged(graph, trials, taken)


def trial_plans(graph: Graph) -> list[tuple[Region, ...]]:
    """Plans on every layer: nothing kept, and what is dear to recompute kept."""
    simulator = Simulator(graph)
    layers = find_repeated_layers(graph, Menus(simulator))
    layers = [one for one in layers if can_recompute(simulator, Region(one))]
    layers = layers or _calls_to_recompute(simulator, OUTSIDE_CALLS)
    if not layers:
        raise NotMeasuredError("no layer can be recomputed")
    nothing = tuple(Region(layer) for layer in layers)
    dear = tuple(Region(layer, save=_dear_outputs(graph, layer)) for layer in layers)
    kept = all(can_recompute(simulator, region) for region in dear)
    return [nothing, dear] if kept and dear != nothing else [nothing]


def _calls_to_recompute(simulator: Simulator, parent: int) -> list[int]:
    """The outermost calls inside a call that can be recomputed and save tensors."""
    found: list[int] = []
    for call in simulator.graph.children[parent]:
        if parent != OUTSIDE_CALLS and can_recompute(simulator, Region(call)):
            found += [call] if simulator.graph.saved_in(call) else []
        else:
            found += _calls_to_recompute(simulator, call)
    return found


def _dear_outputs(graph: Graph, layer: int) -> frozenset[tuple[int, int]]:
    """Outputs of the ops that take more seconds per byte than the layer as a whole."""
    call = graph.calls[layer]
    sizes = {
        op: sum(graph.storages[s].bytes for s in graph.creates[op])
        for op in range(call.start, call.stop)
    }
    seconds = graph.critical_seconds
    whole = sum(seconds[op] for op in sizes) / max(sum(sizes.values()), 1)
    dear = [op for op, size in sizes.items() if size and seconds[op] > whole * size]
    return frozenset((op, n) for op in dear for n in range(len(graph.ops[op].outputs)))


def _check_worth(graph: Graph, training: Training, num_plans: int, asked: bool) -> None:
    """Refuse steps that cannot be taken, or take too long."""
    if training.predicted_only:
        raise NotMeasuredError(f"{training.optimizer} cannot train")
    steps = _SLOWER_WARM * _WARM_STEPS + _LEAST_ROUNDS
    seconds = (1 + num_plans) * steps * graph.step_seconds
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
    step = make_step(workload, training)
    for _ in range(_WARM_STEPS):
        step.run()
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
        undisturbed([one[way][0] + one[way][1] for one in rounds])
        for way in (0, number)
    )
    return planned - unplanned


def _timed(step: TrainingStep) -> _Phases:
    """Seconds of forward, of backward, and of the optimizer with ``zero_grad``."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
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
    graph: Graph, trials: Sequence[tuple[Region, ...]], rounds: Sequence[_Round]
) -> StepCosts:
    """Fit the costs, if the rounds agree with each other."""
    simulator, plans = Simulator(graph), []
    step = undisturbed([sum(one[0]) for one in rounds])
    for number, regions in enumerate(trials, 1):
        error = standard_error(rounds, partial(_overhead, number))
        most = max(MOST_ERROR, MOST_RELATIVE_ERROR * abs(_overhead(number, rounds)))
        if error > most:
            raise NotMeasuredError(
                f"the machine is busy: {len(rounds)} rounds tell what a plan adds to "
                f"{units.format_percent(error)} of the step"
            )
        added = partial(_added, number)
        width = max(standard_error(rounds, added), _LEAST_WIDTH * step)
        parts = _parts(simulator, regions)
        plans.append(parts._replace(seconds=added(rounds), width_seconds=width))
    unplanned = zip(*(one[0] for one in rounds), strict=True)
    return fitted_costs(graph, StepSeconds(*map(undisturbed, unplanned)), plans)


def _parts(simulator: Simulator, regions: tuple[Region, ...]) -> Added:
    """What a plan consists of in one step; its seconds are not known yet."""
    graph, batches = simulator.graph, simulator.graph.num_batches
    effects = [simulator.effect(region) for region in regions]
    views = [simulator.view(one.call, one.last) for one in regions]
    again = [op for effect in effects for op in effect.steps]
    saves = sum(len(view.saves) for view in views)
    followed = sum(map(num_followed, views, regions))
    return Added(
        0.0,
        1.0,
        batches * sum(graph.critical_seconds[op] for op in again),
        batches * saves,
        batches * len(again),
        batches * len(regions),
        batches * followed,
    )
