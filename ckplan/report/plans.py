"""The reports of ``solve`` and ``show PLAN``: regions and costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.graph.batch import batch_rows
from ckplan.plan.plan import Plan, PlannedRegion, Prediction
from ckplan.plan.tiles_in_file import tiles_content
from ckplan.plan.workload import as_arguments
from ckplan.report.comparison import (
    baseline_json,
    baselines_legend,
    baselines_table,
)
from ckplan.report.extra_work import extra_work_json, extra_work_words
from ckplan.report.remedies import remedies_table, remedy_json
from ckplan.report.reserved import reserved_facts, reserved_json
from ckplan.report.tables import add_row, key_value_table, make_table, section
from ckplan.report.tiles import tiles_json, tiles_rows
from ckplan.simulating.allocations import Reserved
from ckplan.simulating.extra_work import ExtraWork, extra_work
from ckplan.simulating.simulate import Timeline
from ckplan.solving.remedies import Remedy
from ckplan.solving.solution import ExactResult, Solution

_INSTEAD = "In place of this plan, or for a cheaper one"


def solution_report(
    solution: Solution,
    plan: Plan,
    reserve_bytes: int,
    reserved: Reserved | None = None,
    instead: Sequence[Remedy] = (),
) -> RenderableType:
    """Peak and time before and after, what else would do, the bound, the baselines."""
    title = f"Plan for {plan.model} within {_size(solution.budget_bytes)}"
    return Group(
        section(title, _before_and_after(solution, plan.predicted)),
        *([section(_INSTEAD, remedies_table(instead))] if instead else []),
        section(
            "Budget, bound and floor",
            key_value_table(_budget_rows(solution, plan, reserve_bytes, reserved)),
        ),
        section(
            "Common strategies under the same budget",
            baselines_table([*solution.baselines, solution.as_baseline]),
            baselines_legend(solution.baselines),
        ),
        section("Regions", _regions(plan)),
    )


def _extra_work(timeline: Timeline) -> ExtraWork:
    """Per sample, or per micro-batch where its rows are not known."""
    return extra_work(timeline, batch_rows(timeline.graph) or 1)


def solution_json(
    solution: Solution,
    plan: Plan,
    reserve_bytes: int,
    path: str,
    reserved: Reserved | None = None,
    instead: Sequence[Remedy] = (),
) -> dict[str, Any]:
    """A solution as JSON; ``budget_bytes`` includes reserve and gaps."""
    timeline = solution.timeline
    step_seconds = timeline.unplanned_seconds
    return {
        "model": plan.model,
        "plan": path,
        "budget_bytes": solution.limit.bytes + reserve_bytes,
        "reserve_bytes": reserve_bytes,
        "gap_bytes": solution.fragmentation_bytes,
        "peak_bytes": timeline.peak_bytes,
        "peak_at": timeline.peak_at,
        **reserved_json(reserved),
        "unplanned_peak_bytes": solution.unplanned.peak_bytes,
        "unplanned_peak_at": solution.unplanned.peak_at,
        "floor_bytes": solution.floor.peak_bytes,
        "floor_at": solution.floor.peak_at,
        "floor_owner": solution.floor.owner,
        "floor_tensors": list(solution.floor.largest),
        "overhead": timeline.overhead,
        "engine_overhead": timeline.engine_overhead,
        **extra_work_json(_extra_work(timeline)),
        "moved_bytes": timeline.moves.moved_bytes,
        "stall_seconds": timeline.stall_seconds,
        "host_bytes": timeline.moves.host_bytes,
        "engine_seconds": timeline.engine_seconds,
        "engine_hidden_seconds": timeline.hidden_engine_seconds,
        "launch_bound": _is_launch_bound(timeline),
        "bound_overhead": solution.bound_overhead,
        "gap": solution.gap,
        "exact": solution.exact and asdict(solution.exact),
        "recompute_seconds": timeline.recompute_seconds,
        "batches_per_step": timeline.graph.num_batches,
        "unplanned_step_seconds": step_seconds,
        "step_seconds": step_seconds + timeline.recompute_seconds,
        "instead": [remedy_json(one) for one in instead],
        "baselines": [baseline_json(baseline) for baseline in solution.baselines],
        "tiles": tiles_json(solution, plan),
        "without_tiles": solution.without_tiles and asdict(solution.without_tiles),
        "regions": [_region_json(region) for region in plan.regions],
    }


def plan_report(plan: Plan) -> RenderableType:
    """The full contents of a plan file."""
    predicted = plan.predicted
    rows = [("made for", as_arguments(plan.workload))] if plan.workload else []
    rows += [("fingerprint", text) for text in _fingerprint_lines(plan)]
    if plan.budget_bytes is not None:
        rows.append(("budget", _size(plan.budget_bytes)))
    if predicted is not None:
        unplanned = _size(predicted.unplanned_peak_bytes)
        peak = f"{_size(predicted.peak_bytes)} during {predicted.peak_at}"
        overhead = units.format_percent(predicted.overhead, sign=True)
        rows += [
            ("predicted peak", f"{peak}; unplanned {unplanned}"),
            ("predicted overhead", f"{overhead} of an unplanned step"),
            *_moves(predicted.moved_bytes, predicted.stall_seconds),
        ]
    for name, least in plan.bound.items():
        percent = units.format_percent(least, sign=True)
        rows.append(("bound", f"{percent} at least ({name.replace('_', ' ')})"))
    return Group(
        section(f"Plan for {plan.model or 'any model'}", key_value_table(rows)),
        section("Regions", _regions(plan, in_full=True)),
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, with the keys of the plan file."""
    predicted = plan.predicted
    return {
        "model": plan.model,
        "workload": dict(plan.workload),
        "fingerprint": dict(plan.fingerprint),
        "budget_bytes": plan.budget_bytes,
        "predicted": predicted
        and {
            "peak_bytes": predicted.peak_bytes,
            "peak_at": predicted.peak_at,
            "overhead": predicted.overhead,
            "unplanned_peak_bytes": predicted.unplanned_peak_bytes,
            "moved_bytes": predicted.moved_bytes,
            "stall_seconds": predicted.stall_seconds,
            "host_bytes": predicted.host_bytes,
        },
        "bound": dict(plan.bound),
        "regions": [_region_json(region) for region in plan.regions],
    }


