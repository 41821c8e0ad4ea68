"""Proves what the engine itself costs, beside what torch offers for the same.

GPT-2 with 12 layers, 384 wide, a batch of 8 x 256 tokens, dropout and AdamW, on the
CPU. Every way to take the step trains in a process of its own, one step each in every
round; ratios are medians over rounds of a step's seconds, divided by those of another
way in the same round. Half of the activation bytes are to be freed: the budget is the
unplanned peak less that. Of torch's selective contexts, every policy is put on as few
layers as its measured peak needs to be within the budget.

What the engine does beside running ops takes less than steps differ by themselves. So
it is timed where tensors are tiny, and divided by the seconds of the whole step, or
forward. Beside large tensors, Python finds less in the processor's cache and takes
longer: predicted overheads have that.

Then the same for one layer of four families of models, in microseconds of the thread:
unplanned, and what torch's checkpoint and every way of the engine add to it.

    python scripts/engine_cost.py
    python scripts/engine_cost.py --layers     # of the four families alone; a minute
    python scripts/engine_cost.py --rounds 3 --set layers=2 --set length=64

Exit code 1 if a program that saves nothing adds more than 0.55 of what torch's
checkpoint adds to a layer, or a re-run region more than 1.15; if the engine takes more
than 2 % of the step in a re-run region, beyond torch's checkpoint by hand, more than
1 % in a program that rebuilds nothing or in forwards without gradients; or if the plan
is not 10 points cheaper than the best policy.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import _engine_layers
import _measuring as measuring
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ckplan.applying import apply, remove
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import name_ops
from ckplan.report.progress import ProgressLine
from ckplan.simulating.simulate import simulate
from ckplan.solving.solve import solve, to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.units import format_bytes
from ckplan.verifying.step_process import StepProcess, interleave

DROPPED_ROUNDS = 2
TINY = {"batch": 1, "length": 8, "width": 24}
TINY_ROUNDS = 60
LAYER_ROUNDS = 20
MOST_OF_RERUN, MOST_OF_PROGRAM, MOST_WITHOUT_GRADIENTS = 0.02, 0.01, 0.01
LEAST_AHEAD = 0.10

aten = torch.ops.aten
_LINEAR = (aten.mm.default, aten.addmm.default)
_MATMULS = (*_LINEAR, aten.bmm.default, aten.baddbmm.default)
_ATTENTION = (
    aten._softmax.default,
    aten._safe_softmax.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
POLICIES = {
    "linear layers": _LINEAR,
    "matmuls": _MATMULS,
    "matmuls and attention": (*_MATMULS, *_ATTENTION),
    "every second matmul": None,
}


# -- workloads by hand, each for a process of its own --------------------------------


def by_hand(*, policy: str = "", count: int = -1, **options: Any) -> tuple[Any, Any]:
    """GPT-2 with the first layers checkpointed, under a policy if one is named."""
    spec = WorkloadSpec(measuring.location_of("gpt2"), options)
    workload = spec.build()
    layers = workload.model.transformer.h
    how: dict[str, Any] = {"use_reentrant": False}
    if policy:
        how["context_fn"] = partial(_contexts, policy)
    for layer in layers[: count if count >= 0 else len(layers)]:
        layer.forward = partial(checkpoint, layer.forward, **how)
    return workload.model, workload.batch


def _contexts(policy: str) -> Any:
    saved = POLICIES[policy]
    if saved is not None:
        return create_selective_checkpoint_contexts(list(saved))
    seen: dict[bool, int] = defaultdict(int)

    def every_second(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func not in _MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[ctx.is_recompute] += 1
        even = seen[ctx.is_recompute] % 2 == 0
        save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        return save if even else again

    return create_selective_checkpoint_contexts(every_second)


# -- ways to take the step -----------------------------------------------------------
_percent = measuring.format_overhead


@dataclass(frozen=True)
class Way:
    """One way to take the step."""

    name: str
    spec: WorkloadSpec
    plan: Plan | None = None
    predicted: float | None = None  # overhead, of its recomputed ops alone


@dataclass(frozen=True)
class Outcome:
    """What it did."""

    way: Way
    peak_bytes: int
    seconds: tuple[float, ...]  # by round


def choose(
    graph: Graph, spec: WorkloadSpec, budget_bytes: int, num_layers: int
) -> list[Way]:
    """What does not have to be searched for: unplanned, re-run, kept, and our plan."""
    layers = f"transformer.h.[0..{num_layers - 1}]"
    first = next(i for i, c in enumerate(graph.calls) if c.fqn == "transformer.h.0")
    everything = tuple(name_ops(graph, first))
    found = solve(graph, budget_bytes)
    ops_overhead = found.timeline.overhead - found.timeline.engine_overhead
    hand = WorkloadSpec(f"{__file__}:by_hand", spec.options)
    return [
        Way("unplanned", spec),
        Way("checkpoint by hand", hand),
        Way("by: rerun", spec, Plan(regions=(PlannedRegion(layers, "rerun"),))),
        Way(
            "program that rebuilds nothing",
            spec,
            Plan(regions=(PlannedRegion(layers, save=everything),)),
            0.0,
        ),
        Way("our plan", spec, to_plan(graph, found), ops_overhead),
    ]


def search(spec: WorkloadSpec, budget_bytes: int, num_layers: int) -> Iterator[Way]:
    """Every policy, on as few layers as fit the budget."""
    for policy in POLICIES:
        low, high = 1, num_layers + 1  # one more than all: it does not fit
        while low < high:
            count = (low + high) // 2
            measuring.say(f"{policy}: {count} of {num_layers} layers")
            options = {**spec.options, "policy": policy, "count": count}
            way = Way(
                f"{policy} saved, {count} of {num_layers} layers",
                WorkloadSpec(f"{__file__}:by_hand", options),
            )
            if count <= num_layers and _peak(way) <= budget_bytes:
                high, best = count, way
            else:
                low = count + 1
        if low <= num_layers:
            yield best
        else:
            measuring.say(f"{policy}: does not fit")


def _peak(way: Way) -> int:
    with StepProcess(way.spec, way.plan, seed=measuring.SEED) as process:
        return process.first_steps().peak_bytes


def measure(ways: Sequence[Way], rounds: int, repeats: int) -> list[Outcome]:
    """Take steps in every way, in turns, and all of it again in fresh processes."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats):
        with ExitStack() as running, ProgressLine(sys.stderr) as progress:
            processes = [
                running.enter_context(
                    StepProcess(way.spec, way.plan, seed=measuring.SEED)
                )
                for way in ways
            ]
            peaks = [process.first_steps().peak_bytes for process in processes]
            timed = interleave(processes, rounds, progress)
            for found, new in zip(seconds, timed, strict=True):
                found += new[DROPPED_ROUNDS:]
    outcomes = zip(ways, peaks, seconds, strict=True)
    return [Outcome(way, peak, tuple(taken)) for way, peak, taken in outcomes]


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds, less one."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True)) - 1


