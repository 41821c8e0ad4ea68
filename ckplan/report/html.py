"""The page of ``ckplan report``: one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckplan import files, units
from ckplan.errors import CkplanError, PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import KINDS
from ckplan.plan.plan import Plan, differences, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import resolve
from ckplan.report.hazards import hazard_rows
from ckplan.report.layer_tree import layer_tree
from ckplan.report.samples import Sample, sample
from ckplan.simulating.allocations import reserved_on_card
from ckplan.simulating.curve import UNPLANNED, Curves
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.common_strategies import all_baselines
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner

_TEMPLATE = "page.html.jinja"
_POINTS = 16  # budgets of the frontier
_NOTHING_SEEN: Curves = MappingProxyType({})


def check_report() -> None:
    """Raise early if a page cannot be made.

    Raises:
        CkplanError: The extra ``report`` is not installed.
    """
    try:
        import jinja2  # noqa: F401 - checks availability only
        import plotly  # noqa: F401
    except ImportError as error:
        raise CkplanError(
            f"cannot make a report: {error.name} is not installed",
            needed="the extra 'report'",
            hint="pip install 'ckplan[report]'",
        ) from None


def timelines_of(graph: Graph, plans: Mapping[str, Plan]) -> dict[str, Timeline]:
    """Simulate the unplanned step and every plan.

    Raises:
        PlanError: A plan is of another model, or cannot be carried out.
    """
    simulator = Simulator(graph)
    planned = {name: _regions(graph, name, plan) for name, plan in plans.items()}
    found = {name: simulator.run(regions) for name, regions in planned.items()}
    return {UNPLANNED: simulator.run(), **found}


def save_report(
    graph: Graph,
    plans: Mapping[str, Plan],
    path: str | Path,
    *,
    seen: Curves = _NOTHING_SEEN,
    force: bool = False,
) -> None:
    """Write a page about a step and the effect of plans on it.

    Args:
        graph: The step.
        plans: Plans of the step, by their names on the page.
        path: The HTML file to write.
        seen: Measured or dry-run curves of ``verify``.
        force: Whether to overwrite an existing file.

    Raises:
        CkplanError: The file cannot be written, or the extra ``report`` is missing.
        PlanError: A plan is of another model, or cannot be carried out.
    """
    check_report()
    timelines = timelines_of(graph, plans)
    files.write_text(path, _render(graph, plans, timelines, seen), force=force)


def _regions(graph: Graph, name: str, plan: Plan) -> tuple[Region, ...]:
    if plan.model and plan.model != graph.model:
        raise PlanError(
            f"cannot report on {name}: it is a plan of {plan.model}",
            needed=f"a plan of {graph.model}, the model of the trace",
            hint="name the trace that the plan was made from",
        )
    return resolve(plan, graph)


def _render(
    graph: Graph,
    plans: Mapping[str, Plan],
    timelines: Mapping[str, Timeline],
    seen: Curves,
) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from ckplan.report.figures import frontier_figure, memory_figure

    planner = Planner(graph)
    points = planner.frontier(_POINTS)
    others = all_baselines(planner, MemoryLimit(planner.unplanned.peak_bytes))
    samples = {name: sample(timeline) for name, timeline in timelines.items()}
    budgets = [p.budget_bytes for p in plans.values() if p.budget_bytes is not None]
    budget = budgets[0] if budgets else None
    memory = _chart(memory_figure(samples, budget, seen), first=True)
    frontier = _chart(frontier_figure(points, others, budget), first=False)
    last = [*timelines][-1]
    environment = Environment(
        loader=PackageLoader("ckplan.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = units.format_bytes
    environment.filters["seconds"] = units.format_seconds
    environment.filters["percent"] = lambda x: units.format_percent(x, sign=True)
    return environment.get_template(_TEMPLATE).render(
        title=f"Training step of {graph.model}",
        subtitle=f"{len(graph.ops)} ops, seconds {graph.costs}; all figures predicted",
        cards=_cards(timelines, budget),
        memory_chart=Markup(memory),
        frontier_chart=Markup(frontier),
        peak=_peak(last, samples[last]),
        points=points,
        others=others,
        trees=_trees(graph, plans, timelines),
        notes=[*graph.notes, *_differences(graph, plans)],
        hazards=hazard_rows(graph),
        alive_json=Markup(_alive_json(samples)),
    )


def _chart(figure: Any, *, first: bool) -> str:
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=first,
            config={"displaylogo": False, "responsive": True},
        )
    )


def _cards(
    timelines: Mapping[str, Timeline], budget: int | None
) -> list[tuple[str, str, str]]:
    found = []
    for name, timeline in timelines.items():
        overhead = units.format_percent(timeline.overhead, sign=True)
        note = timeline.peak_at + ("" if name == UNPLANNED else f"; {overhead} time")
        reserved = reserved_on_card(timeline)
        if reserved is not None:
            note += f"; reserved {units.format_bytes(reserved.bytes)}"
        size = units.format_bytes(timeline.peak_bytes)
        found.append((f"peak, {name}", size, note))
    if budget is not None:
        found.append(("budget", units.format_bytes(budget), "of the first plan"))
    return found


def _peak(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    peak = max(samples, key=lambda one: one.live_bytes)
    size = units.format_bytes(peak.live_bytes)
    return {"name": name, "where": peak.where, "bytes": size, "alive": peak.alive}


def _trees(
    graph: Graph, plans: Mapping[str, Plan], timelines: Mapping[str, Timeline]
) -> list[dict[str, Any]]:
    regions = {name: resolve(plan, graph) for name, plan in plans.items()}
    names = [*plans] or [UNPLANNED]
    return [
        {
            "name": name,
            "rows": layer_tree(graph, timelines[name], regions.get(name, ())),
        }
        for name in names
    ]


def _differences(graph: Graph, plans: Mapping[str, Plan]) -> list[str]:
    fingerprint = plan_fingerprint(graph.fingerprint)
    return [
        f"{name} was made for another step: {one}"
        for name, plan in plans.items()
        for one in differences(plan.fingerprint, fingerprint)
    ]


def _alive_json(samples: Mapping[str, Sequence[Sample]]) -> str:
    numbers: dict[str, int] = {}
    steps = {
        name: [
            [
                one.where,
                one.live_bytes,
                [
                    [
                        numbers.setdefault(row.name, len(numbers)),
                        KINDS.index(row.kind),
                        row.count,
                        row.bytes,
                    ]
                    for row in one.alive
                ],
            ]
            for one in found
        ]
        for name, found in samples.items()
    }
    content = {"names": [*numbers], "kinds": KINDS, "steps": steps}
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
