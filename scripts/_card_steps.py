"""The steps of one model that ``on_card`` takes: predicted, then measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from _card_results import RERUN, UNPLANNED, Costs, Row
from _card_worker import CardProcess, DeterministicProcess, at_once
from _measuring import ROOT, SEED, workload_path
from accuracy import SHARES
from allocated import TYPES, predicted

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Timeline, simulate
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.verifying.compare_steps import differing_results
from ckplan.verifying.step_process import interleave
from ckplan.verifying.worker import FirstSteps

WARM_UP_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 2, 5, 30
CARD_BYTES = 75e9  # of the card for which the batches are made

Write = Callable[[Sequence[Row]], None]


@dataclass(frozen=True)
class Model:
    """A workload and its options."""

    name: str
    target: str
    options: Mapping[str, Any]

    def spec(self, halvings: int, settings: Mapping[str, Any]) -> WorkloadSpec:
        """Where it comes from, its batch halved a number of times."""
        options = dict(self.options)
        if "batch" in options:
            options["batch"] = max(1, options["batch"] >> halvings)
        return WorkloadSpec(self.target, {**options, **settings})


def _model(name: str, where: str, **options: Any) -> Model:
    path, colon, factory = where.partition(":")
    return Model(name, f"{ROOT / workload_path(path)}{colon}{factory}", options)


_BASE = {"layers": 12, "width": 768, "heads": 12}
MODELS = (
    _model("gpt2", "gpt2", **_BASE, batch=6, length=1024, vocab=50257),
    _model("resnet50", "resnet50", batch=128, size=224),
    _model("llama", "llama", **_BASE, groups=4, batch=8, length=1024),
    _model("bert", "bert", **_BASE, batch=32, length=256),
    _model("mixtral", "zoo:mixtral", layers=6, batch=16, length=512),
    _model("vit", "vit", **_BASE, batch=64),
    _model("t5", "zoo:t5", layers=6, batch=32, length=256),
    _model("convnext", "zoo:convnext", batch=128, size=224),
)


def halvings_for(card_bytes: int | None) -> int:
    """How often batches are halved, so that all processes fit on a card together."""
    if not card_bytes:
        return 0
    return max(0, math.ceil(math.log2(CARD_BYTES / card_bytes)))


def chosen(only: Sequence[str]) -> list[Model]:
    """All models, or some; a workload file of one's own is a model, too.

    Raises:
        CkplanError: There is no such model.
    """
    there = {model.name: model for model in MODELS}
    for name in only:
        if ".py" in name:
            there[name] = Model(WorkloadSpec(name).name, name, {})
        elif name not in there:
            raise CkplanError(
                f"cannot find the model {name!r}",
                needed=f"one of {', '.join(there)}, or the path of a workload",
                hint=f"--only {MODELS[0].name}",
            )
    return [there[name] for name in dict.fromkeys(only)] or list(MODELS)


# -- predicted -----------------------------------------------------------------------


NUM_STEPS = 2 + len(SHARES)  # unplanned, every layer rerun, planned


@dataclass(frozen=True)
class Prepared:
    """What is said of a model's steps before any is taken, and their plans."""

    rows: tuple[Row, ...]
    plans: tuple[Plan | None, ...]


def profiled(types: str, spec: WorkloadSpec, device: str) -> Graph:
    """The step of a model, its ops measured on the device."""
    return profile_workload(spec, training=TYPES[types], device=device)


def planned(name: str, types: str, graph: Graph) -> Prepared:
    """A row for each way to take a step, with its plan."""
    planner = Planner(graph)
    rows = [_row(name, types, UNPLANNED, planner.unplanned)]
    plans: list[Plan | None] = [None]
    for timeline, regions in planner.standard_baselines.every_call:
        rows.append(_row(name, types, RERUN, timeline))
        plans.append(Plan(graph.model, regions=describe(graph, regions)))
    peak_bytes, floor_bytes = planner.unplanned.peak_bytes, planner.floor.peak_bytes
    for share in SHARES:
        budget_bytes = peak_bytes - int(share * (peak_bytes - floor_bytes))
        solution = planner.solve(budget_bytes)
        row = _row(name, types, f"planned, {share:.0%} down", solution.timeline)
        rows.append(replace(row, budget_bytes=budget_bytes))
        plans.append(to_plan(graph, solution))
    return Prepared(tuple(rows), tuple(plans))


def add_roofline(prepared: Prepared, spec: WorkloadSpec, card: str) -> Prepared:
    """The same, with what ``--gpu`` says of a card."""
    training = TYPES[prepared.rows[0].types]
    graph = profile_workload(
        spec, training=training, device="cuda", gpu=card, replay=False
    )
    found = []
    for row, plan in zip(prepared.rows, prepared.plans, strict=True):
        regions = resolve(plan, graph) if plan else ()
        found.append(replace(row, roofline=_costs(simulate(graph, regions))))
    return replace(prepared, rows=tuple(found))


def card_like(num_bytes: int, capability: tuple[int, int]) -> str | None:
    """The card of ``ckplan gpus`` with that capability, and memory most like it."""
    cards = [card for card in gpus.load().values() if card.capability == capability]
    apart = {card.name: abs(card.capacity_bytes - num_bytes) for card in cards}
    return min(apart, key=apart.__getitem__, default=None)


