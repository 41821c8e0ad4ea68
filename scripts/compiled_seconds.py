"""CPU seconds that the first compiled step takes: torch's own, with a plan, planned.

Each way runs in a process of its own, with an empty cache of Inductor's and without its
workers. A layer is compiled before, and masks are timed: what Inductor and ckplan find
out once on a machine does not count. Then the model's first step is taken, forward and
backward, and the CPU seconds of this process and of the C++ compilers that it ran are
counted. "Torch" compiles without a plan, "budget" plans within 75 % and compiles,
"plan" follows the plan of that, which it replays. "Solve" is what "budget" takes longer
than "plan". "Again" is the next start, with what the first has left in the caches of
Inductor and of ckplan; "plan" has none of these. "Torch" and "plan" are taken in turns,
several times: their medians, and of the ratio the range.

    python scripts/compiled_seconds.py
    python scripts/compiled_seconds.py --only gpt2

Exit code 1 if a plan makes compiling take more than 1.5 times as long.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _compiled_rows import keep, kept_rows, spec_of
from _measuring import SEED, Report, chosen, finish, make_parser, make_table, run, say

BUDGET = "75%"
MOST = 1.5  # times torch's own
SETTINGS = {
    "gpt2": ("layers=1", "width=64", "heads=2", "batch=8", "length=64", "vocab=200"),
    "bert": ("layers=1", "width=64", "heads=2", "batch=8", "length=64", "vocab=200"),
}
WAYS = ("torch", "torch again", "budget", "budget again", "plan")
TURNS = 3  # of torch and plan
COLUMNS = ("torch", "budget", "plan")


def measured(workload: str) -> dict[str, Any]:
    """CPU seconds of each way to compile a workload's step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row: dict[str, Any] = {"workload": workload}
        for way in ("budget", "budget again"):  # the first writes the plan's file
            row[way] = _seconds(workload, way, folder)
        turns = [
            [_seconds(workload, way, folder) for way in ("torch", "plan")]
            for _ in range(TURNS)
        ]
        row["torch again"] = _seconds(workload, "torch again", folder)
    row["torch"], row["plan"] = map(median, zip(*turns, strict=True))
    row["ratios"] = sorted(plan / torch for torch, plan in turns)
    return row


def _seconds(workload: str, way: str, folder: Path) -> float:
    """CPU seconds of one first step, in a process of its own."""
    say(f"{workload}: {way}")
    is_first = not way.endswith(" again")
    compiled, known = folder / way.removesuffix(" again"), folder / "ckplan"
    if is_first:
        shutil.rmtree(compiled, ignore_errors=True)
        shutil.rmtree(known / "compiled", ignore_errors=True)
    alone = {
        "CKPLAN_CACHE": str(known),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    words = (workload, "--way", way, "--file", str(folder / "plan.yaml"))
    ended = subprocess.run(
        [sys.executable, __file__, "--only", *words],
        env={**os.environ, **alone},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(ended.stdout.split()[-1])


def first_step(workload: str, way: str, path: Path) -> float:
    """CPU seconds of the first step of a workload, compiled in one way."""
    import torch

    from ckplan.compiling import backend
    from ckplan.compiling.planned_backend import Backend
    from ckplan.compiling.step import compiled_loss
    from ckplan.plan import file as plan_file
    from ckplan.tracing.costs.mask_seconds import mask_seconds

    mask_seconds()
    layer = torch.nn.Linear(2, 2)
    torch.compile(layer)(torch.ones(2, 2)).sum().backward()
    torch.manual_seed(SEED)
    built = spec_of(workload, SETTINGS[workload]).build()
    by = "inductor" if "torch" in way else backend(path if way == "plan" else BUDGET)
    before = _cpu_seconds()
    compiled_loss(built, by)().backward()
    seconds = _cpu_seconds() - before
    if isinstance(by, Backend) and way == "budget":
        plan_file.save(by.plans[0], path, force=True)
    return seconds


def _cpu_seconds() -> float:
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def broken(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What of the promise does not hold."""
    for row in rows:
        ratio = median(row["ratios"])
        if ratio > MOST:
            yield f"{row['workload']}: {ratio:.2f} times torch's"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    solve = row["budget"] - row["plan"]
    seconds = [f"{one:.1f} s" for one in (*(row[way] for way in COLUMNS), solve)]
    least, *_, most = row["ratios"]
    ratios = [f"{median(row['ratios']):.2f} ({least:.2f} to {most:.2f})"]
    ratios.append(f"{row['budget'] / row['torch']:.2f}")
    settings = ", ".join(SETTINGS[row["workload"]])
    again = [f"{row[f'{way} again']:.1f} s" for way in ("torch", "budget")]
    return [f"{row['workload']} ({settings})", *seconds, *ratios, *again, row["date"]]


def main() -> int:
    """Measure the workloads asked for, and report all that there are."""
    args = _arguments()
    if args.way:
        print(first_step(args.only[0], args.way, args.file))
        return 0
    for workload in chosen(SETTINGS, args.only):
        keep("compiled_seconds", [measured(workload)], ("workload",))
    rows = kept_rows("compiled_seconds", lambda row: [*SETTINGS].index(row["workload"]))
    ratios, again = ("plan / torch", "budget / torch"), ("torch again", "budget again")
    headers = ("workload", *COLUMNS, "solve", *ratios, *again, "date")
    report = Report(
        name="compiled_seconds",
        title="How long it takes to compile a planned step",
        doc=__doc__,
        parts=[make_table(headers, map(cells, rows))],
        broken=list(broken(rows)),
    )
    return finish(report, args, whole=True)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, only=True)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
