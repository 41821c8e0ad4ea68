"""The page of ``ckplan report``: one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckplan import files, units
from ckplan.errors import CkplanError, PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, differences, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import resolve
from ckplan.plan.updates import with_planned_update
from ckplan.report.chrome_trace import save_chrome_trace
from ckplan.report.hazards import hazard_rows
from ckplan.report.layer_tree import layer_tree
from ckplan.report.samples import Sample, sample
from ckplan.simulating.alive import Maker
from ckplan.simulating.allocations import Level, Reserved, reserved_on_card
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


def save_report(
    graph: Graph,
    plans: Mapping[str, Plan],
    path: str | Path,
    *,
    seen: Curves = _NOTHING_SEEN,
    chrome_trace: str | Path | None = None,
    force: bool = False,
) -> None:
    """Write a page about a step and the effect of plans on it.

    Args:
        graph: The step.
        plans: Plans of the step, by their names on the page.
        path: The HTML file to write.
        seen: Measured or dry-run curves of ``verify``.
        chrome_trace: Another file to write, with the same steps for Perfetto.
        force: Whether to overwrite existing files.

    Raises:
        CkplanError: The file cannot be written, or the extra ``report`` is missing.
        PlanError: A plan is of another model, or cannot be carried out.
    """
    if not isinstance(plans, Mapping):
        raise CkplanError(
            f"cannot report on a {type(plans).__name__}",
            needed="plans by their names on the page",
            hint='ckplan.save_report(graph, {"plan": plan}, "page.html")',
        )
    check_report()
    planner = Planner(graph)
    plans = {_title(name): plan for name, plan in plans.items()}
    regions = {name: _regions(graph, name, plan) for name, plan in plans.items()}
    timelines = {
        UNPLANNED: planner.unplanned,
        **{name: _timeline(planner, plans[name], regions[name]) for name in plans},
    }
    page = _render(planner, plans, regions, timelines, seen)
    files.write_text(path, page, force=force)
    if chrome_trace is not None:
        save_chrome_trace(Path(chrome_trace), timelines, force=force)


def _title(name: str) -> str:
    """The name of a plan on the page, where the unplanned step has its own."""
    return f"{name} (plan)" if name == UNPLANNED else name


def _regions(graph: Graph, name: str, plan: Plan) -> tuple[Region, ...]:
    if plan.model and plan.model != graph.model:
        raise PlanError(
            f"cannot report on {name}: it is a plan of {plan.model}",
            needed=f"a plan of {graph.model}, the model of the trace",
            hint="name the trace that the plan was made from",
        )
    return resolve(plan, graph)


def _timeline(planner: Planner, plan: Plan, regions: Sequence[Region]) -> Timeline:
    graph = with_planned_update(planner.graph, plan)
    whole = graph is planner.graph
    found = (planner.simulator if whole else Simulator(graph)).run(regions)
    if plan.predicted is None or not found.moves.moved_bytes:
        return found
    # How fast values move, the solver knew, and the plan only what that costs.
    more = (plan.predicted.overhead - found.overhead) * graph.step_seconds
    moves = replace(found.moves, stall_seconds=max(more, 0.0) / graph.num_batches)
    return replace(found, moves=moves)


def _render(
    planner: Planner,
    plans: Mapping[str, Plan],
    regions: Mapping[str, Sequence[Region]],
    timelines: Mapping[str, Timeline],
    seen: Curves,
) -> str:
    from markupsafe import Markup

    from ckplan.report.figures import frontier_figure, memory_figure

    graph = planner.graph
    points = planner.frontier(_POINTS)
    others = all_baselines(planner, MemoryLimit(planner.unplanned.peak_bytes))
    levels: dict[str, list[Level]] = {name: [] for name in timelines}
    reserved = {
        name: reserved_on_card(timeline, levels[name])
        for name, timeline in timelines.items()
    }
    samples = {name: sample(one, levels[name]) for name, one in timelines.items()}
    budgets = [p.budget_bytes for p in plans.values() if p.budget_bytes is not None]
    budget = budgets[0] if budgets else None
    memory = chart_html(memory_figure(samples, budget, seen), first=True)
    frontier = chart_html(frontier_figure(points, others, budget), first=False)
    last = [*timelines][-1]
    return render_page(
        _TEMPLATE,
        title=f"Training step of {graph.model}",
        subtitle=f"{len(graph.ops)} ops, seconds {graph.costs}; all figures predicted",
        cards=_cards(timelines, reserved, budget),
        memory_chart=memory,
        frontier_chart=frontier,
        peak=_peak(last, samples[last]),
        points=points,
        others=others,
        trees=_trees(graph, regions, timelines),
        notes=[*graph.notes, *_differences(graph, plans)],
        hazards=hazard_rows(graph),
        alive_json=Markup(_alive_json(samples)),
    )


def render_page(template: str, **values: object) -> str:
    """A page; texts in it cannot break out of it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

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
    return environment.get_template(template).render(**values)


def chart_html(figure: Any, *, first: bool) -> Any:
    """A chart for a page; the first one brings the code that draws all."""
    from markupsafe import Markup

    return Markup(
        figure.to_html(
            full_html=False,
            include_plotlyjs=first,
            config={"displaylogo": False, "responsive": True},
        )
    )


def _cards(
    timelines: Mapping[str, Timeline],
    reserved: Mapping[str, Reserved | None],
    budget: int | None,
) -> list[tuple[str, str, str]]:
    found = []
    for name, timeline in timelines.items():
        overhead = units.format_percent(timeline.overhead, sign=True)
        note = timeline.peak_at + ("" if name == UNPLANNED else f"; {overhead} time")
        on_card = reserved[name]
        if on_card is not None:
            note += f"; reserved {units.format_bytes(on_card.bytes)}"
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
    graph: Graph,
    regions: Mapping[str, Sequence[Region]],
    timelines: Mapping[str, Timeline],
) -> list[dict[str, Any]]:
    names = [*regions] or [UNPLANNED]
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
    """The samples, with every text and every maker once."""
    texts: dict[str, int] = {}
    makers: dict[Maker, int] = {}

    def text(one: str) -> int:
        return texts.setdefault(one, len(texts))

    steps = {
        name: [
            [
                text(one.where),
                one.live_bytes,
                one.reserved_bytes,
                [
                    [makers.setdefault(row.maker, len(makers)), row.count, row.bytes]
                    for row in one.alive
                ],
            ]
            for one in found
        ]
        for name, found in samples.items()
    }
    content = {
        "makers": [[text(part) for part in astuple(maker)] for maker in makers],
        "texts": [*texts],
        "steps": steps,
    }
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
