"""Plans inside torch.compile at many budgets, and the gradients of many families.

For every workload, budgets are spaced evenly from the smallest replayed peak to the
unplanned one. The plans for some of them are verified as ``ckplan verify --compile``
does: the compiled step takes the bytes that were replayed, within the budget, and has
the bits of the compiled unplanned step, dropout on, or differs by rounding alone. 20
budgets are solved: with more of them, the estimated time never rises. "At least" is
what no plan can go below: parameters, batch and all gradients, which are alive at the
end. Of other families, one plan is verified, the middle one of those that the solver
proposes and that recompute, cheapest first. Steps that break into several graphs take
at most what is replayed. Recurrent layers run without oneDNN. Gradients that a
step in float64 finds to be rounding alone, such as those of biases of keys,
which are zero, are left out of differences, and named below.

Rows are kept beside the page, as JSON, so that some can be measured again:

    python scripts/compiled_budgets.py
    python scripts/compiled_budgets.py --only gpt2
    python scripts/compiled_budgets.py --only zoo:opt --count 1

Exit code 1 if any row breaks the promise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from _compiled_rows import keep, spec_of
from _compiled_rows import kept_rows as rows_of
from _measuring import (
    SEED,
    Report,
    chosen,
    finish,
    make_parser,
    make_table,
    run,
    say,
)

from ckplan.errors import CkplanError
from ckplan.units import format_bytes

_SMALL = ("layers=1", "width=64", "heads=2", "batch=8", "length=32", "vocab=200")
_ZOO = ("layers=1", "batch=8", "length=64")
_IMAGES = ("batch=2", "size=32")
TEN = {
    "gpt2": _SMALL,
    "llama": _SMALL,
    "bert": _SMALL,
    "zoo:t5": ("layers=1", "batch=8", "length=64"),
    "vit": ("layers=3", "width=64", "heads=2", "batch=8", "size=64"),
    "zoo:convnext": ("stages=2", "batch=8", "size=64"),
    "resnet50": ("stages=1", "batch=4", "size=64", "classes=10"),
    "unet": ("layers=1", "width=32", "batch=4", "size=16"),
    "zoo:mixtral": ("layers=1", "batch=16", "length=64"),
    "zoo:lstm": ("batch=128", "length=4", "width=128"),
}
FAMILIES = {
    **{
        f"zoo:{name}": _ZOO
        for name in (
            *("mistral", "gemma", "bloom", "opt", "bart", "albert", "distilbert"),
            *("deberta", "electra", "lora"),
        )
    },
    "zoo:mamba": ("layers=1", "batch=2", "length=8"),
    **{
        f"zoo:{name}": _IMAGES
        for name in (
            *("efficientnet", "mobilenet", "regnet", "densenet", "inception"),
            *("vgg", "vae", "segformer"),
        )
    },
    "zoo:swin": ("batch=1", "stages=2", "size=56"),  # its windows fit these sizes
    "zoo:clip": ("layers=1", "batch=2"),
    "zoo:mixer": _IMAGES,
    "zoo:dit": ("layers=1", "batch=2"),
    "zoo:gan": ("batch=4",),
    "zoo:gru": ("batch=64", "length=4", "width=64"),
    "zoo:policy": ("steps=4", "batch=8", "width=32"),
    "mlp": (),
}
RECURRENT = ("zoo:lstm", "zoo:gru")
SWEEP = 20
HEADERS = (
    "workload",
    "budget",
    "in bytes",
    "replayed",
    "measured",
    "bits equal",
    "largest difference",
    "from eager",
    "date",
)
SWEEP_HEADERS = (
    "workload",
    "at least",
    "floor",
    "unplanned",
    "plans",
    "monotone",
    "date",
)


def measured(workload: str, count: int) -> Iterator[dict[str, Any]]:
    """A row for the model, and one for every budget."""
    import torch

    from ckplan.compiling.step import parts_of
    from ckplan.verifying.compiled_steps import verify_compiled

    spec = spec_of(workload, {**TEN, **FAMILIES}[workload])
    torch._dynamo.reset()
    torch._dynamo.config.allow_rnn = True  # else a notice, and no graph
    # oneDNN's recurrent kernels have a workspace that only they know
    torch.backends.mkldnn.set_flags(workload not in RECURRENT)
    torch.manual_seed(SEED)
    parts = parts_of(spec.build())
    found, plans = {}, [middle_of(parts)]
    if count != 1 and len(parts.runs) == 1:
        (planner,) = parts.planners.values()
        found, plans = swept(planner, count)
    if found:
        yield {"workload": workload, "place": -1, **found}
    for place, one in enumerate(plans):
        torch._dynamo.reset()
        said, _ = verify_compiled(spec, one, steps=0, seed=SEED)
        yield {
            "workload": workload,
            "place": place,
            "of": count,
            **said.as_json(),
        }


def swept(planner: Any, count: int) -> tuple[dict[str, Any], list[Any]]:
    """What 20 budgets cost, and the plans for some budgets, the smallest first."""
    from ckplan.errors import InfeasibleError

    full = planner.unplanned
    try:
        planner.solve(1)
    except InfeasibleError:
        floor = planner.replayed(planner.smallest.saved).peak_bytes
    span = full.peak_bytes - floor
    costs, saved = [], set()
    within = True
    for place in range(SWEEP):
        budget_bytes = floor + span * place // (SWEEP - 1)
        one = planner.solve(budget_bytes)
        costs.append(one.plan.predicted.overhead)
        within &= one.replayed.peak_bytes <= budget_bytes
        saved.add(one.saved)
    row = {
        "least_bytes": full.held_bytes + full.gradient_bytes,
        "floor_bytes": floor,
        "unplanned_bytes": full.peak_bytes,
        "plans": len(saved),
        "monotone": within and all(a >= b for a, b in pairwise(costs)),
    }
    budgets = [floor + span * place // count for place in range(count)]
    return row, [planner.solve(one).plan for one in budgets]


def middle_of(parts: Any) -> Any:
    """A plan: the middle one of those that recompute, the cheapest first."""
    chosen = {}
    for key, planner in parts.planners.items():
        own, *others = planner.candidates
        chosen[key] = planner.chosen(others[len(others) // 2] if others else own)
    if len(parts.runs) == 1:
        (one,) = chosen.values()
        return one.plan
    replayed = {key: one.replayed for key, one in chosen.items()}
    return parts.plan(chosen, parts.peak_bytes(replayed))


def broken(row: dict[str, Any]) -> Iterator[str]:
    """What of the promise does not hold."""
    where = row["workload"]
    if "refused" in row:
        yield f"{where}: refused: {row['refused']}"
        return
    if row["place"] < 0:
        if not row["monotone"]:
            yield f"{where}: more budget costs more"
        return
    where += f" at {format_bytes(row['budget_bytes'])}"
    if not row["passed"]:
        yield f"{where}: did not pass: {', '.join(row['different'])}"
    for which in ("", "unplanned_"):
        off = row[f"{which}replayed_peak_bytes"] - row[f"{which}measured_peak_bytes"]
        if off < 0 or (off and row.get("graphs", 1) == 1):
            yield f"{where}: {which}replay off by {off} B"


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    equal = row["loss_equal"] and row["gradients_equal"] and row["buffers_equal"]
    sizes = ("budget_bytes", "replayed_peak_bytes", "measured_peak_bytes")
    eager = row["largest_difference_from_eager"]
    return [
        row["workload"],
        f"{row['place']}/{row['of']}" if row["of"] > 1 else "middle",
        *(f"{row[size]:,}" for size in sizes),
        "yes" if equal else "no",
        f"{row['largest_difference']:.0e}" if row["largest_difference"] else "0",
        "n/a" if eager is None else f"{eager:.0e}",
        row.get("date", ""),
    ]


def unplanned_cells(row: dict[str, Any]) -> list[str]:
    """The unplanned step of a model, from any row of it."""
    sizes = ("unplanned_replayed_peak_bytes", "unplanned_measured_peak_bytes")
    bytes_of = [f"{row[size]:,}" for size in sizes]
    return [row["workload"], "unplanned", "", *bytes_of, "", "", "", ""]


def sweep_cells(row: dict[str, Any]) -> list[str]:
    """A row of the table of sweeps."""
    sizes = ("least_bytes", "floor_bytes", "unplanned_bytes")
    return [
        row["workload"],
        *(f"{row[size]:,}" for size in sizes),
        str(row["plans"]),
        "yes" if row["monotone"] else "no",
        row.get("date", ""),
    ]


def settled(rows: list[dict[str, Any]]) -> str:
    """What float64 decided, by workload; empty if nothing."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for name in row.get("rounding_alone", ()):
            found.setdefault(row["workload"], set()).add(name)
    said = "; ".join(f"{name}: {', '.join(sorted(of))}" for name, of in found.items())
    return f"Rounding alone, as float64 finds: {said}." if said else ""