def _before_and_after(solution: Solution, predicted: Prediction | None) -> Table:
    before, after = solution.unplanned, solution.timeline
    seconds = after.unplanned_seconds
    planned_seconds = seconds + after.recompute_seconds
    table = make_table("predicted", "unplanned", "planned")
    add_row(table, "peak", _size(before.peak_bytes), _size(after.peak_bytes))
    batches = after.graph.num_batches
    step = "step" if batches == 1 else f"step of {batches} batches"
    add_row(table, step, *map(units.format_seconds, (seconds, planned_seconds)))
    rounded = after.overhead if predicted is None else predicted.overhead
    overhead = units.format_percent(rounded, sign=True)  # as `show` rounds it
    add_row(table, "overhead", "", overhead, bold=True)
    return table


def _budget_rows(
    solution: Solution, plan: Plan, reserve_bytes: int, reserved: Reserved | None
) -> list[tuple[str, str]]:
    before, after, floor = solution.unplanned, solution.timeline, solution.floor
    limit = _size(solution.budget_bytes)
    whole = solution.limit.bytes + reserve_bytes
    others = [f"the reserve of {_size(reserve_bytes)}"] if reserve_bytes else []
    if solution.fragmentation_bytes:
        others.append(
            f"{_size(solution.fragmentation_bytes)} for fragmentation of PyTorch's "
            "allocator"
        )
    if others:
        limit += f", which is {_size(whole)} less {' and '.join(others)}"
    bound = units.format_percent(solution.bound_overhead, sign=True)
    return [
        ("budget", limit),
        ("peak", f"during {after.peak_at}; unplanned, during {before.peak_at}"),
        *reserved_facts(reserved, solution.limit, after),
        *_engine(after),
        *_extra_rows(solution),
        *tiles_rows(solution, plan),
        ("bound", f"{bound}: {_bounded(after)} costs less"),
        *_exact_rows(solution.exact),
        ("gap", f"{units.format_percent(solution.gap)} between bound and plan"),
        (
            "floor",
            f"{_size(floor.peak_bytes)} during {floor.peak_at}: the smallest peak of "
            f"any plan found",
        ),
        *(("", tensors) for tensors in floor.largest),
    ]


def _extra_rows(solution: Solution) -> list[tuple[str, str]]:
    if not solution.regions:
        return []
    return [("extra work", extra_work_words(_extra_work(solution.timeline)))]


