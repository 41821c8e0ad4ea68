"""Search the settings of a model or a workload: profile, and tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.solving.planner import Planner
from ckplan.solving.solve import limit_of_objective
from ckplan.tracing.other_steps import OtherSteps
from ckplan.tracing.path_check import NOTE_SAME
from ckplan.tracing.profile import profile, profile_workload
from ckplan.tracing.rows import model_rows, spec_rows
from ckplan.tracing.target import begin_copy, runs_nothing
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import DEFAULT_TRAINING, Training, amp_name
from ckplan.training.workload import as_workload, with_batch_dim, with_rows
from ckplan.tuning.recorded import objective_of, tune_recorded
from ckplan.tuning.searches import Record, Recorder
from ckplan.tuning.settings import Way, with_scaler
from ckplan.tuning.tune import Tuning
from ckplan.tuning.tuned import Tuned

if TYPE_CHECKING:
    from torch import nn

    from ckplan.compiling.with_update import CompiledSteps


def tune(
    model: nn.Module,
    batch: Any,
    budget: str | int | None = None,
    *,
    total_batch: int | None = None,
    allow: str | Sequence[str] = (),
    expandable_segments: bool = False,
    batch_dim: int | None = None,
    **how: Any,
) -> Tuned:
    """Search the setting with the most samples per second that fits in memory.

    Searched are the micro-batch, accumulation (with ``total_batch``), plans, and
    kernels of the optimizer; further levers where ``allow`` has them.

    Args:
        model: The model in training mode; copies are traced.
        batch: One batch of any number of rows; rows are cut or repeated.
        budget: As of ``auto``; by default the memory of the card that ``gpu`` names.
        total_batch: Rows per step of the optimizer: micro-batches divide it.
        allow: Levers that change results: ``bf16``, ``fp16``, ``adafactor``,
            ``adamw8bit``; of a file or a source also ``pure-bf16``, ``lora`` and, for a
            card, ``compile``. Of plans: ``tiles``, with ``close`` also where that
            rounds, and ``offload`` to host memory. With ``world_size``: ``ddp``,
            ``zero1``, ``zero2``, ``zero3``, ``fsdp2``.
        expandable_segments: Whether the card's allocator uses them.
        batch_dim: The dimension of the batch's tensors that counts rows; 0 by default,
            which is refused if it is time to a recurrent or attention module.
        how: Keyword arguments of ``profile``. With ``amp="fp16"`` a ``scaler`` is
            assumed, and a note of the answer says so.

    Returns:
        The best setting, the table of levers, and the curve over batches;
        ``ckplan.tuned_plan`` makes its plan.

    Raises:
        WorkloadError: The rows of the batch cannot be found, or the model cannot be
            trained.
        InfeasibleError: Not one row fits.
        CkplanError: As of ``auto``, or a lever in ``allow`` is unknown.
    """
    record, rows = recorder(model, batch, how, batch_dim)
    return tune_recorded(
        record,
        rows,
        _way(how),
        budget=budget,
        gpu=how.get("gpu"),
        expandable=expandable_segments,
        accumulate=how.get("accumulate", 1),
        total_batch=total_batch,
        allow=allow,
        ranks=1 if how.get("shard") else how.get("world_size", 1),
    )


def largest_batch(
    model: nn.Module,
    batch: Any,
    budget: str | int | None = None,
    *,
    planned: bool = True,
    expandable_segments: bool = False,
    batch_dim: int | None = None,
    **how: Any,
) -> int:
    """The largest number of rows that fits in memory; 0 if not one does.

    Args:
        model: The model in training mode.
        batch: One batch of any number of rows; rows are cut or repeated.
        budget: As of ``auto``; by default the memory of the card that ``gpu`` names.
        planned: With the best plan, or without any.
        expandable_segments: Whether the card's allocator uses them.
        batch_dim: As of ``tune``.
        how: Keyword arguments of ``profile``.

    Raises:
        WorkloadError: As of ``tune``.
        CkplanError: As of ``auto``.
    """
    record, rows = recorder(model, batch, how, batch_dim)
    way, accumulate = with_scaler(_way(how)), how.get("accumulate", 1)
    objective = objective_of(budget, how.get("gpu"), expandable_segments)
    planner = Planner(record(way, rows, min(accumulate, 2)))
    limit = limit_of_objective(planner, objective)
    assert limit is not None, "internal error: no limit"
    found = Tuning(record, limit, way=way, rows=rows, accumulate=accumulate).search(way)
    largest = found.largest_planned if planned else found.largest_unplanned
    if largest and largest not in found.batches_of(largest).recorded:
        found.check(largest)  # what was drawn is now recorded there
        largest = found.largest_planned if planned else found.largest_unplanned
    return largest


def recorder(
    model: nn.Module, batch: Any, how: dict[str, Any], batch_dim: int | None = None
) -> tuple[Record, int]:
    """A function that profiles a model at any batch, and the rows of this batch.

    Raises:
        WorkloadError: The rows of the batch cannot be found.
    """
    fixed = {k: v for k, v in how.items() if k not in _OF_WAY}
    if not fixed.get("shard"):
        fixed.pop("world_size", None)  # of levers
    parts = {"model": model, "batch": batch, "target": fixed.pop("target", None)}
    keys = ("loss_fn", "step")
    given = {key: fixed.pop(key, None) for key in keys}
    parts |= {key: value for key, value in given.items() if value is not None}
    whole = as_workload(parts, "the call of tune()")
    whole = with_batch_dim(whole, batch_dim)
    rows = model_rows(whole, named=batch_dim is not None)
    proved, steps = _ProvedPaths(), _KnownSteps(how.get("clip"))

    def profiled(way: Way, rows: int, accumulate: int, times: int) -> Graph:
        if way.options or way.compiled:
            lever = way.options[0][0] if way.options else "compile"
            raise WorkloadError(
                f"cannot change {way.title} of a model that exists already",
                needed="a file or a source, from which the model can be made again",
                hint=f"ckplan tune model.py --allow {lever}",
            )
        cut = with_rows(whole, rows)
        graph = profile(
            model,
            cut.batch,
            target=cut.target,
            loss_fn=whole.loss,
            step=whole.step,
            optimizer=way.optimizer,
            amp=way.amp,
            scaler=way.scaler,
            accumulate=accumulate,
            replay=False,
            in_step=how.get("in_step", True) and steps.of(way, rows, accumulate, times),
            check=not proved.has(way),
            batch_dim=batch_dim,
            fresh=bool(how.get("fresh")) or times > 0,
            **{k: v for k, v in fixed.items() if k not in _SET_HERE},
        )
        proved.learn(way, graph)
        steps.learn(way, rows, accumulate, graph)
        options: dict[str, Any] = {**graph.options, "micro_batch": rows}
        return replace(graph, options=options)

    return _recorder(profiled, _way(how), proved, steps, how), rows


def recorder_of_spec(
    spec: WorkloadSpec, training: Training = DEFAULT_TRAINING, **how: Any
) -> tuple[Record, int, Way]:
    """The same for a workload of a file or a source, and how its step trains.

    Args:
        spec: The workload.
        training: How its step trains before any lever is pulled.
        how: Keyword arguments of ``profile_workload``.
    """
    way = Way(training.amp, training.optimizer, training.scaler)

    def profiled(way: Way, rows: int, accumulate: int, times: int) -> Graph:
        options = {**spec.options, **dict(way.options)}
        at_rows = replace(spec, rows=rows, options=options)
        if way.compiled:
            step = record(replace(way, compiled=False), rows, accumulate)
            return compiled().with_update(at_rows, step, way.amp)
        check = not proved.has(way)
        graph = profile_workload(
            at_rows,
            training=steps.training_of(way, accumulate),
            replay=False,
            check=check,
            in_step=steps.of(way, rows, accumulate, times),
            **{**how, "fresh": bool(how.get("fresh")) or times > 0},
        )
        proved.learn(way, graph)
        steps.learn(way, rows, accumulate, graph)
        return graph

    @cache
    def compiled() -> CompiledSteps:
        from ckplan.compiling.with_update import CompiledSteps

        return CompiledSteps(how)

    proved, steps = _ProvedPaths(), _KnownSteps(training.clip)
    rows = spec.rows or spec_rows(spec)
    record = _recorder(profiled, way, proved, steps, how)
    return record, rows, way


def _recorder(
    profiled: Callable[[Way, int, int, int], Graph],
    way: Way,
    proved: _ProvedPaths,
    steps: _KnownSteps,
    how: dict[str, Any],
) -> Recorder:
    """Records steps, those of a card that is not here also in copies of the process.

    No kernel runs to record these, so copies disturb no measurement.
    """

    def learn(way: Way, rows: int, accumulate: int, graph: Graph) -> bool:
        proved.learn(way, graph)
        if proved.has(way):
            steps.learn_from_copy(way, rows, accumulate, graph)
        return proved.has(way)

    def prepare() -> None:
        begin_copy()
        proved.take_for_granted(way)  # what is recorded here meanwhile proves it

    if not runs_nothing(how.get("gpu")):
        return Recorder(profiled)
    return Recorder(profiled, learn, prepare)


class _ProvedPaths:
    """Ways whose path on fake tensors was proved at some batch."""

    def __init__(self) -> None:
        self._proved: set[tuple[str | None, tuple[tuple[str, str], ...]]] = set()

    def has(self, way: Way) -> bool:
        return (way.amp, way.options) in self._proved

    def learn(self, way: Way, graph: Graph) -> None:
        if any(note.startswith(NOTE_SAME) for note in graph.notes):
            self.take_for_granted(way)

    def take_for_granted(self, way: Way) -> None:
        """Compare no more paths of steps with these options."""
        self._proved.add((way.amp, way.options))


class _KnownSteps:
    """Steps that were taken or recorded, by what others share with them."""

    def __init__(self, clip: float | None) -> None:
        self._clip = clip
        self._known: dict[tuple[str | None, tuple[tuple[str, str], ...]], OtherSteps]
        self._known = {}
        self._recorded: dict[tuple[Any, ...], Graph] = {}
        self._times: dict[tuple[str | None, tuple[tuple[str, str], ...]], int] = {}

    def of(self, way: Way, rows: int, accumulate: int, times: int) -> OtherSteps:
        """The steps that share forward and backward with one that is recorded next.

        What is recorded once more takes none of the seconds that were measured before.
        """
        key = way.amp, way.options
        found = self._known.setdefault(key, OtherSteps())
        if times > self._times.get(key, 0):
            self._times[key] = times
            found = self._known[key] = OtherSteps(first=found.first)
        like = (way.amp, way.scaler, way.options, rows, accumulate)
        found.like, found.rows = self._recorded.get(like), rows
        return found

    def learn(self, way: Way, rows: int, accumulate: int, graph: Graph) -> None:
        """Remember a step that was recorded."""
        like = (way.amp, way.scaler, way.options, rows, accumulate)
        self._recorded.setdefault(like, graph)

    def learn_from_copy(
        self, way: Way, rows: int, accumulate: int, graph: Graph
    ) -> None:
        """Remember a step that a copy of this process recorded, and its update."""
        known = self.of(way, rows, accumulate, 0)
        known.learn_update(self.training_of(way, accumulate), graph)
        self.learn(way, rows, accumulate, graph)

    def training_of(self, way: Way, accumulate: int) -> Training:
        """Options of a step."""
        return Training(way.optimizer, way.amp, accumulate, self._clip, way.scaler)


_SET_HERE = ("replay", "check", "in_step", "fresh")
_OF_WAY = ("amp", "optimizer", "scaler", "accumulate")


def _way(how: dict[str, Any]) -> Way:
    return Way(amp_name(how.get("amp")), how.get("optimizer"), how.get("scaler", False))