def _row(name: str, types: str, step: str, timeline: Timeline) -> Row:
    on_gpu = any(op.launch_seconds for op in timeline.graph.ops)
    found = predicted(timeline)
    return Row(
        name,
        types,
        step,
        predicted_bytes=tuple(found) if on_gpu else (found.peak, None, None),
        predicted=_costs(timeline),
    )


def _costs(timeline: Timeline) -> Costs:
    graph = timeline.graph
    planned = bool(timeline.effects)
    on_gpu = any(op.launch_seconds for op in graph.ops)
    device = sum(op.seconds for op in graph.ops) if on_gpu and not planned else None
    seconds = graph.step_seconds + timeline.recompute_seconds
    return Costs(seconds, timeline.overhead, device)


# -- measured ------------------------------------------------------------------------


def start(
    spec: WorkloadSpec, types: str, device: str, kind: type[CardProcess] = CardProcess
) -> CardProcess:
    """A process that trains a model once it is given a plan, or None."""
    return kind(spec, None, TYPES[types], seed=SEED, device=device)


class Measurement:
    """Takes the steps of a model, and tells what is known after each."""

    def __init__(
        self, prepared: Prepared, spec: WorkloadSpec, device: str, write: Write
    ) -> None:
        self._rows = list(prepared.rows)
        self._plans = prepared.plans
        self._start = partial(start, spec, self._rows[0].types, device)
        self._write = write

    def run(self, processes: Sequence[CardProcess], seconds: float) -> None:
        """Take first steps in all processes at once, then timed ones in turns.

        Args:
            processes: One for every row, started.
            seconds: How long timed steps may take, about.
        """
        for process, plan in zip(processes, self._plans, strict=True):
            process.carry(plan)
        first = self._first_steps(processes)
        self._compare(first)
        running = [i for i, row in enumerate(self._rows) if not row.failed]
        self._time([(i, processes[i]) for i in running], seconds)
        self._rows = [replace(row, done=True) for row in self._rows]
        self._write(self._rows)

    def _first_steps(self, processes: Sequence[CardProcess]) -> list[FirstSteps | None]:
        def take(place: int) -> FirstSteps | None:
            try:
                return processes[place].first_steps()
            except CkplanError as error:
                self._rows[place] = replace(
                    self._rows[place], failed=error.what, done=True
                )
                return None

        found = []
        for place, first in enumerate(at_once(take, range(len(processes)))):
            found.append(first)
            if first is not None:
                row = self._rows[place]
                self._rows[place] = replace(row, measured_bytes=_bytes_of(first))
            self._write(self._rows)
        return found

    def _compare(self, first: Sequence[FirstSteps | None]) -> None:
        """Bits of every planned step beside those of the unplanned one."""
        unplanned = first[0]
        for place, planned in enumerate(first):
            if place == 0 or unplanned is None or planned is None:
                continue
            bits = self._bits(unplanned, planned, self._plans[place])
            self._rows[place] = replace(self._rows[place], bits=bits)
            self._write(self._rows)

    def _bits(
        self, unplanned: FirstSteps, planned: FirstSteps, plan: Plan | None
    ) -> str:
        """Whether all are equal; where chance decides, with deterministic kernels."""
        if not differing_results((unplanned, planned)):
            return "yes"
        try:
            again = []
            for one in (None, plan):
                with self._start(DeterministicProcess) as process:
                    process.carry(one)
                    again.append(process.first_steps())
        except CkplanError as error:
            return f"no, and not to be told from chance: {error.what}"
        different = differing_results((again[0], again[1])) or ()
        if not different:
            return "yes, with deterministic kernels"
        return "no: " + ", ".join(sorted({result.kind for result in different}))

    def _time(self, running: Sequence[tuple[int, CardProcess]], seconds: float) -> None:
        """Seconds of the step in every process, in turns; then of the device alone."""
        if not running:
            return
        processes = [process for _, process in running]
        try:
            start = time.monotonic()
            interleave(processes, WARM_UP_ROUNDS)
            round_seconds = (time.monotonic() - start) / WARM_UP_ROUNDS
            rounds = int(seconds / max(round_seconds, 1e-9))
            rounds = min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)
            taken = interleave(processes, rounds)
            device = [process.device_time() for process in processes]
        except CkplanError as error:
            self._fail((place for place, _ in running), error.what)
            return
        unplanned = taken[0] if running[0][0] == 0 else []
        for (place, _), mine, busy in zip(running, taken, device, strict=True):
            self._rows[place] = replace(
                self._rows[place],
                seconds=tuple(mine),
                unplanned_seconds=tuple(unplanned),
                device_seconds=busy and busy.seconds,
                device_is_exact=busy is None or busy.is_exact,
            )

    def _fail(self, places: Iterable[int], why: str) -> None:
        for place in places:
            self._rows[place] = replace(self._rows[place], failed=why)


def _bytes_of(first: FirstSteps) -> tuple[int | None, ...]:
    gpu = first.gpu_allocator_stats
    if gpu is None:
        return first.peak_bytes, None, None
    return first.peak_bytes, gpu.allocated_peak_bytes, gpu.reserved_peak_bytes
