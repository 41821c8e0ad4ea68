"""``tune`` on any step that can be recorded, or on two traces of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.solving.card_memory import check_profiled_for
from ckplan.solving.planner import Planner
from ckplan.solving.solve import Objective, limit_of_objective
from ckplan.tuning.answer import tokens_per_sample
from ckplan.tuning.batches import probe_rows
from ckplan.tuning.known_batches import batches_of
from ckplan.tuning.searches import Record, Recorder, recorded_batches
from ckplan.tuning.settings import AS_TRACED, Way, with_scaler
from ckplan.tuning.tune import Tuning
from ckplan.tuning.tuned import Tuned

NOTE_SCALER = (
    "assumed --scaler: without one, small gradients of fp16 autocast become zero"
)
NOTE_DRAWN = "batch {}: drawn through the two traces, not profiled itself"


def tune_recorded(
    record: Record,
    rows: int,
    way: Way,
    *,
    budget: str | int | None,
    gpu: str | None,
    expandable: bool = False,
    accumulate: int = 1,
    total_batch: int | None = None,
    allow: str | Sequence[str] = (),
    ranks: int = 1,
    tokens: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Tuned:
    """Search the settings of any step that ``record`` records; see ``tune``."""
    objective = objective_of(budget, gpu, expandable)
    given, way = way, with_scaler(way)
    tell(f"profiling {way.title} at batch {rows}")
    many = recorded_batches(accumulate, total_batch)
    with ExitStack() as stack:
        if isinstance(record, Recorder):
            others = (one for one in probe_rows(rows) if one != rows)
            record.begin((way, other, many) for other in others)
            stack.callback(record.end)
        graph = record(way, rows, many)
        per_sample = tokens_per_sample(graph) if tokens else None
        limit = limit_of_objective(Planner(graph), objective)
        assert limit is not None, "internal error: no limit"
        tuning = Tuning(
            record,
            limit,
            way=way,
            rows=rows,
            accumulate=accumulate,
            total=total_batch,
            allow=allow,
            ranks=ranks,
            tell=tell,
        )
        found = replace(tuning.run(), tokens_per_sample=per_sample)
    if way == given:
        return found
    return replace(found, notes=(NOTE_SCALER, *found.notes))


def tune_traces(
    traces: Sequence[Graph],
    *,
    budget: str | int | None = None,
    gpu: str | None = None,
    expandable: bool = False,
    total_batch: int | None = None,
    tokens: bool = False,
) -> Tuned:
    """The same for traces of one step at two batches, as they train.

    No lever is pulled, as a trace holds one way to train.

    Args:
        traces: Two traces of the same workload, of two batches.
        budget: As of ``auto``.
        gpu: The card that both were made for.
        expandable: Whether the card's allocator uses expandable segments.
        total_batch: Rows per step of the optimizer; only of traces that accumulate.
        tokens: Whether to count the tokens of a sample.

    Raises:
        InfeasibleError: Not one row fits.
        CkplanError: There are not two traces, they differ in more than their batch, or
            they are of another card.
    """
    if len(traces) != 2:
        raise CkplanError(
            f"cannot search batches in {len(traces)} trace" + "s" * (len(traces) != 1),
            needed="two traces of the same workload at two batches, or the workload",
            hint="ckplan profile model.py --micro-batch 4 -o four.json.gz, once more "
            "with 8, then ckplan tune four.json.gz eight.json.gz",
        )
    if gpu is not None:
        for trace in traces:
            check_profiled_for(trace, gpus.find(gpu))
    known = batches_of((traces[0], traces[1]))
    assert known.rows is not None, "internal error: a batch without rows"
    many = traces[0].num_batches

    def record(way: Way, rows: int, accumulate: int) -> Graph:
        del way  # of all levers, none is allowed
        if (accumulate > 1) != (many > 1):
            raise CkplanError(
                f"not in the traces: {accumulate} micro-batches, they have {many}",
                needed="with --total-batch, traces of --accumulate 2 or more",
                hint="the workload itself in place of its traces",
            )
        return known.at(rows)

    found = tune_recorded(
        record,
        known.rows,
        AS_TRACED,
        budget=budget,
        gpu=gpu,
        expandable=expandable,
        accumulate=many,
        total_batch=total_batch,
        tokens=tokens,
    )
    if found.best.batch in (known.rows, known.other_rows):
        return found
    note = NOTE_DRAWN.format(found.best.batch)
    best = replace(found.best, profiled=False)
    return replace(found, best=best, notes=(*found.notes, note))


def objective_of(
    budget: str | int | None, gpu: str | None, expandable: bool
) -> Objective:
    """The limit that a search has.

    Raises:
        CkplanError: There is neither a budget nor a card.
    """
    if budget is None and gpu is None:
        raise CkplanError(
            "cannot search without a limit: there is neither a budget nor a card",
            needed="budget='12GiB' or budget='80%', or gpu=, a card of `ckplan gpus`",
            hint="ckplan.tune(model, batch, budget='12GiB')",
        )
    return Objective(budget, gpu=gpu if budget is None else None, expandable=expandable)
