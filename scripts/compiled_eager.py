"""The same training step, planned inside torch.compile and planned uncompiled.

Both get the same budgets: bytes between the larger of the two smallest peaks and the
smaller of the two unplanned ones; at "unplanned" both run without a plan. A step is
forward, loss and backward, parameters and batch included, gradients set to None before;
it returns the loss alone, so logits need not live until backward ends.
Peaks are measured. With `--rounds`, steps are taken by turns in one process, compiled
and uncompiled, and every round gives a ratio: the table has their median and quartiles.
Seconds of a busy machine say nothing, ratios of steps by turns a little. Rows are kept
beside the page, as JSON, so that some can be measured again:

    python scripts/compiled_eager.py --only gpt2
    python scripts/compiled_eager.py --only bert --rounds 30

Exit code 1 if a step exceeds its budget.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _compiled_rows import built, keep, kept_rows, peak_of, spec_of
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

from ckplan.units import format_bytes

SETTINGS = {
    "gpt2": ("layers=4", "width=128", "heads=4", "batch=4", "length=128"),
    "llama": ("layers=2", "width=128", "heads=4", "batch=4", "length=128", "vocab=512"),
    "bert": ("layers=1", "width=64", "heads=2", "batch=8", "length=32", "vocab=200"),
    "vit": ("layers=3", "width=128", "heads=4", "batch=8", "size=112"),
}
BUDGETS = 3
DROPPED = 2  # first rounds
HEADERS = (
    "workload",
    "budget",
    "in bytes",
    "compiled peak",
    "uncompiled peak",
    "compiled / uncompiled",
    "quartiles",
)


@dataclass
class Step:
    """A way to take the step, its measured peak, and its seconds so far."""

    take: Callable[[], None]
    peak_bytes: int
    seconds: list[float]


def measured(name: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every budget, and one without a budget."""
    from ckplan.errors import InfeasibleError
    from ckplan.solving.solve import solve_plan

    spec = spec_of(name, SETTINGS[name])
    say(f"{name}: plan uncompiled")
    graph = _profile(spec)
    say(f"{name}: plan compiled")
    planner = _planner(spec)
    try:
        planner.solve(1)
    except InfeasibleError:
        floor = planner.replayed(planner.smallest.saved).peak_bytes
    smallest = solve_plan(graph, goal="min-memory").predicted
    assert smallest is not None
    low = max(floor, smallest.peak_bytes)
    high = min(planner.unplanned.peak_bytes, smallest.unplanned_peak_bytes)
    rows = []
    for place in range(count + 1):
        budget_bytes = low + (high - low) * place // count if place < count else None
        say(f"{name}: {place + 1} of {count + 1}")
        compiled, eager = None, None
        if budget_bytes is not None:
            compiled = planner.solve(budget_bytes).plan
            eager = solve_plan(graph, budget_bytes)
        steps = {True: _compiled(spec, compiled), False: _eager(spec, eager)}
        for number in range(rounds + DROPPED if rounds else 0):
            for which in (True, False) if number % 2 else (False, True):
                begin = time.perf_counter()
                steps[which].take()
                steps[which].seconds.append(time.perf_counter() - begin)
        taken = (steps[which].seconds[DROPPED:] for which in (True, False))
        rows.append(
            {
                "workload": name,
                "budget_bytes": budget_bytes,
                "compiled": steps[True].peak_bytes,
                "eager": steps[False].peak_bytes,
                "ratios": [one / other for one, other in zip(*taken, strict=True)],
            }
        )
    return rows


def _profile(spec: Any) -> Any:
    """The step that returns its loss alone, so that no output lives in backward."""
    from ckplan import profile
    from ckplan.training.losses import arguments_of, pick_loss

    workload = built(spec)

    def step(model: Any, batch: Any) -> Any:
        args, kwargs = arguments_of(batch)
        return pick_loss(workload, model(*args, **kwargs))[0]

    return profile(workload.model, workload.batch, step=step, optimizer="none")


def _planner(spec: Any) -> Any:
    from ckplan.compiling.step import parts_of

    (planner,) = parts_of(built(spec)).planners.values()
    assert planner.candidates
    return planner


def _compiled(spec: Any, plan: Any) -> Step:
    import torch

    from ckplan.compiling import backend
    from ckplan.compiling.step import compiled_loss

    torch._dynamo.reset()  # not between the steps of a round: they would compile again
    workload = built(spec)
    how = "inductor" if plan is None else backend(plan)
    return _step(workload, compiled_loss(workload, how))


def _eager(spec: Any, plan: Any) -> Step:
    from ckplan import apply
    from ckplan.compiling.step import loss_of_model

    workload = built(spec)
    if plan is not None:
        apply(workload.model, plan)
    return _step(workload, lambda: loss_of_model(workload.model, workload))


def _step(workload: Any, loss: Callable[[], Any]) -> Step:
    import torch

    model = workload.model

    def take() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        loss().backward()

    for _ in range(3):  # plans for uncompiled steps look at the first ones
        take()
    return Step(take, peak_of(workload, take), [])


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    limit, ratios = row["budget_bytes"], row["ratios"]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive")
        if len(ratios) > 1
        else (None, None, None)
    )
    return [
        row["workload"],
        "unplanned" if limit is None else format_bytes(limit),
        "" if limit is None else f"{limit:,}",
        format_bytes(row["compiled"]),
        format_bytes(row["eager"]),
        "n/a" if middle is None else f"{middle:.3f}",
        "n/a" if low is None else f"{low:.3f} to {high:.3f}",
    ]


def main() -> int:
    """Measure the workloads asked for."""
    args = _arguments()
    for name in chosen(SETTINGS, args.only):
        found = measured(name, args.budgets, args.rounds)
        keep("compiled_eager", found, ("workload",))
    order = [*SETTINGS]
    rows = kept_rows("compiled_eager", lambda row: order.index(row["workload"]))
    over = [
        f"{row['workload']} at {format_bytes(row['budget_bytes'])}: {which} takes "
        f"{row[which] - row['budget_bytes']} B more"
        for row in rows
        for which in ("compiled", "eager")
        if row["budget_bytes"] is not None and row[which] > row["budget_bytes"]
    ]
    report = Report(
        name="compiled_eager",
        title="Planned inside torch.compile, and planned uncompiled",
        doc=__doc__,
        parts=[make_table(HEADERS, map(cells, rows), texts=2)],
        broken=over,
    )
    return finish(report, args, whole=True)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, only=True)
    parser.add_argument(
        "--budgets",
        metavar="N",
        type=int,
        default=BUDGETS,
        help=f"so many budgets  [default: {BUDGETS}]",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=0,
        help=f"time so many steps of each, after {DROPPED} more  [default: none]",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