def alone(ways: Sequence[Way]) -> list[float]:
    """Seconds that every second way takes beyond the one before, on tiny tensors."""
    tiny = [
        replace(way, spec=replace(way.spec, options={**way.spec.options, **TINY}))
        for way in ways
    ]
    taken = [one.seconds for one in measure(tiny, TINY_ROUNDS, 1)]
    return [
        statistics.median(b - a for a, b in zip(less, more, strict=True))
        for less, more in zip(taken[::2], taken[1::2], strict=True)
    ]


def without_gradients(spec: WorkloadSpec, plan: Plan) -> dict[str, float]:
    """What a plan costs where it has nothing to do, of a forward."""
    found = {}
    for mode in (torch.no_grad, torch.inference_mode):
        tiny = replace(spec, options={**spec.options, **TINY})
        extra = _forwards(tiny, plan, mode, TINY_ROUNDS)
        whole = _forwards(spec, plan, mode, 2)
        found[mode.__name__] = (extra[True] - extra[False]) / whole[False]
    return found


def _forwards(
    spec: WorkloadSpec, plan: Plan, mode: Callable[[], Any], rounds: int
) -> dict[bool, float]:
    """Median seconds of a forward, with the plan and without it, in turns."""
    torch.manual_seed(measuring.SEED)
    workload = spec.build()
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds + 2):
        on = bool((number + number // 2) % 2)
        (apply(workload.model, plan) if on else remove(workload.model))
        with mode():
            start = time.perf_counter()
            workload.model(**workload.batch)
            taken[on].append(time.perf_counter() - start)
    return {on: statistics.median(seconds[1:]) for on, seconds in taken.items()}


# -- reporting -----------------------------------------------------------------------


def main() -> int:
    """Measure and report."""
    args = _arguments()
    layers, broken = _engine_layers.layer_rows(LAYER_ROUNDS)
    table = measuring.make_table(_engine_layers.HEADERS, layers, texts=2)
    if args.layers:
        report = measuring.Report(
            name="engine_layers",
            title="What the engine adds to a layer",
            doc=_engine_layers.__doc__,
            parts=[table],
            broken=broken,
        )
        return measuring.finish(report, args)
    options = parse_options(args.settings)
    spec = WorkloadSpec(measuring.location_of("gpt2"), options)
    with ProgressLine(sys.stderr) as progress:
        graph = profile_workload(spec, fresh=True, progress=progress)
    freed_bytes = graph.bytes_by_kind["activation"] // 2
    budget_bytes = simulate(graph).peak_bytes - freed_bytes
    layers = {c.fqn for c in graph.calls if re.fullmatch(r"transformer\.h\.\d+", c.fqn)}
    num_layers = len(layers)
    ways = choose(graph, spec, budget_bytes, num_layers)
    ways += search(spec, budget_bytes, num_layers)
    unplanned, hand, rerun, kept, ours, *_ = ways
    extra = alone([hand, rerun, unplanned, kept])
    modes = without_gradients(spec, ours.plan or Plan())
    outcomes = measure(ways, args.rounds, args.repeats)
    report = _report(outcomes, extra, modes, budget_bytes, args)
    report = replace(
        report, parts=[*report.parts, table], broken=[*report.broken, *broken]
    )
    return measuring.finish(report, args)


def _report(
    outcomes: Sequence[Outcome],
    extra: Sequence[float],
    modes: dict[str, float],
    budget_bytes: int,
    args: argparse.Namespace,
) -> measuring.Report:
    unplanned, hand, rerun, kept, ours, *policies = outcomes  # as chosen
    rows = [
        [
            one.way.name,
            format_bytes(one.peak_bytes),
            _percent(ratio(one.seconds, unplanned.seconds)),
            "" if one.way.predicted is None else _percent(one.way.predicted),
        ]
        for one in outcomes
    ]
    by_rerun = ratio(rerun.seconds, hand.seconds)
    nothing_rebuilt = ratio(kept.seconds, unplanned.seconds)
    step = statistics.median(unplanned.seconds)
    again, nothing = (seconds / step for seconds in extra)
    cost = ratio(ours.seconds, unplanned.seconds)
    best = min((ratio(p.seconds, unplanned.seconds) for p in policies), default=None)
    assert ours.way.predicted is not None
    facts = [
        ["`by: rerun` over checkpoint by hand", _percent(by_rerun)],
        ["a program that rebuilds nothing", _percent(nothing_rebuilt)],
        [
            "engine of `by: rerun`, beyond torch's, of the step",
            _percent(again),
        ],
        [
            "engine of a program that rebuilds nothing, of the step",
            _percent(nothing),
        ],
        [
            "our plan beyond its ops, as predicted",
            _percent(cost - ours.way.predicted),
        ],
        ["our plan", _percent(cost)],
        [
            "best policy of selective contexts",
            (best and _percent(best)) or "none fits",
        ],
        *([f"engine under {m}, of the forward", _percent(r)] for m, r in modes.items()),
    ]
    checks = [
        (again <= MOST_OF_RERUN, "a re-run region costs more than checkpoint by hand"),
        (nothing <= MOST_OF_PROGRAM, "a program that rebuilds nothing is not free"),
        (best is None or best - cost >= LEAST_AHEAD, "the best policy is too near"),
        (max(modes.values()) <= MOST_WITHOUT_GRADIENTS, "forwards alone are not free"),
        (ours.peak_bytes <= budget_bytes, "our plan does not fit its budget"),
    ]
    headers = ("step", "measured peak", "measured overhead", "predicted, of its ops")
    note = (
        f"Budget: {format_bytes(budget_bytes)}. Fresh processes: {args.repeats} times, "
        f"{args.rounds} rounds in each, the first {DROPPED_ROUNDS} of them dropped."
    )
    return measuring.Report(
        name="engine_cost",
        title="What the engine itself costs",
        doc=__doc__,
        parts=[
            measuring.make_table(headers, rows),
            measuring.make_table(("what", "cost"), facts),
            note,
        ],
        broken=[what for holds, what in checks if not holds],
    )


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, settings=True)
    measuring.add_rounds(parser, rounds=8, repeats=3, dropped=DROPPED_ROUNDS)
    parser.add_argument(
        "--layers", action="store_true", help="layers of four families alone"
    )
    args = parser.parse_args()
    if args.rounds < DROPPED_ROUNDS + 1:
        parser.error(f"--rounds: at least {DROPPED_ROUNDS + 1}, not {args.rounds}")
    return args


if __name__ == "__main__":
    measuring.run(main)
