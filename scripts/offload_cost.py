"""Proves that moving activations to a file is no slower than recomputing them.

The workload as ``configs/workloads`` builds it, trained with AdamW on the CPU (GPT-2:
12 layers, 384 wide, a batch of 8 x 256 tokens, dropout). A budget is the unplanned peak
less a share of the activation bytes. For every share there are two plans: one that
recomputes alone, and one that may also move tensors to a file in ``--offload FOLDER``,
made for what moves to its disk cost beside kernels, measured just before. Where they
cost more than they save, the second plan moves nothing and is the first. The unplanned
step and both plans train in processes of their own, one step each in every round; the
first two rounds are dropped, and all is repeated in fresh processes. Overheads are
medians over rounds of a step's seconds, divided by those of the unplanned step of the
same round; "against recomputing" is the same ratio of the plan that moves to the one
that does not, with its quartiles. The bound is of any schedule that recomputes alone,
by predicted seconds.

    python scripts/offload_cost.py gpt2 --offload /tmp
    python scripts/offload_cost.py gpt2 --offload /tmp --keep-memory --threads 1
    python scripts/offload_cost.py gpt2 --offload /tmp --shares 0.6 --set layers=2

Exit code 1 if a plan does not fit, computes other bits, or has a predicted peak that is
off by more than 2 %; if a plan that moves is more than 1 % slower than the one that
recomputes; or if at 80 % freed or more it moves and costs more than that bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _in_turns as in_turns
import _measuring as measuring

import ckplan
from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.report.moving import link_words
from ckplan.report.progress import ProgressLine
from ckplan.simulating.moving import Link
from ckplan.simulating.timeline import Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.units import format_bytes, format_seconds
from ckplan.verifying.compare_steps import differing_results

HEADERS = (
    *("freed", "plan", "budget", "predicted peak", "measured peak", "bits equal"),
    *("moved", "bound", "predicted overhead", "measured overhead"),
    *("against recomputing", "quartiles"),
)
RECOMPUTES, MOVES = "recomputes", "may move"
MOST_SLOWER = 0.01  # of a plan that moves, against the one that recomputes
BELOW_BOUND = 0.8  # least share freed at which moving beats any recomputation
_percent = measuring.format_overhead


@dataclass(frozen=True)
class Planned:
    """One plan for a share of the activation bytes, to be freed."""

    share: float
    name: str
    budget_bytes: int
    bound: float  # of recomputation alone
    plan: Plan
    timeline: Timeline

    @property
    def moved_bytes(self) -> int:
        """Bytes that move out, and come back."""
        return self.timeline.moves.moved_bytes


@dataclass(frozen=True)
class Outcome:
    """What a plan did, beside the unplanned step and recomputation alone."""

    planned: Planned
    peak_bytes: int
    different: int  # results with other bits
    overhead: float
    ratios: tuple[float, ...]  # of every round, to recomputation alone, less one

    @property
    def slower(self) -> float:
        """Than recomputation alone, as a fraction: the median over rounds."""
        return statistics.median(self.ratios)

    def cells(self) -> list[str]:
        """The row of the table."""
        planned = self.planned
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        against = _percent(self.slower), f"{_percent(low)} to {_percent(high)}"
        return [
            f"{planned.share:.0%}",
            planned.name,
            format_bytes(planned.budget_bytes),
            format_bytes(planned.timeline.peak_bytes),
            format_bytes(self.peak_bytes),
            "**no**" if self.different else "yes",
            format_bytes(planned.moved_bytes) if planned.moved_bytes else "nothing",
            _percent(planned.bound),
            _percent(planned.timeline.overhead),
            _percent(self.overhead),
            *(against if planned.name == MOVES else ("", "")),
        ]

    def broken(self) -> Iterator[str]:
        """What of the claim does not hold."""
        planned, predicted = self.planned, self.planned.timeline.peak_bytes
        where = f"{planned.share:.0%} freed, {planned.name}"
        if self.peak_bytes > planned.budget_bytes:
            yield f"{where}: the measured peak is over the budget"
        if self.different:
            yield f"{where}: {self.different} results differ from the unplanned ones"
        error = measuring.relative_error(predicted, self.peak_bytes)
        if abs(error) > measuring.MOST_ERROR:
            yield f"{where}: the predicted peak is off by {error:.1%}"
        if not planned.moved_bytes:
            return
        if self.slower > MOST_SLOWER:
            yield f"{where}: {_percent(self.slower)} of a step that recomputes alone"
        if planned.share >= BELOW_BOUND and self.overhead > planned.bound:
            cost, bound = _percent(self.overhead), _percent(planned.bound)
            yield f"{where}: it costs {cost}, recomputation at least {bound}"


def main() -> int:
    """Plan, measure and report."""
    args = _arguments()
    spec = in_turns.spec_of(args)
    before = disk(args.offload)
    with in_turns.own_cache():
        with ProgressLine(sys.stderr) as progress:
            graph = profile_workload(spec, progress=progress)
        measuring.say("solving")
        pairs, notes = choose(graph, args.shares, before)
        outcomes: list[Outcome] = []
        for pair in pairs:
            measuring.say(f"{pair[0].share:.0%} freed")
            outcomes += measure(spec, pair, args.offload, args.rounds, args.repeats)
    after = disk(args.offload)
    report = measuring.Report(
        name=in_turns.name_of("offload_cost", args),
        title=f"Activations of {args.workload} in a file",
        doc=__doc__,
        parts=[
            measuring.make_table(HEADERS, [one.cells() for one in outcomes]),
            _explain(graph, (before, after), args),
            *notes,
        ],
        broken=[line for one in outcomes for line in one.broken()],
    )
    return measuring.finish(report, args)


def disk(folder: Path) -> Link:
    """What moves to a folder's disk cost now."""
    with in_turns.own_cache():
        return ckplan.spill_link(folder, fresh=True)


