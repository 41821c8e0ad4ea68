"""Plans inside torch.compile: they fit, as replayed, and compute the same.

For every workload and budget, ``ckplan verify --compile`` runs in a process of its own:
forward, loss and backward compiled by torch alone, and compiled within the budget, by
turns. Budgets are parts of the unplanned compiled peak, parameters and batch included.
The promise is kept where the measured peak is within the budget and equal to the
replayed one, to the byte, unplanned too, and where loss, gradients and random state
have the bits of the unplanned step or differ by rounding alone.

Rows are kept beside the page, as JSON, so that some can be measured again:

    python scripts/compiled.py
    python scripts/compiled.py --only gpt2 --budgets 75%

Exit code 1 if any row breaks the promise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from _measuring import (
    SEED,
    Report,
    finish,
    make_parser,
    make_table,
    results_path,
    run,
    run_ckplan,
    say,
    with_settings,
    workload_path,
)

from ckplan import files
from ckplan.units import format_bytes, format_percent

SETTINGS = {
    "gpt2": ("layers=6", "width=256", "heads=4", "batch=4", "length=128"),
    "llama": ("layers=3", "width=256", "heads=4", "batch=4", "vocab=4096"),
    "vit": ("layers=3", "width=256", "heads=4", "batch=8", "size=112"),
}
BUDGETS = {
    "gpt2": ("85%", "75%", "65%"),
    "llama": ("85%", "75%"),
    "vit": ("85%", "80%"),  # nearer to its floor
}
HEADERS = (
    "workload",
    "budget",
    "in bytes",
    "replayed",
    "measured",
    "unplanned",
    "bits equal",
    "largest difference",
    "estimated overhead",
    "overhead",
)


def broken(row: dict[str, Any]) -> Iterator[str]:
    """What of the promise does not hold."""
    where = f"{row['workload']} at {row['budget']}"
    if not row["passed"]:
        yield f"{where}: did not pass: {', '.join(row['different'])}"
    for which in ("", "unplanned_"):
        replayed = row[f"{which}replayed_peak_bytes"]
        measured = row[f"{which}measured_peak_bytes"]
        if replayed != measured:
            yield f"{where}: {which}replay off by {replayed - measured} B"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    equal = row["loss_equal"] and row["gradients_equal"] and row["buffers_equal"]
    sizes = ("budget_bytes", "replayed_peak_bytes", "measured_peak_bytes")
    shares = (row["predicted_overhead"], row["overhead"])
    return [
        f"{row['workload']} ({', '.join(SETTINGS[row['workload']])})",
        row["budget"],
        *(format_bytes(row[size]) for size in sizes),
        format_bytes(row["unplanned_measured_peak_bytes"]),
        "yes" if equal else "no",
        f"{row['largest_difference']:.0e}" if row["largest_difference"] else "0",
        *("n/a" if s is None else format_percent(s, sign=True) for s in shares),
    ]


def kept_rows() -> list[dict[str, Any]]:
    """All rows measured so far, by workload and budget."""
    path = results_path("compiled", ".jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    rows = map(json.loads, lines)
    return sorted(rows, key=lambda row: (row["workload"], row["budget"]))


def keep(row: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one, if there is one."""
    same = ("workload", "budget")
    rows = [one for one in kept_rows() if any(one[k] != row[k] for k in same)]
    text = "".join(json.dumps(one) + "\n" for one in [*rows, row])
    files.write_text(results_path("compiled", ".jsonl"), text, force=True)


def main() -> int:
    """Measure the rows asked for, and report all that there are."""
    args = _arguments()
    for workload in args.only or SETTINGS:
        for budget in BUDGETS[workload] if args.budgets is None else args.budgets:
            say(f"{workload}: verify within {budget}")
            found = run_ckplan(
                "verify",
                workload_path(workload),
                *with_settings(SETTINGS[workload]),
                "--compile",
                *("--budget", budget, "--steps", str(args.steps)),
                *("--seed", str(SEED)),
            )
            keep({"workload": workload, "budget": budget, **found})
    ordered = kept_rows()
    report = Report(
        name="compiled",
        title="Plans inside torch.compile",
        claim=(__doc__ or "").partition("\n\nRows are")[0],
        parts=[make_table(HEADERS, map(cells, ordered), texts=2)],
        broken=[line for row in ordered for line in broken(row)],
    )
    return finish(report, args.output, whole=True)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        choices=[*SETTINGS],
        help="measure this workload; repeatable  [default: all]",
    )
    parser.add_argument(
        "--budgets",
        metavar="SHARE",
        nargs="*",
        help="budgets, of the unplanned peak; none: only write the page anew  "
        "[default: two or three per workload]",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=12,
        help="time so many steps of each  [default: 12]",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
