"""What plans inside torch.compile cost, beside what is predicted.

The step of every workload, forward, loss and backward, with dropout in GPT-2 and BERT,
is compiled by torch alone and with plans that free shares of the activations that
torch's own division keeps for backward. All are compiled in one process, for one model,
and take steps by turns, every second turn in reverse; the first turns are dropped.
Several processes do so, one after the other, since their medians were found up to a
tenth apart: "in each" has these, and all turns count together. Rows without them are of
one process; "CPU" has the vectors that torch found there, in rows from then on. A
process keeps its memory: otherwise each step gets some of it anew from the system, and
how much is a matter of what was freed before. Before each step, a block of some random
size is taken, so that its tensors lie elsewhere in each turn: products whose sizes are
powers of two take longer at some addresses than at others. Rows of before 1 December
are without that. "Faults" are pages that a step got nevertheless, with the plan and
without, in the median. An overhead is the median over
turns of the ratio to the step without a plan of the same turn, less one. Peaks are
measured in a step before, with the parameters, buffers and batch that it uses, bits
compared in the first: each value's with those of several steps without a plan, which
two threads make different. Where no plan frees the share, the smallest plan has the
row. Predicted overheads are those of the plan files. The most that is asked is of the
measured ones. "Least" is what contractions and attention take that any division runs
again in backward if it saves no more than the budget leaves beside parameters and
batch: a minimum cut of the joint graph at their measured seconds
(`ckplan/compiling/cuts.py`), less what masks gain as bits. All else is fused, counts as
free there, and can be a gain.

Rows are kept beside the page, as JSON, so that some can be measured again:

    python scripts/compiled_cost.py
    python scripts/compiled_cost.py --only bert --threads 1 --rounds 20

Exit code 1 if a plan is over its budget, has other bytes than were replayed or other
bits, costs more than asked, or more than 2 points more or less than predicted.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _compiled_rows import built, keep, kept_rows, peak_of, spec_of
from _measuring import (
    SEED,
    Report,
    chosen,
    finish,
    format_overhead,
    keep_memory,
    make_parser,
    make_table,
    run,
    say,
)

from ckplan.units import format_bytes, format_seconds

SETTINGS = {
    "gpt2": (),  # 12 layers, 384 wide, 8 x 256 tokens
    "llama": (*("layers=12", "width=256", "heads=4"), "batch=4", "vocab=1024"),
    "bert": (*("layers=12", "width=256", "heads=4"), "batch=8", "vocab=1024"),
    "vit": ("layers=12", "width=192", "heads=3", "batch=8", "size=224"),
}
FREED = {
    "gpt2": (0.5, 0.7, 0.8),
    "llama": (0.5, 0.7),
    "bert": (0.5, 0.7),
    "vit": (0.5, 0.7),
}
ASKED = {"gpt2": {0.5: 0.01, 0.7: 0.04, 0.8: 0.09}}
ASKED_OF_OTHERS = {0.5: 0.02, 0.7: 0.06}
NEAR = 0.02  # of the predicted overhead
DROPPED = 2  # first turns
MOST_SHIFTED = 1 << 22  # bytes
EXACT = ("budget_bytes", "replayed", "measured", "unplanned", "predicted")
HEADERS = (
    *("workload", "CPU", "freed", "threads", "budget", "replayed", "measured"),
    "bits equal",
    *("step", "faults", "predicted", "overhead", "quartiles", "in each", "least"),
    *("asked", "date"),
)


@dataclass
class Variant:
    """The compiled step, with a plan or without."""

    take: Callable[[], Any]
    make: Callable[[], dict[str, Any]]  # takes a step: its loss and all gradients
    peak_bytes: int = 0
    values: dict[str, Any] = field(default_factory=dict)  # of the first step
    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)  # pages that were got anew


def planned(name: str) -> tuple[Any, list[tuple[float, float, float, Any]]]:
    """The replay without a plan; of each plan, shares wanted and freed, and the least.

    Where none fits, the last plan is the smallest.
    """
    from ckplan.compiling.step import parts_of
    from ckplan.errors import InfeasibleError

    (planner,) = parts_of(_built(name), _progress()).planners.values()
    unplanned, graph = planner.unplanned, planner.step.graph
    saved = [graph.storages[n] for n in {one.storage for one in graph.saved}]
    kept = sum(one.bytes for one in saved if one.kind == "activation")
    found = []
    for share in FREED[name]:
        budget_bytes = unplanned.peak_bytes - round(share * kept)
        try:
            freed, plan = share, planner.solve(budget_bytes).plan
        except InfeasibleError:
            plan = planner.chosen(planner.smallest).plan
            freed = (unplanned.peak_bytes - plan.budget_bytes) / kept
        least = planner.proposer.least_overhead(
            plan.budget_bytes - unplanned.held_bytes
        )
        found.append((share, freed, least, plan))
        if freed < share:
            break
    return unplanned, found


def measured(name: str, threads: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for every plan and number of threads."""
    import torch

    torch.set_num_threads(threads[0])  # seconds are predicted, bits compared with these
    say(f"{name}: plan")
    unplanned, plans = planned(name)
    say(f"{name}: compile")
    torch._dynamo.reset()
    workload = _built(name)
    variants = [
        _variant(workload, plan, unplanned.held_bytes)
        for plan in (None, *(plan for *_, plan in plans))
    ]
    rows = []
    places = random.Random(SEED)
    for count in threads:
        torch.set_num_threads(count)
        for one in variants:
            one.seconds.clear()
            one.faults.clear()
        for number in range(rounds + DROPPED):
            say(f"{name}: {count} threads, turn {number + 1} of {rounds + DROPPED}")
            for one in variants[:: -1 if number % 2 else 1]:
                begin, before = time.perf_counter(), _faults()
                _shifted(one.take, places)
                one.seconds.append(time.perf_counter() - begin)
                one.faults.append(_faults() - before)
        plain, *others = variants
        for (share, freed, least, plan), one in zip(plans, others, strict=True):
            taken = zip(one.seconds[DROPPED:], plain.seconds[DROPPED:], strict=True)
            rows.append(
                {
                    "workload": name,
                    "wanted": share,
                    "freed": freed,
                    "threads": count,
                    "cpu": torch.backends.cpu.get_cpu_capability(),
                    "budget_bytes": plan.budget_bytes,
                    "replayed": plan.predicted.peak_bytes,
                    "measured": one.peak_bytes,
                    "unplanned": [unplanned.peak_bytes, plain.peak_bytes],
                    "equal": _equal(one, plain),
                    "step_seconds": statistics.median(plain.seconds[DROPPED:]),
                    "predicted": plan.predicted.overhead,
                    "least": least,
                    "faults": [
                        round(statistics.median(some.faults[DROPPED:]))
                        for some in (one, plain)
                    ],
                    "ratios": [own / other for own, other in taken],
                }
            )
    return rows


