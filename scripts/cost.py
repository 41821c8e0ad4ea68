"""Proves what freeing activations of a workload costs, beside everyday practice.

The workload as ``configs/workloads`` builds it, trained with AdamW on the CPU (GPT-2:
12 layers, 384 wide, a batch of 8 x 256 tokens, dropout). A budget is the unplanned peak
less a share of the activation bytes. For every share, our plan stands beside the one
that reruns as many whole layers as the budget needs; at the end, every layer is rerun.
All train in processes of their own, one step each in every round, six and the unplanned
one at a time. The first two rounds are dropped, and all is repeated in fresh processes,
since some get slower memory than others; the measured overhead is the median over
rounds of a step's seconds, divided by those of the unplanned step of the same round,
and the quartiles are of the same ratios. "At best" divides the fastest steps of all.
"Bits equal" compares the losses, gradients, buffers and random states of two steps with
those of unplanned ones.

The C library gives memory back to the system and gets it again, empty, in every step;
the more a step needs, the more that costs, which no prediction has. `--keep-memory`
lets all processes keep what they had once. Where other machines share the cores, an op
waits for the slowest of its threads: `--threads 1` profiles and measures with one.

    python scripts/cost.py gpt2 --plain
    python scripts/cost.py gpt2 --keep-memory --threads 1
    python scripts/cost.py vit --shares 0.5 --repeats 1 --set layers=4

Exit code 1 if a plan of ours does not fit, computes something else, has a predicted
peak that is off by more than 2 %, a predicted step that is off by more than 10 %, a
predicted overhead that is off by more than 2 points, or if on GPT-2 it costs more than
3, 8 and 14 % of the step to free 50, 70 and 80 %, or without encodings 6, 17 and 25 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import _in_turns as in_turns
import _measuring as measuring
from _variants import OURS, PLAIN, Variant, choose

from ckplan.graph.graph import Graph
from ckplan.plan.resolve import resolve
from ckplan.report.progress import ProgressLine
from ckplan.simulating.simulate import Simulator
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.units import format_bytes, format_seconds
from ckplan.verifying.compare_steps import differing_results

HEADERS = (
    "step",
    "freed",
    "budget",
    "predicted peak",
    "measured peak",
    "error",
    "fits",
    "bits equal",
    "bound",
    "predicted step",
    "measured step",
    "predicted overhead",
    "measured overhead",
    "quartiles",
    "at best",
)
PROFILES = 3  # before the first step
MOST_TOGETHER = 6  # beside the unplanned step
LIMITS = {  # workload -> plan -> share freed -> most overhead
    "gpt2": {
        OURS: {0.5: 0.03, 0.7: 0.08, 0.8: 0.14},
        PLAIN: {0.5: 0.06, 0.7: 0.17, 0.8: 0.25},
    }
}
MOST_STEP_ERROR = 0.1  # of the predicted seconds of a step
MOST_OVERHEAD_ERROR = 0.02  # of the unplanned step
_percent = measuring.format_overhead


@dataclass(frozen=True)
class Outcome:
    """What one way to take the step did."""

    variant: Variant
    peak_bytes: int
    equal: bool
    seconds: tuple[float, ...]  # of its steps, by round
    unplanned_seconds: tuple[float, ...]

    def predicted_by(self, graph: Graph) -> Outcome:
        """The same, predicted by other seconds of the ops."""
        plan, now = self.variant.plan, Simulator(graph)
        timeline = now.run(resolve(plan, graph) if plan else ())
        return replace(self, variant=replace(self.variant, timeline=timeline))

    @property
    def fits(self) -> bool:
        """Whether the measured peak is within the budget, if there is one."""
        budget_bytes = self.variant.budget_bytes
        return budget_bytes is None or self.peak_bytes <= budget_bytes

    @property
    def step_seconds(self) -> float:
        """The median over rounds."""
        return statistics.median(self.seconds)

    @property
    def overheads(self) -> list[float]:
        """Of every round."""
        return list(map(_overhead, self.seconds, self.unplanned_seconds))

    @property
    def overhead(self) -> float:
        """The median over rounds."""
        return statistics.median(self.overheads)

    @property
    def least_overhead(self) -> float:
        """Of the fastest step over the fastest unplanned one."""
        return _overhead(min(self.seconds), min(self.unplanned_seconds))

    @property
    def predicted_seconds(self) -> float:
        """Of the whole step."""
        timeline = self.variant.timeline
        return timeline.graph.step_seconds * (1 + timeline.overhead)

    def cells(self) -> list[str]:
        """The row of the table."""
        variant, timeline = self.variant, self.variant.timeline
        budget_bytes, bound = variant.budget_bytes, variant.bound_overhead
        return [
            variant.name,
            "" if variant.share is None else f"{variant.share:.0%}",
            "" if budget_bytes is None else format_bytes(budget_bytes),
            format_bytes(timeline.peak_bytes),
            format_bytes(self.peak_bytes),
            measuring.format_error(timeline.peak_bytes, self.peak_bytes),
            "" if budget_bytes is None else "yes" if self.fits else "**no**",
            "yes" if self.equal else "**no**",
            "" if bound is None else _percent(bound),
            format_seconds(self.predicted_seconds),
            format_seconds(self.step_seconds),
            *(self._costs() if variant.plan else [""] * 4),
        ]

    def _costs(self) -> list[str]:
        low, _, high = statistics.quantiles(self.overheads, n=4, method="inclusive")
        return [
            _percent(self.variant.timeline.overhead),
            _percent(self.overhead),
            f"{_percent(low)} to {_percent(high)}",
            _percent(self.least_overhead),
        ]

    def broken(self, limits: Mapping[str, Mapping[float, float]]) -> Iterator[str]:
        """What of the claim does not hold."""
        variant, timeline = self.variant, self.variant.timeline
        where = variant.name
        if not variant.ours and variant.plan is not None:
            return
        if variant.share is not None:
            where += f" that frees {variant.share:.0%}"
            limit = limits.get(variant.name, {}).get(variant.share)
            if limit is not None and self.overhead > limit:
                most = _percent(limit)
                yield f"{where}: it costs {_percent(self.overhead)}, more than {most}"
        if not self.fits:
            yield f"{where}: the measured peak is over the budget"
        if not self.equal:
            yield f"{where}: it does not compute the same bits"
        peaks = timeline.peak_bytes, self.peak_bytes
        if abs(measuring.relative_error(*peaks)) > measuring.MOST_ERROR:
            error = measuring.format_error(*peaks)
            yield f"{where}: the predicted peak is off by {error}"
        off = self.predicted_seconds / self.step_seconds - 1
        if abs(off) > MOST_STEP_ERROR:
            yield f"{where}: the predicted step is off by {_percent(off)}"
        points = timeline.overhead - self.overhead
        if abs(points) > MOST_OVERHEAD_ERROR:
            yield f"{where}: the predicted overhead is off by {_percent(points)}"


def main() -> int:
    """Plan, measure and report."""
    args = _arguments()
    spec = in_turns.spec_of(args)
    with in_turns.own_cache():
        for _ in range(PROFILES):
            graph = _profile(spec)
        measuring.say("solving")
        variants, notes = choose(graph, args.shares, plain=args.plain)
        outcomes = measure(spec, variants, args.rounds, args.repeats)
        graph = _profile(spec)
    outcomes = [outcome.predicted_by(graph) for outcome in outcomes]
    limits = {} if args.settings else LIMITS.get(args.workload, {})
    report = measuring.Report(
        name=in_turns.name_of("cost", args),
        title=f"What freeing activations of {args.workload} costs",
        doc=__doc__,
        parts=[
            measuring.make_table(HEADERS, [one.cells() for one in outcomes]),
            f"{in_turns.explain(graph, args)} The bound is of any schedule of the same "
            "ops within the budget, by predicted seconds.",
            *notes,
        ],
        broken=[line for outcome in outcomes for line in outcome.broken(limits)],
    )
    return measuring.finish(report, args)


def _profile(spec: WorkloadSpec) -> Graph:
    """Measure the ops once more; of the last five times the median counts.

    The speed of a machine changes with the hour: so before, between and after the steps
    that are measured, and what was kept of other days does not count.
    """
    with ProgressLine(sys.stderr) as progress:
        return profile_workload(spec, fresh=True, progress=progress)


# -- measuring ---------------------------------------------------------------------


def measure(
    spec: WorkloadSpec, variants: Sequence[Variant], rounds: int, repeats: int
) -> list[Outcome]:
    """Measure a few ways at a time, since each process keeps its memory."""
    unplanned, *others = variants
    outcomes: list[Outcome] = []
    for place in range(0, len(others), MOST_TOGETHER):
        group = unplanned, *others[place : place + MOST_TOGETHER]
        outcomes += _measure_together(spec, group, rounds, repeats)[bool(place) :]
    return outcomes


def _measure_together(
    spec: WorkloadSpec, variants: Sequence[Variant], rounds: int, repeats: int
) -> list[Outcome]:
    """Take steps in every way, in turns, and all of it again in fresh processes."""
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(repeats):
        _profile(spec)
        plans = [variant.plan for variant in variants]
        first, timed = in_turns.take_turns(spec, plans, rounds)
        for found, taken in zip(seconds, timed, strict=True):
            found += taken
    different = [differing_results((first[0], steps)) or () for steps in first]
    for variant, results in zip(variants, different, strict=True):
        if results:
            some = "; ".join(map(str, results[:5]))
            measuring.say(f"{variant.name}: {len(results)} results differ: {some}")
    return [
        Outcome(
            variant,
            found.peak_bytes,
            not results,
            tuple(taken),
            tuple(seconds[0]),
        )
        for variant, found, results, taken in zip(
            variants, first, different, seconds, strict=True
        )
    ]


def _overhead(seconds: float, unplanned_seconds: float) -> float:
    return seconds / unplanned_seconds - 1


def _arguments() -> argparse.Namespace:
    parser = in_turns.make_parser(__doc__, (0.5, 0.7, 0.8))
    parser.add_argument(
        "--plain", action="store_true", help="our plans without encodings, too"
    )
    return in_turns.parse(parser)


if __name__ == "__main__":
    measuring.run(main)