def kept_rows() -> list[dict[str, Any]]:
    """All rows measured so far, by workload and budget."""
    order = [*TEN, *FAMILIES]
    return rows_of(
        "compiled_budgets", lambda row: (order.index(row["workload"]), row["place"])
    )


def main() -> int:
    """Measure the workloads asked for, and report all that there are."""
    args = _arguments()
    wanted = [] if args.page else chosen([*TEN, *FAMILIES], args.only)
    for workload in wanted:
        usual = 5 if workload in TEN else 1
        count = usual if args.count is None else args.count
        say(f"{workload}: {count} budgets")
        rows: list[dict[str, Any]] = []
        try:
            for row in measured(workload, count):
                rows.append(row)
                keep("compiled_budgets", rows, ("workload",))
        except CkplanError as error:
            place = len(rows)
            rows.append({"workload": workload, "place": place, "refused": error.what})
            keep("compiled_budgets", rows, ("workload",))
    ordered = kept_rows()
    fine = [row for row in ordered if "refused" not in row]
    table = []
    for row in fine:
        if row["place"] == 0:
            table.append(unplanned_cells(row))
        if row["place"] >= 0:
            table.append(cells(row))
    sweeps = [sweep_cells(row) for row in fine if row["place"] < 0]
    report = Report(
        name="compiled_budgets",
        title="Plans inside torch.compile, at many budgets",
        doc=(__doc__ or "").partition("\n\nRows are")[0],
        parts=[
            make_table(HEADERS, table, texts=2),
            make_table(SWEEP_HEADERS, sweeps),
            *filter(None, [settled(fine)]),
        ],
        broken=[line for row in ordered for line in broken(row)],
    )
    return finish(report, args, whole=True)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, only=True)
    parser.add_argument(
        "--count",
        metavar="N",
        type=int,
        help="verify plans for so many budgets; 0: only solve 20  "
        "[default: 5 for ten models, else 1]",
    )
    parser.add_argument(
        "--page", action="store_true", help="measure nothing, write the page anew"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
