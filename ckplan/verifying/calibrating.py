"""Fit the engine's costs to a verified step, for the profiles that follow.

A plan adds recomputed ops and the engine's own time to a step. The seconds of ops are
measured one by one, so what is measured beyond them is put down to the engine: its
costs per saved tensor and per recomputed op are multiplied by

    factor = (measured overhead * predicted step - predicted recomputation)
             / predicted engine

With these costs, the trace predicts the measured overhead of this plan. They are kept
in the cost cache of this device, torch and number of threads, for steps whose ops move
as many bytes. Where that says little about the engine, nothing is kept.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from ckplan import units
from ckplan.errors import CkplanError
from ckplan.graph.records import EngineCosts
from ckplan.tracing.costs.apply_overhead import keep_engine_costs, known_engine_costs
from ckplan.tracing.costs.cost_cache import cost_cache
from ckplan.verifying.timing import LEAST_ROUNDS, Quartiles

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.tracing.costs.cost_cache import CostCache
    from ckplan.verifying.phases import PhaseSeconds
    from ckplan.verifying.verify import Verification

LEAST_SHARE = 0.2  # of the engine in the predicted overhead
MOST_SPREAD = 0.5  # between the quartiles of the factor, relative to it
_NEAR = 1e-6  # trace files round


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a verified step says about the engine on this machine."""

    factor: Quartiles  # of the engine's costs in the trace
    engine: EngineCosts  # from now on: the median of the last calibrations


def check_calibration(trace: Graph | None, steps: int) -> Graph:
    """The trace, if a step could be calibrated with it.

    Raises:
        CkplanError: There is no trace, or there are too few timed steps.
    """
    if trace is None:
        _refuse(
            "there is no trace of this workload",
            "the trace that the plan was made from",
            "--trace FILE, from `ckplan profile`",
        )
    if steps < LEAST_ROUNDS:
        _refuse(
            f"{steps} timed steps have no spread",
            f"at least {LEAST_ROUNDS}",
            "--steps 20",
        )
    return trace


def calibrate(found: Verification, trace: Graph, device: str) -> Calibration:
    """Fit the engine's costs to a verification, and keep them in the cost cache.

    Args:
        found: A verification that passed, with timed steps and the trace's predictions.
        trace: That trace, profiled on this machine.
        device: Device of the steps.

    Raises:
        CkplanError: The machine was busy, the trace is of another machine, engine or
            workload, or the engine's part cannot be told from the rest; nothing is
            kept then.
    """
    factor = _factor(found)
    place = torch.device(device)
    cache, forward = cost_cache(place), trace.ops[: trace.num_forward]
    known = known_engine_costs(forward, place, cache)
    if not any(_equal(costs, trace.engine) for costs in known):
        _refuse(
            "the engine's costs in the trace are not those kept for this machine"
            + _told(cache),
            "a trace by this version on this machine, with its torch and threads",
            "ckplan profile, solve, then verify --calibrate again",
        )
    fitted = trace.engine.times(factor.median)
    kept = keep_engine_costs(fitted, forward, place, cache)
    if cache.notes:
        _refuse(
            "the costs could not be kept" + _told(cache),
            "a cost cache that can be read and written",
            "the variable CKPLAN_CACHE, which names its folder",
        )
    return Calibration(factor, kept)


def engine_factor(
    unplanned: PhaseSeconds, planned: PhaseSeconds, overhead: Quartiles
) -> Quartiles:
    """The factor of the engine's costs with which the trace predicts an overhead.

    Args:
        unplanned: Predicted seconds.
        planned: Predicted seconds, with an engine above zero.
        overhead: Measured, as a fraction of the unplanned step.
    """
    recomputation, engine = planned.recomputation_seconds, planned.engine_seconds
    assert engine and recomputation is not None, "internal error: no engine to fit"
    step = unplanned.total_seconds
    return Quartiles(*((part * step - recomputation) / engine for part in overhead))


def _factor(found: Verification) -> Quartiles:
    """The factor, if the verification says enough about the engine."""
    if found.timing_problem is not None:
        _refuse(
            f"time could not be measured: {found.timing_problem}",
            "a machine that does nothing else",
            "close other programs, or wait until they have ended",
        )
    phases = found.phases
    low_high, median = found.overhead_quartiles, found.overhead
    unplanned, planned = phases.predicted_unplanned, phases.predicted
    if low_high is None or median is None or unplanned is None or planned is None:
        _refuse(
            "there are no predicted or no measured seconds of both steps"
            + "".join(f" ({note})" for note in found.notes[:1]),
            "steps that fit in memory together, and their own trace",
            "--trace FILE, from `ckplan profile` of this workload",
        )
    recomputation = planned.recomputation_seconds or 0.0
    engine = planned.engine_seconds or 0.0
    if engine < LEAST_SHARE * (recomputation + engine) or not engine:
        _refuse(
            f"the engine is {units.format_seconds(engine)} of the "
            f"{units.format_seconds(recomputation + engine)} that the plan is "
            "predicted to add",
            f"at least {units.format_percent(LEAST_SHARE)} of it, to tell it from ops",
            "a smaller batch or model, whose ops take less time, on the same machine",
        )
    factor = engine_factor(
        unplanned, planned, Quartiles(low_high[0], median, low_high[1])
    )
    if factor.low <= 0:
        _refuse(
            "the plan adds less than the ops that it reruns are predicted to take",
            "seconds of ops that hold on this machine",
            "ckplan profile --fresh, solve, then verify --calibrate again",
        )
    if factor.high - factor.low > MOST_SPREAD * factor.median:
        _refuse(
            f"the engine takes {factor.low:.2f} to {factor.high:.2f} times what was "
            "predicted (quartiles)",
            f"quartiles at most {units.format_percent(MOST_SPREAD)} of it apart",
            "close other programs, or a step of which the engine is a larger part",
        )
    return factor


def _equal(one: EngineCosts, other: EngineCosts) -> bool:
    pairs = zip(astuple(one), astuple(other), strict=True)
    return all(math.isclose(a, b, rel_tol=_NEAR, abs_tol=1e-9) for a, b in pairs)


def _told(cache: CostCache) -> str:
    return "".join(f": {note}" for note in cache.notes[:1])


def _refuse(what: str, needed: str, hint: str) -> NoReturn:
    raise CkplanError(f"cannot calibrate: {what}", needed=needed, hint=hint)
