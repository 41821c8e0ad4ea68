"""What the engine adds to a layer of tiny tensors on this machine, for ``on_card``.

GPT-2 with 12 layers, 32 wide, 2 x 16 tokens and dropout: kernels take no time, so the
processor's own work is what is measured, launches included. Ways take steps in turns,
each in a process of its own; figures are medians over rounds of the seconds beyond the
unplanned step's in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _card_results import EngineRow
from _card_worker import CardProcess, at_once
from _measuring import ROOT, SEED, location_of
from torch.overrides import TorchFunctionMode

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import RERUN
from ckplan.plan.resolve import name_ops, resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training

TINY = {
    "layers": 12,
    "width": 32,
    "heads": 4,
    "batch": 2,
    "length": 16,
    "vocab": 64,
    "dropout": 0.1,
}
ROUNDS, DROPPED_ROUNDS = 40, 5
LAYER = "transformer.h.0"
BY_HAND = "torch's checkpoint"
RERUN_ALL = "by: rerun"
KEPT = "by: program, everything saved"
NOTHING_SAVED = "by: program, nothing saved"
STEP = "the unplanned step itself"

Seconds = tuple[float, float]  # forward and backward


@dataclass(frozen=True)
class Counts:
    """What one layer has of each."""

    layers: int
    calls: float  # of torch functions
    saved: float  # tensors
    rebuilt: float  # ops, where nothing is saved


def engine_rows(
    device: str, *, rounds: int = ROUNDS, settings: dict[str, Any] | None = None
) -> list[EngineRow]:
    """Measure every way.

    Args:
        device: Where the steps run.
        rounds: Steps of every way.
        settings: Options of GPT-2 other than those of ``TINY``.

    Raises:
        CkplanError: A step fails.
    """
    options = {**TINY, **(settings or {})}
    spec = WorkloadSpec(location_of("gpt2"), options)
    training = Training("none")
    graph = profile_workload(spec, training=training, device=device, replay=False)
    layers = f"transformer.h.[0..{options['layers'] - 1}]"
    place = next(i for i, call in enumerate(graph.calls) if call.fqn == LAYER)
    everything = tuple(name_ops(graph, place))
    by_hand = WorkloadSpec(str(ROOT / "scripts" / "engine_cost.py") + ":by_hand")
    ways = {
        STEP: (spec, None),
        BY_HAND: (WorkloadSpec(by_hand.target, options), None),
        RERUN_ALL: (spec, Plan(regions=(PlannedRegion(layers, RERUN),))),
        KEPT: (spec, Plan(regions=(PlannedRegion(layers, save=everything),))),
        NOTHING_SAVED: (spec, Plan(regions=(PlannedRegion(layers),))),
    }
    nothing = ways[NOTHING_SAVED][1]
    counts = count(graph, spec, nothing, options["layers"])
    with ExitStack() as running:
        processes = [
            running.enter_context(
                CardProcess(one, plan, training, seed=SEED, device=device)
            )
            for one, plan in ways.values()
        ]
        list(at_once(CardProcess.first_steps, processes))
        taken = in_turns(processes, rounds)
    return rows_of(dict(zip(ways, taken, strict=True)), counts)


def in_turns(processes: Sequence[CardProcess], rounds: int) -> list[list[Seconds]]:
    """Forward and backward seconds of every process and round."""
    taken: list[list[Seconds]] = [[] for _ in processes]
    for number in range(rounds + DROPPED_ROUNDS):
        order = list(zip(processes, taken, strict=True))
        for process, found in reversed(order) if number % 2 else order:
            found.append(process.phases()[:2])
    return [found[DROPPED_ROUNDS:] for found in taken]


def rows_of(taken: dict[str, Sequence[Seconds]], counts: Counts) -> list[EngineRow]:
    """Seconds per layer of every way, and per call, saved tensor and rebuilt op."""
    unplanned = taken[STEP]
    extra = {
        way: _beyond(found, unplanned, counts.layers) for way, found in taken.items()
    }
    step = [median(phase) / counts.layers for phase in zip(*unplanned, strict=True)]
    found = [EngineRow(STEP, *step)]
    for way, (forward, backward) in extra.items():
        if way == STEP:
            continue
        both, kept = forward + backward, sum(extra[KEPT])
        by_hand, is_kept = sum(extra[BY_HAND]), way == KEPT
        found.append(
            EngineRow(
                way,
                forward,
                backward,
                both / by_hand if by_hand > 0 else None,
                forward / counts.calls if is_kept else None,
                both / counts.saved if is_kept else None,
                (both - kept) / counts.rebuilt if way == NOTHING_SAVED else None,
            )
        )
    return found


def _beyond(
    found: Sequence[Seconds], unplanned: Sequence[Seconds], layers: int
) -> Seconds:
    pairs = list(zip(found, unplanned, strict=True))
    forward, backward = (
        median(one[phase] - other[phase] for one, other in pairs) / layers
        for phase in range(2)
    )
    return forward, backward


# -- counting ------------------------------------------------------------------------


def count(
    graph: Graph, spec: WorkloadSpec, nothing: Plan | None, layers: int
) -> Counts:
    """What a layer has of calls, saved tensors, and ops that a plan rebuilds."""
    assert nothing is not None
    timeline = simulate(graph, resolve(nothing, graph))
    saved = sum(_is_inside(graph, one.call, LAYER) for one in graph.saved)
    rebuilt = sum(len(effect.steps) for effect in timeline.effects)
    return Counts(layers, calls_of(spec, LAYER), saved, rebuilt / layers)


def _is_inside(graph: Graph, call: int, fqn: str) -> bool:
    """Whether a call is one of a module, or inside of one."""
    while call != OUTSIDE_CALLS:
        if graph.calls[call].fqn == fqn:
            return True
        call = graph.calls[call].parent
    return False


class _Calls(TorchFunctionMode):
    """Counts calls of torch functions."""

    def __init__(self) -> None:
        self.number = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def calls_of(spec: WorkloadSpec, fqn: str) -> int:
    """Calls of torch functions in the forward of a module, on the CPU."""
    workload = spec.build()
    calls, before = _Calls(), [0]
    found: list[int] = []
    module = workload.model.get_submodule(fqn)
    hooks = [
        module.register_forward_pre_hook(
            lambda *_: before.__setitem__(0, calls.number)
        ),
        module.register_forward_hook(lambda *_: found.append(calls.number - before[0])),
    ]
    with torch.no_grad(), calls:
        workload.model(**workload.batch)
    for hook in hooks:
        hook.remove()
    return found[0]
