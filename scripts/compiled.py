"""Plans inside torch.compile: they fit, as replayed, and compute the same.

For every workload and budget, ``ckplan verify --compile`` runs in a process of its own:
forward, loss and backward compiled by torch alone, and compiled within the budget, by
turns. Budgets are parts of the unplanned compiled peak, parameters and batch included.
The promise is kept where the measured peak is within the budget and equal to the
replayed one, to the byte, unplanned too, and where loss, gradients and random state
have the bits of the unplanned step or differ by rounding alone. What is refused, with
an error, stays in as a row.

Rows are kept beside the page, as JSON, so that some can be measured again:

    python scripts/compiled.py
    python scripts/compiled.py --only gpt2 --budgets 75%
    python scripts/compiled.py --only bert --train 200

Exit code 1 if any row breaks the promise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from _compiled_rows import keep, spec_of, target_of
from _compiled_rows import kept_rows as rows_of
from _measuring import (
    SEED,
    Report,
    chosen,
    finish,
    make_parser,
    make_table,
    run,
    run_ckplan,
    say,
    with_settings,
)

from ckplan.errors import CkplanError
from ckplan.units import format_bytes, format_percent

SETTINGS = {
    "gpt2": ("layers=6", "width=256", "heads=4", "batch=4", "length=128"),
    "llama": ("layers=3", "width=256", "heads=4", "batch=4", "vocab=4096"),
    "vit": ("layers=3", "width=256", "heads=4", "batch=8", "size=112"),
    "bert": ("layers=1", "width=64", "heads=2", "batch=8", "length=32", "vocab=200"),
    "zoo:t5": ("layers=1", "batch=16", "length=64"),
    "zoo:convnext": ("stages=2", "batch=8", "size=64"),
    "zoo:mixtral": ("layers=1", "batch=16", "length=64"),
    "zoo:lstm": ("batch=4", "length=8", "width=64"),
    "resnet50": ("stages=1", "batch=4", "size=64", "classes=10"),
    "unet": ("layers=1", "width=32", "batch=4", "size=16"),
}
BUDGETS = {
    "gpt2": ("85%", "75%", "65%"),
    "llama": ("85%", "75%"),
    "vit": ("85%", "80%"),  # nearer to its floor
    "bert": ("90%", "85%"),
    "zoo:t5": ("90%", "80%"),
    "zoo:convnext": ("90%", "80%"),
    "zoo:mixtral": ("90%", "80%"),
    "zoo:lstm": ("90%",),
    "resnet50": ("90%", "80%"),
    "unet": ("90%", "80%"),
}
TRAINING_HEADERS = (
    "trained",
    "budget",
    "steps",
    "equal losses",
    "first loss",
    "last loss",
    "graphs",
    "second step",
    "last step",
    "largest step",
)
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
    "date",
)


def broken(row: dict[str, Any]) -> Iterator[str]:
    """What of the promise does not hold."""
    where = f"{row['workload']} at {row['budget']}"
    if "refused" in row:
        yield f"{where}: refused: {row['refused']}"
        return
    trained = row.get("training")
    if trained is not None:
        if trained["equal_losses"] != trained["steps"]:
            yield f"{where}: losses of training differ"
        if trained["graphs"] != 1:
            yield f"{where}: compiled {trained['graphs']} times in training"
        if trained["most_bytes"] != trained["second_step_bytes"]:
            yield f"{where}: memory grows in training"
    if not row["passed"]:
        yield f"{where}: did not pass: {', '.join(row['different'])}"
    for which in ("", "unplanned_"):
        replayed = row[f"{which}replayed_peak_bytes"]
        measured = row[f"{which}measured_peak_bytes"]
        if replayed != measured:
            yield f"{where}: {which}replay off by {replayed - measured} B"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first = [f"{row['workload']} ({', '.join(SETTINGS[row['workload']])})"]
    if "refused" in row:
        return [
            *first,
            row["budget"],
            "refused",
            *[""] * (len(HEADERS) - 4),
            row.get("date", ""),
        ]
    equal = row["loss_equal"] and row["gradients_equal"] and row["buffers_equal"]
    sizes = ("budget_bytes", "replayed_peak_bytes", "measured_peak_bytes")
    shares = (row["predicted_overhead"], row["overhead"])
    return [
        *first,
        row["budget"],
        *(format_bytes(row[size]) for size in sizes),
        format_bytes(row["unplanned_measured_peak_bytes"]),
        "yes" if equal else "no",
        f"{row['largest_difference']:.0e}" if row["largest_difference"] else "0",
        *("n/a" if s is None else format_percent(s, sign=True) for s in shares),
        row.get("date", ""),
    ]


def training_cells(row: dict[str, Any]) -> list[str]:
    """A row of the table of training."""
    found = row["training"]
    sizes = ("second_step_bytes", "last_step_bytes", "most_bytes")
    return [
        row["workload"],
        row["budget"],
        *(str(found[count]) for count in ("steps", "equal_losses")),
        *(f"{found[loss]:.6f}" for loss in ("first_loss", "last_loss")),
        str(found["graphs"]),
        *(format_bytes(found[size]) for size in sizes),
    ]


def trained(workload: str, budget: str, steps: int) -> dict[str, Any]:
    """The row there is, with what training within the budget does."""
    from _compiled_training import training

    known = [
        row
        for row in kept_rows()
        if (row["workload"], row["budget"]) == (workload, budget)
    ]
    if not known:
        raise CkplanError(
            f"cannot train {workload} within {budget}: there is no row of it",
            needed="a row that a run without --train measured",
            hint=f"python scripts/compiled.py --only {workload} --budgets {budget}",
        )
    spec = spec_of(workload, SETTINGS[workload])
    return {**known[0], "training": training(spec, budget, steps, SEED)}


def verified(workload: str, budget: str, steps: int) -> dict[str, Any]:
    """What ``verify --compile`` finds, or why it refuses."""
    try:
        return run_ckplan(
            "verify",
            target_of(workload),
            *with_settings(SETTINGS[workload]),
            "--compile",
            *("--budget", budget, "--steps", str(steps)),
            *("--seed", str(SEED)),
        )
    except CkplanError as error:
        return {"refused": error.what.partition(" failed: ")[2]}


def kept_rows() -> list[dict[str, Any]]:
    """All rows measured so far, by workload and budget."""
    return rows_of("compiled", lambda row: (row["workload"], row["budget"]))


def main() -> int:
    """Measure the rows asked for, and report all that there are."""
    args = _arguments()
    for workload in chosen(SETTINGS, args.only):
        for budget in BUDGETS[workload] if args.budgets is None else args.budgets:
            say(f"{workload}: {'train' if args.train else 'verify'} within {budget}")
            found = (
                trained(workload, budget, args.train)
                if args.train
                else verified(workload, budget, args.steps)
            )
            row = {"workload": workload, "budget": budget, **found}
            keep("compiled", [row], ("workload", "budget"))
    ordered = kept_rows()
    parts = [make_table(HEADERS, map(cells, ordered), texts=2)]
    trainings = [training_cells(row) for row in ordered if "training" in row]
    if trainings:
        parts.append(make_table(TRAINING_HEADERS, trainings, texts=2))
    report = Report(
        name="compiled",
        title="Plans inside torch.compile",
        doc=(__doc__ or "").partition("\n\nRows are")[0],
        parts=parts,
        broken=[line for row in ordered for line in broken(row)],
    )
    return finish(report, args, whole=True)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, only=True)
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
    parser.add_argument(
        "--train",
        metavar="N",
        type=int,
        default=0,
        help="instead, take N steps of AdamW with and without the plan, and add to the "
        "rows whether losses, graphs and bytes are the same",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
