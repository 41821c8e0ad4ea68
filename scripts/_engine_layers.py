"""What the engine adds to a layer of tiny tensors, in families of models.

Tensors are so small that kernels take no time, so the processor's own work is what is
measured: in seconds of the thread, of which other programs take none. All ways take
steps in turns in this process, each with a model of its own; figures are medians over
rounds of the seconds beyond the unplanned step's in the same round, per layer.

The last rows are what no engine in Python can do without, since torch calls it back for
every function and for every saved tensor. ``LEAST_CALLED``: a function mode looks at
nothing, and hooks number what is saved, as in all rows below: compiled code that
compares in no time would still take that. ``LEAST_WATCH``: it compares each function
with the one it expects. ``LEAST_GUARDS``: it compares arguments, too, by matchers that
are compiled for each call, and nothing else that could differ: a change of an argument
would give a wrong gradient. ``LEAST_AGAIN``: the ops that are rebuilt are called once
more, below autograd, from the random states of the forward, with their arguments at
hand, views of what is rebuilt made anew. The last two bound a program that notices what
differs. ``LEAST_CALLED_RERUN``, ``LEAST_RERUN``: forward runs again, from torch's
random state, with such a mode and such hooks in both runs, and nothing else that a
checkpoint does; ``LEAST_GUARDED_RERUN`` compares arguments in both: it bounds a rerun
that notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import _least_engines as least
import _measuring as measuring
from torch.utils.checkpoint import checkpoint

from ckplan.applying import apply
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import describe
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import find_repeated_layers
from ckplan.solving.menu import Menus
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.randomness import seed_everything
from ckplan.training.step import Training, TrainingStep, make_step

_TEXT = {"layers": 12, "width": 32, "heads": 4, "batch": 2, "length": 16, "vocab": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**_TEXT, "dropout": 0.1},
    "llama": {**_TEXT, "groups": 2},
    "bert": {**_TEXT, "dropout": 0.1},
    "resnet50": {"batch": 2, "size": 32},
}
STEP, BY_HAND, RERUN_ALL = "unplanned", "torch's checkpoint", "by: rerun"
NOTHING, EVERYTHING = "by: program, nothing saved", "by: program, everything saved"
LEAST_CALLED = "least: functions called, tensors numbered"
LEAST_WATCH = "least: functions compared, tensors numbered"
LEAST_AGAIN = "least: rebuilt ops alone"
LEAST_GUARDS = "least: functions and arguments compared, tensors numbered"
LEAST_CALLED_RERUN = "least: forward again, functions called in both"
LEAST_RERUN = "least: forward again, functions compared in both"
LEAST_GUARDED_RERUN = "least: forward again, arguments compared in both"
DROPPED_ROUNDS = 3
_LIMITS = {  # of checkpointing's total, and the ways whose sum is the least possible
    NOTHING: (0.55, (LEAST_GUARDS, LEAST_AGAIN)),
    RERUN_ALL: (1.15, (LEAST_GUARDED_RERUN,)),
}
HEADERS = ("layer of", "way", "forward us", "backward us", "of torch's checkpoint")
TRAINING = Training("none")

Seconds = tuple[float, float]  # of the thread: forward and backward


def layer_rows(rounds: int) -> tuple[list[list[str]], list[str]]:
    """The rows of all families, and what of the claim they break."""
    rows: list[list[str]] = []
    broken: list[str] = []
    for family, options in FAMILIES.items():
        measuring.say(f"layers of {family}")
        extra = per_layer(family, options, rounds)
        whole = sum(extra[BY_HAND])
        for way, seconds in extra.items():
            share = sum(seconds) / whole
            micro = [f"{1e6 * one:+.0f}" for one in seconds]
            shown = "" if way == STEP else f"{share:.2f}"
            rows.append([family, way, *micro, shown])
        for way, (most, parts) in _LIMITS.items():
            share = sum(extra[way]) / whole
            possible = sum(sum(extra[part]) for part in parts) / whole
            if share > most:
                broken.append(
                    f"{way} takes {share:.2f} of torch's checkpoint in layers of "
                    f"{family}; asked: {most}, least possible: {possible:.2f}"
                )
    return rows, broken


def per_layer(family: str, options: dict[str, Any], rounds: int) -> dict[str, Seconds]:
    """Seconds per layer of the unplanned step, and beyond it of all other ways."""
    spec = WorkloadSpec(measuring.location_of(family), options)
    graph = profile_workload(spec, training=TRAINING, replay=False, in_step=False)
    layers = find_repeated_layers(graph, Menus(Simulator(graph)))
    names = [graph.calls[layer].fqn for layer in layers]
    ways = {
        STEP: _step(spec, lambda model: None),
        BY_HAND: _step(spec, partial(_checkpoint, names)),
        RERUN_ALL: _planned(spec, graph, [Region(one, RERUN) for one in layers]),
        NOTHING: _planned(spec, graph, [Region(one) for one in layers]),
        EVERYTHING: _planned(
            spec, graph, [Region(one, save=_outputs(graph, one)) for one in layers]
        ),
        LEAST_CALLED: _step(spec, partial(least.watch, names, least.Called)),
        LEAST_WATCH: _step(spec, partial(least.watch, names, least.Compared)),
        LEAST_GUARDS: _step(spec, partial(least.watch, names, least.Guarded)),
        LEAST_AGAIN: _step(spec, partial(least.run_ops_again, graph, layers)),
        LEAST_CALLED_RERUN: _step(
            spec, partial(least.watch_twice, names, least.Called)
        ),
        LEAST_RERUN: _step(spec, partial(least.watch_twice, names, least.Compared)),
        LEAST_GUARDED_RERUN: _step(
            spec, partial(least.watch_twice, names, least.Guarded)
        ),
    }
    taken: dict[str, list[Seconds]] = {way: [] for way in ways}
    for number in range(rounds + DROPPED_ROUNDS):
        for way in reversed(ways) if number % 2 else ways:
            taken[way].append(_timed(ways[way]))
    kept = {way: found[DROPPED_ROUNDS:] for way, found in taken.items()}
    return {
        way: _beyond(found, kept[STEP] if way != STEP else None, len(layers))
        for way, found in kept.items()
    }


def _beyond(
    found: Sequence[Seconds], unplanned: Sequence[Seconds] | None, layers: int
) -> Seconds:
    less = [(0.0, 0.0)] * len(found) if unplanned is None else unplanned
    pairs = list(zip(found, less, strict=True))
    forward, backward = (median(a[i] - b[i] for a, b in pairs) / layers for i in (0, 1))
    return forward, backward


def _step(spec: WorkloadSpec, change: Callable[[Any], object]) -> TrainingStep:
    seed_everything(measuring.SEED)
    workload = spec.build()
    change(workload.model)
    return make_step(workload, TRAINING)


def _planned(spec: WorkloadSpec, graph: Graph, regions: list[Region]) -> TrainingStep:
    plan = Plan(regions=describe(graph, regions))
    return _step(spec, lambda model: apply(model, plan))


def _checkpoint(names: Sequence[str], model: Any) -> None:
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _outputs(graph: Graph, layer: int) -> frozenset[tuple[int, int]]:
    """Every output that a region on a layer can save."""
    call = graph.calls[layer]
    return frozenset(
        (op, number)
        for op in range(call.start, call.stop)
        for number in range(len(graph.ops[op].outputs))
    )


def _timed(step: TrainingStep) -> Seconds:
    marks: list[float] = []
    replace(step, on_phase=lambda phase: marks.append(time.thread_time())).run()
    forward, backward, end = marks
    return backward - forward, end - backward
