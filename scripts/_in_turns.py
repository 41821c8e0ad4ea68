"""Steps of a workload with several plans, in turns: what programs that do so share."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import _measuring as measuring
import torch

from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.report.progress import ProgressLine
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.units import format_bytes
from ckplan.verifying.step_process import StepProcess, interleave
from ckplan.verifying.worker import FirstSteps

DROPPED_ROUNDS = 2


def make_parser(doc: str, shares: Sequence[float]) -> argparse.ArgumentParser:
    """The options that all have.

    Args:
        doc: The docstring of the program.
        shares: By default, of the activation bytes, to be freed.
    """
    parser = measuring.make_parser(doc, settings=True)
    parser.add_argument(
        "workload", nargs="?", default="gpt2", help="its name  [default: gpt2]"
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
    default = " ".join(map(str, shares))
    parser.add_argument(
        "--shares",
        metavar="SHARE",
        type=float,
        nargs="+",
        default=[*shares],
        help=f"of the activation bytes, to be freed  [default: {default}]",
    )
    measuring.add_rounds(parser, rounds=6, repeats=4, dropped=DROPPED_ROUNDS)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; this process and those started here have what they ask for."""
    args = parser.parse_args()
    if args.rounds < DROPPED_ROUNDS + 2:
        parser.error(f"--rounds: at least {DROPPED_ROUNDS + 2}, not {args.rounds}")
    if args.keep_memory:
        measuring.keep_memory()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of processes started here
    return args


def spec_of(args: argparse.Namespace) -> WorkloadSpec:
    """The workload, with its settings."""
    target = measuring.location_of(args.workload)
    return WorkloadSpec(target, parse_options(args.settings))


def name_of(program: str, args: argparse.Namespace) -> str:
    """The name of the page."""
    name = f"{program}_{args.workload}" + ("_kept" if args.keep_memory else "")
    return name if args.threads is None else f"{name}_{args.threads}_thread"


@contextmanager
def own_cache() -> Iterator[None]:
    """Keep costs of ops for now alone: the speed of a machine changes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {FOLDER_VARIABLE: folder}),
    ):
        yield


def take_turns(
    spec: WorkloadSpec,
    plans: Iterable[Plan | None],
    rounds: int,
    *,
    spill: Path | None = None,
) -> tuple[list[FirstSteps], list[list[float]]]:
    """The first steps of fresh processes, and the seconds of steps in turns.

    Args:
        spec: The workload.
        plans: One for each process; None for a step without.
        rounds: Steps of each; the first few are dropped.
        spill: The folder of the file that plans move tensors to.
    """
    first: list[FirstSteps] = []
    with ExitStack() as running, ProgressLine(sys.stderr) as progress:
        processes = [
            running.enter_context(
                StepProcess(spec, plan, seed=measuring.SEED, spill=spill)
            )
            for plan in plans
        ]
        for done, process in enumerate(processes):
            progress("measuring peaks", done, len(processes))
            first.append(process.first_steps())
        taken = interleave(processes, rounds, progress)
    return first, [one[DROPPED_ROUNDS:] for one in taken]


def explain(graph: Graph, args: argparse.Namespace) -> str:
    """The bytes of the activations, and how often steps were taken."""
    activations = format_bytes(graph.bytes_by_kind["activation"])
    return (
        f"Activations of the unplanned step: {activations}. Fresh processes: "
        f"{args.repeats} times, {args.rounds} rounds in each, of which the first "
        f"{DROPPED_ROUNDS} are dropped."
    )
