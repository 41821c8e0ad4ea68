"""Proves that moving activations to a file is no slower than recomputing them.

The workload as ``configs/workloads`` builds it, trained with AdamW on the CPU (GPT-2:
12 layers, 384 wide, a batch of 8 x 256 tokens, dropout). A budget is the unplanned peak
less a share of the activation bytes. For every share there are two plans: one that
recomputes alone, and one that may also move tensors to a file in ``--offload FOLDER``,
made for the rate that its disk was measured at just before. Where the disk is too slow,
the second plan moves nothing and is the first. The unplanned step and both plans train
in processes of their own, one step each in every round; the first two rounds are
dropped, and all is repeated in fresh processes. Overheads are medians over rounds of a
step's seconds, divided by those of the unplanned step of the same round; "against
recomputing" is the same ratio of the plan that moves to the one that does not, with its
quartiles. The bound is of any schedule that recomputes alone, by predicted seconds.

    python scripts/offload_cost.py gpt2 --offload /tmp
    python scripts/offload_cost.py gpt2 --offload /tmp --keep-memory --threads 1
    python scripts/offload_cost.py gpt2 --offload /tmp --shares 0.8 --set layers=2

Exit code 1 if a plan does not fit, computes other bits, or has a predicted peak that is
off by more than 2 %; if a plan that moves is more than 1 % slower than the one that
recomputes; or if at 80 % freed or more it moves and costs more than that bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import _measuring as measuring
import torch

import ckplan
from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.report.progress import ProgressLine
from ckplan.simulating.moving import Link
from ckplan.simulating.timeline import Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.units import format_bytes, format_seconds
from ckplan.verifying.compare_steps import differing_results
from ckplan.verifying.step_process import StepProcess, interleave

HEADERS = (
    *("freed", "plan", "budget", "predicted peak", "measured peak", "bits equal"),
    *("moved", "bound", "predicted overhead", "measured overhead"),
    *("against recomputing", "quartiles"),
)
RECOMPUTES, MOVES = "recomputes", "may move"
DROPPED_ROUNDS = 2
RATES = 3  # measured, of the disk
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
    if args.keep_memory:
        measuring.keep_memory()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of processes started here
    spec = WorkloadSpec(
        measuring.location_of(args.workload), parse_options(args.settings)
    )
    before = disk_rate(args.offload)
    with _costs_of_now():
        with ProgressLine(sys.stderr) as progress:
            graph = profile_workload(spec, progress=progress)
        measuring.say("solving")
        pairs, notes = choose(graph, args.shares, before)
        outcomes: list[Outcome] = []
        for pair in pairs:
            measuring.say(f"{pair[0].share:.0%} freed")
            outcomes += measure(spec, pair, args.offload, args.rounds, args.repeats)
    after = disk_rate(args.offload)
    report = measuring.Report(
        name=_name(args),
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


def disk_rate(folder: Path) -> float:
    """Bytes per second of a folder's disk, now: the median of a few measurements."""
    with _costs_of_now():
        rates = [ckplan.spill_rate(folder, fresh=True) for _ in range(RATES)]
    return rates[-1]  # each is the median of all before it


@contextmanager
def _costs_of_now() -> Iterator[None]:
    """What was measured before does not count, and what is measured is not kept."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {FOLDER_VARIABLE: folder}),
    ):
        yield


def choose(
    graph: Graph, shares: Iterable[float], rate: float
) -> tuple[list[tuple[Planned, Planned]], list[str]]:
    """Both plans for every share, and what cannot be done.

    Args:
        graph: The profiled step.
        shares: Of its activation bytes, to be freed.
        rate: Of the disk, in bytes per second.
    """
    planner = Planner(graph)
    moving = MovingPlanner(planner, Link(rate))
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
        with ExitStack() as running, ProgressLine(sys.stderr) as progress:
            processes = [
                running.enter_context(
                    StepProcess(spec, plan, seed=measuring.SEED, spill=folder)
                )
                for plan in plans
            ]
            first = [process.first_steps() for process in processes]
            timed = interleave(processes, rounds, progress)
        for found, taken in zip(seconds, timed, strict=True):
            found += taken[DROPPED_ROUNDS:]
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


def _name(args: argparse.Namespace) -> str:
    name = f"offload_cost_{args.workload}" + ("_kept" if args.keep_memory else "")
    return name if args.threads is None else f"{name}_{args.threads}_thread"


def _explain(graph: Graph, rates: tuple[float, float], args: argparse.Namespace) -> str:
    activations = format_bytes(graph.bytes_by_kind["activation"])
    before, after = (f"{rate / 1e6:,.0f} MB/s" for rate in rates)
    return (
        f"The disk: {before} before, {after} after all steps. Activations of the "
        f"unplanned step: {activations}; predicted to take "
        f"{format_seconds(graph.step_seconds)}. Fresh processes: {args.repeats} times, "
        f"{args.rounds} rounds in each, of which the first {DROPPED_ROUNDS} are "
        "dropped."
    )


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, settings=True)
    parser.add_argument(
        "workload", nargs="?", default="gpt2", help="its name  [default: gpt2]"
    )
    parser.add_argument(
        "--offload",
        metavar="FOLDER",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the file is  [default: the folder for temporary files]",
    )
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="let no process give memory back to the system",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        choices=range(1, 1 + (os.cpu_count() or 1)),
        help="of every process  [default: one for each core]",
    )
    parser.add_argument(
        "--shares",
        metavar="SHARE",
        type=float,
        nargs="+",
        default=[0.5, 0.7, 0.8, 0.9],
        help="of the activation bytes, to be freed  [default: 0.5 0.7 0.8 0.9]",
    )
    measuring.add_rounds(parser, rounds=6, repeats=4, dropped=DROPPED_ROUNDS)
    args = parser.parse_args()
    if args.rounds < DROPPED_ROUNDS + 2:
        parser.error(f"--rounds: at least {DROPPED_ROUNDS + 2}, not {args.rounds}")
    return args


if __name__ == "__main__":
    measuring.run(main)