def _moves(moved_bytes: int, stall_seconds: float) -> list[tuple[str, str]]:
    """What moves to a file, and how long a step waits for it."""
    if not moved_bytes:
        return []
    waits = units.format_seconds(stall_seconds)
    return [("offload", f"{_size(moved_bytes)} out and back; a step waits {waits}")]


def _bounded(timeline: Timeline) -> str:
    """What a bound is of."""
    if timeline.graph.generated:
        return "no plan whose code was generated"
    return "no schedule of these ops within the budget"


def _engine(after: Timeline) -> list[tuple[str, str]]:
    """The engine's share, what moves, and on a GPU what the step waits for."""
    device, launching = map(units.format_seconds, after.queues)
    rows = _moves(after.moves.moved_bytes, after.stall_seconds)
    taken = units.format_seconds(after.engine_seconds)
    beside = after.hidden_engine_seconds
    if after.engine_overhead:
        percent = units.format_percent(after.engine_overhead, sign=True)
        why = "for the engine's own work; included in the overhead"
        if beside:
            why += f" ({units.format_seconds(beside)} of {taken} beside the device)"
        rows.append(("engine", f"{percent} {why}"))
    elif after.engine_seconds:
        rows.append(("engine", f"{taken} of the CPU's time, beside the device"))
    if after.queues[1]:
        longer = "launches" if _is_launch_bound(after) else "the device"
        rows.append(
            (
                "waits for",
                f"{longer}: device {device}, launches and engine {launching}",
            )
        )
    return rows


def _is_launch_bound(timeline: Timeline) -> bool:
    device, launching = timeline.queues
    return launching > device


def _exact_rows(exact: ExactResult | None) -> list[tuple[str, str]]:
    if exact is None:
        return []
    if exact.overhead is None:
        found = "no schedule was found within the time limit"
    else:
        percent = units.format_percent(exact.overhead, sign=True)
        end = "is the cheapest" if exact.optimal else "was found within the time limit"
        found = f"{percent}: this schedule of ops {end}"
    return [("exact", found)]


def _regions(plan: Plan, *, in_full: bool = False) -> RenderableType:
    if not plan.regions:
        return key_value_table([("none", "nothing is recomputed")])
    levels = list(_levels(plan.regions))
    encodes = any(region.encode for _, region in levels)
    moves = any(region.offload for _, region in levels)
    columns = ["calls", "by", "keeps", *(["encodes"] if encodes else [])]
    columns += ["offloads"] if moves else []
    table = make_table(*columns, texts=len(columns))
    for level, region in levels:
        cells = [_kept(region, in_full=in_full)]
        if encodes:
            forms = [f"{op}: {form}" for op, form in region.encode]
            cells.append(_ops(forms, in_full=in_full))
        if moves:
            cells.append(_ops([str(op) for op in region.offload], in_full=in_full))
        by = f"{region.by}, {region.code} code" if region.code else region.by
        add_row(table, "  " * level + region.title, by, *cells)
    return table


def _kept(region: PlannedRegion, *, in_full: bool) -> str:
    """What a region keeps, or into how many tiles it is cut."""
    if region.tiles is None:
        return _ops([str(op) for op in region.save], in_full=in_full)
    return str(region.tiles)


def _levels(
    regions: Iterable[PlannedRegion], level: int = 0
) -> Iterator[tuple[int, PlannedRegion]]:
    """Regions with their nesting level, each followed by its inner regions."""
    for region in regions:
        yield level, region
        yield from _levels(region.inner, level + 1)


def _ops(names: list[str], *, in_full: bool) -> str:
    if in_full or len(names) <= 1:
        return ", ".join(names) or "nothing"
    return f"{len(names)} ops"


def _region_json(region: PlannedRegion) -> dict[str, Any]:
    place = {"run": list(region.run)} if region.run else {"calls": region.calls}
    content: dict[str, Any] = {
        **place,
        **({"for": region.code} if region.code else {}),
        "by": region.by,
        "save": [str(op) for op in region.save],
        "encode": {str(op): form for op, form in region.encode},
    }
    if region.offload:
        content["offload"] = [str(op) for op in region.offload]
    if region.tiles is not None:
        content |= tiles_content(region.tiles)
    if region.inner:
        content["regions"] = [_region_json(inner) for inner in region.inner]
    return content


def _fingerprint_lines(plan: Plan) -> list[str]:
    def text(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {item}" for key, item in value.items())
        return str(value)

    return [f"{name} {text(value)}" for name, value in plan.fingerprint.items()]


def _size(num_bytes: int) -> str:
    return units.format_bytes(num_bytes)