def choose(
    graph: Graph, shares: Iterable[float], link: Link
) -> tuple[list[tuple[Planned, Planned]], list[str]]:
    """Both plans for every share, and what cannot be done.

    Args:
        graph: The profiled step.
        shares: Of its activation bytes, to be freed.
        link: To the disk.
    """
    planner = Planner(graph)
    moving = MovingPlanner(planner, link)
    pairs: list[tuple[Planned, Planned]] = []
    notes: list[str] = []
    for share in shares:
        freed_bytes = round(share * graph.bytes_by_kind["activation"])
        budget_bytes = planner.unplanned.peak_bytes - freed_bytes
        try:
            found = planner.solve(budget_bytes), moving.solve(MemoryLimit(budget_bytes))
        except InfeasibleError as error:
            notes.append(f"{share:.0%} freed: {error.what}.")
            continue
        bound = found[0].bound_overhead
        one, other = (
            Planned(share, name, budget_bytes, bound, to_plan(graph, it), it.timeline)
            for name, it in zip((RECOMPUTES, MOVES), found, strict=True)
        )
        pairs.append((one, other))
    return pairs, notes


def measure(
    spec: WorkloadSpec,
    pair: Sequence[Planned],
    folder: Path,
    rounds: int,
    repeats: int,
) -> list[Outcome]:
    """Take steps of both plans and without one, in turns."""
    seconds: list[list[float]] = [[], [], []]
    plans = None, *(one.plan for one in pair)
    for _ in range(repeats):
        first, timed = in_turns.take_turns(spec, plans, rounds, spill=folder)
        for found, taken in zip(seconds, timed, strict=True):
            found += taken
    unplanned, recomputing, _ = seconds
    return [
        Outcome(
            one,
            steps.peak_bytes,
            len(differing_results((first[0], steps)) or ()),
            statistics.median(_ratios(taken, unplanned)),
            tuple(_ratios(taken, recomputing)),
        )
        for one, steps, taken in zip(pair, first[1:], seconds[1:], strict=True)
    ]


def _ratios(seconds: Iterable[float], others: Iterable[float]) -> list[float]:
    """By how much each step is longer than the other of its round, as a fraction."""
    return [one / other - 1 for one, other in zip(seconds, others, strict=True)]


def _explain(graph: Graph, links: tuple[Link, Link], args: argparse.Namespace) -> str:
    before, after = map(link_words, links)
    return (
        f"The disk before all steps: {before}. After: {after}. The unplanned step is "
        f"predicted to take {format_seconds(graph.step_seconds)}. "
        f"{in_turns.explain(graph, args)}"
    )


def _arguments() -> argparse.Namespace:
    parser = in_turns.make_parser(__doc__, (0.5, 0.7, 0.8, 0.9))
    parser.add_argument(
        "--offload",
        metavar="FOLDER",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the file is  [default: the folder for temporary files]",
    )
    return in_turns.parse(parser)


if __name__ == "__main__":
    measuring.run(main)