def measured_apart(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of several processes, each with all turns."""
    how = ["--rounds", str(args.rounds), "--threads", *map(str, args.threads)]
    command = [sys.executable, __file__, "--only", name, *how, "--alone"]
    found = []
    for number in range(args.processes):
        say(f"{name}: process {number + 1} of {args.processes}")
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found.append(json.loads(ended.stdout.splitlines()[-1]))
    return [together(rows) for rows in zip(*found, strict=True)]


def together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of one plan, of those of several processes.

    The first has planned; the others find that in the cache.
    """
    first = rows[0]
    differ = [key for key in EXACT if any(row[key] != first[key] for row in rows)]
    assert not differ, f"processes have other plans: {differ}"
    return {
        **first,
        "equal": all(row["equal"] for row in rows),
        "step_seconds": statistics.median(row["step_seconds"] for row in rows),
        "ratios": [ratio for row in rows for ratio in row["ratios"]],
        "in_each": [statistics.median(row["ratios"]) for row in rows],
    }


def _shifted(take: Callable[[], Any], places: random.Random) -> None:
    """Take a step whose tensors are elsewhere than before, by up to 4 MiB."""
    import torch

    before = torch.empty(places.randrange(MOST_SHIFTED), dtype=torch.uint8)
    take()
    del before


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _equal(one: Variant, plain: Variant) -> bool:
    """Whether each value has the bits of one of several steps without a plan.

    With two threads or more, embeddings get their gradients by atomics, in any order.
    """
    from ckplan.verifying.compiled_runs import names_apart, repeated

    equal = repeated(one.values, plain.values, plain.make).equal
    return equal.issuperset(names_apart(one.values, plain.values))


def _built(name: str) -> Any:
    return built(spec_of(name, SETTINGS[name]))


def _progress() -> Any:
    from ckplan.report.progress import ProgressLine

    return ProgressLine(sys.stderr)


def _variant(workload: Any, plan: Any, held_bytes: int) -> Variant:
    """Compile the step and take it twice: for its values, and for its peak."""
    import torch

    from ckplan.compiling import backend
    from ckplan.compiling.lowering import in_order
    from ckplan.compiling.step import compiled_loss

    model = workload.model
    forward = compiled_loss(workload, in_order if plan is None else backend(plan))

    def take() -> Any:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        found = forward()
        found.backward()
        return found.detach()

    def make() -> dict[str, Any]:
        loss = {"loss": take()}
        return loss | {name: one.grad for name, one in model.named_parameters()}

    one = Variant(take, make)
    one.values = make()
    one.peak_bytes = peak_of(workload, take, held_bytes)
    return one


def asked_of(row: dict[str, Any]) -> float:
    """The most that a plan may cost."""
    return ASKED.get(row["workload"], ASKED_OF_OTHERS)[row["wanted"]]


def overhead_of(row: dict[str, Any]) -> float:
    """The measured overhead."""
    return statistics.median(row["ratios"]) - 1


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    low, _, high = statistics.quantiles(row["ratios"], n=4, method="inclusive")
    return [
        f"{row['workload']} ({', '.join(SETTINGS[row['workload']]) or 'as it is'})",
        row.get("cpu", ""),
        f"{row['freed']:.0%}" + (" (floor)" if row["freed"] < row["wanted"] else ""),
        str(row["threads"]),
        *(format_bytes(row[key]) for key in ("budget_bytes", "replayed", "measured")),
        "yes" if row["equal"] else "no",
        format_seconds(row["step_seconds"]),
        " / ".join(f"{count:,}" for count in row["faults"]),
        format_overhead(row["predicted"]),
        format_overhead(overhead_of(row)),
        f"{format_overhead(low - 1)} to {format_overhead(high - 1)}",
        " / ".join(format_overhead(one - 1) for one in row.get("in_each", ())),
        format_overhead(row["least"]),
        format_overhead(asked_of(row)),
        row["date"],
    ]


def broken(row: dict[str, Any]) -> Iterator[str]:
    """What of the promise does not hold."""
    cpu = f", {row['cpu']}" if "cpu" in row else ""
    where = f"{row['workload']}, {row['freed']:.0%}, {row['threads']} threads{cpu}"
    cost = overhead_of(row)
    if row["measured"] > row["budget_bytes"] or row["measured"] != row["replayed"]:
        yield f"{where}: {row['measured']} B, replayed {row['replayed']} B"
    if row["unplanned"][0] != row["unplanned"][1]:
        yield f"{where}: other bytes without a plan: {row['unplanned']}"
    if not row["equal"]:
        yield f"{where}: other bits"
    if row["freed"] < row["wanted"]:
        yield f"{where}: no plan frees {row['wanted']:.0%}"
    if cost > asked_of(row):
        more = ", and so do contractions alone" if row["least"] > asked_of(row) else ""
        yield f"{where}: costs more than asked{more}"
    if abs(cost - row["predicted"]) > NEAR:
        yield f"{where}: {format_overhead(row['predicted'] - cost)} off"


def main() -> int:
    """Measure the workloads asked for."""
    args = _arguments()
    keep_memory()
    for name in [] if args.page else chosen(SETTINGS, args.only):
        if args.alone:
            print(json.dumps(measured(name, tuple(args.threads), args.rounds)))
            return 0
        found = measured_apart(name, args)
        keep("compiled_cost", found, ("workload", "wanted", "threads", "cpu"))
    order = [*SETTINGS]
    rows = kept_rows(
        "compiled_cost",
        lambda row: (
            order.index(row["workload"]),
            row["threads"],
            row["wanted"],
            row.get("cpu", ""),
        ),
    )
    report = Report(
        name="compiled_cost",
        title="What plans inside torch.compile cost",
        doc=(__doc__ or "").partition("\n\nRows are")[0],
        parts=[make_table(HEADERS, map(cells, rows), texts=3)],
        broken=[line for row in rows for line in broken(row)],
    )
    return finish(report, args, whole=True)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, only=True)
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of threads that take steps  [default: 1 2]",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=5,
        help=f"turns of each, after {DROPPED} more  [default: 5]",
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        default=3,
        help="how many take these turns  [default: 3]",
    )
    parser.add_argument(
        "--page", action="store_true", help="measure nothing, write the page anew"
    )
    parser.add_argument(
        "--alone", action="store_true", help="be one of these: print its rows as JSON"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
