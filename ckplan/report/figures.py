"""The charts of the HTML report, with plotly (extra ``report``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckplan.graph.records import KINDS
from ckplan.report.samples import Sample
from ckplan.simulating.curve import PHASES, PREDICTED, Curves
from ckplan.solving.solution import Baseline, FrontierPoint
from ckplan.units import GIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ckplan.tuning.tuned import Tuned

_KIND_COLORS = dict(
    zip(
        KINDS,
        ("#4c78a8", "#72b7b2", "#e45756", "#b279a2", "#9d755d", "#54a24b", "#f58518"),
        strict=True,
    )
)
_LINE_COLORS = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")
_SYMBOLS = ("x", "diamond", "square", "triangle-up", "cross", "star", "pentagon")
_GRID = "rgba(128,128,128,0.25)"


def memory_figure(
    steps: Mapping[str, Sequence[Sample]], budget_bytes: int | None, seen: Curves
) -> Figure:
    """Live bytes over the step: all totals first, then every step by kind.

    Args:
        steps: The unplanned step and every plan, by name.
        budget_bytes: Budget to draw as a line, or None.
        seen: Measured or dry-run curves, drawn with the totals.
    """
    from plotly.subplots import make_subplots

    titles = ["All steps", *(f"{name}, by kind" for name in steps)]
    figure = make_subplots(
        rows=len(titles),
        cols=1,
        shared_xaxes=True,
        shared_yaxes="all",
        vertical_spacing=0.22 / len(titles),
        subplot_titles=titles,
    )
    for number, (name, samples) in enumerate(steps.items()):
        color = _LINE_COLORS[number % len(_LINE_COLORS)]
        figure.add_trace(_total(name, samples, color), row=1, col=1)
        peak = max(samples, key=lambda one: one.live_bytes)
        figure.add_trace(_peak(name, peak, color), row=1, col=1)
        reserved = [s.reserved_bytes for s in samples if s.reserved_bytes is not None]
        if reserved:
            along = [s.place for s in samples]
            trace = _line(f"{name}, reserved", along, reserved, color, "dot")
            figure.add_trace(trace, row=1, col=1)
        for kind in KINDS:
            figure.add_trace(_area(name, samples, kind, number), row=number + 2, col=1)
    for which, found in seen.items():
        for kind, curve in found.items():
            if kind != PREDICTED:
                places, levels = zip(*curve.placed(), strict=True)
                trace = _line(f"{which}, {kind}", places, levels, "#555555", "dot")
                figure.add_trace(trace, row=1, col=1)
    if budget_bytes is not None:
        label = f"budget {format_bytes(budget_bytes)}"
        trace = _line(label, (0, len(PHASES)), (budget_bytes,) * 2, "#d62728", "dash")
        figure.add_trace(trace, row=1, col=1)
    _style(figure, height=330 * len(titles))
    ticks = {"tickvals": [0.5, 1.5, 2.5], "ticktext": list(PHASES)}
    figure.update_xaxes(range=[0, len(PHASES)], showticklabels=True, **ticks)
    every = [one for samples in steps.values() for one in samples]
    highest = [max(one.live_bytes, one.reserved_bytes or 0) for one in every]
    highest += [curve.peak_bytes for found in seen.values() for curve in found.values()]
    top = 1.15 * max([*highest, budget_bytes or 0]) / GIB
    figure.update_yaxes(title_text="live bytes (GiB)", range=[0, top])
    for phase in (1, 2):
        figure.add_vline(phase, line_color=_GRID)
    return figure


def frontier_figure(
    points: Sequence[FrontierPoint], others: Sequence[Baseline], budget: int | None
) -> Figure:
    """Overhead against peak: plans, the lower bound and common strategies."""
    import plotly.graph_objects as go

    figure = go.Figure()
    peaks = [point.peak_bytes / GIB for point in points]
    for name, values, line in (
        ("ckplan", [p.overhead for p in points], {"shape": "hv", "color": "#1f77b4"}),
        (
            "lower bound",
            [p.bound_overhead for p in points],
            {"dash": "dash", "color": "#888888"},
        ),
    ):
        figure.add_scatter(
            x=peaks,
            y=[100 * value for value in values],
            name=name,
            mode="lines+markers" if name == "ckplan" else "lines",
            line=line,
            hovertemplate="%{x:.3f} GiB, +%{y:.1f} %",
        )
    for number, other in enumerate(others):
        figure.add_scatter(
            x=[other.peak_bytes / GIB],
            y=[100 * other.overhead],
            name=other.name,
            mode="markers",
            marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 10},
            hovertemplate="%{x:.3f} GiB, +%{y:.1f} %",
        )
    if budget is not None:
        figure.add_vline(budget / GIB, line_dash="dash", line_color="#d62728")
    _style(figure, height=460)
    figure.update_xaxes(title_text="predicted peak of the step (GiB)")
    figure.update_yaxes(title_text="predicted overhead (%)", rangemode="tozero")
    return figure


def _total(name: str, samples: Sequence[Sample], color: str) -> Any:
    trace = _line(
        name, [s.place for s in samples], [s.live_bytes for s in samples], color, None
    )
    trace.meta = name
    trace.customdata = [[number, s.where] for number, s in enumerate(samples)]
    trace.hovertemplate = "%{y:.3f} GiB, %{customdata[1]}"
    return trace


def batches_figure(tuned: Tuned) -> Figure:
    """Samples or tokens per second by batch, without plans and with them."""
    import plotly.graph_objects as go

    times = tuned.tokens_per_sample or 1
    unit = "samples" if tuned.tokens_per_sample is None else "tokens"
    figure = go.Figure()
    planned = [(batch, one) for batch, _, one in tuned.curve if one]
    bare = [(batch, one) for batch, one, _ in tuned.curve if one]
    for name, points, line in (
        ("with a plan", planned, {"color": "#1f77b4"}),
        ("no plan", bare, {"color": "#888888", "dash": "dash"}),
        ("best", [(tuned.best.batch, tuned.best)], {"color": "#d62728"}),
    ):
        figure.add_scatter(
            x=[batch for batch, _ in points],
            y=[times * one.samples_per_second for _, one in points],
            customdata=[format_bytes(one.peak_bytes) for _, one in points],
            name=name,
            mode="markers" if name == "best" else "lines+markers",
            line=line,
            marker={"size": 12, "symbol": "star"} if name == "best" else {"size": 6},
            hovertemplate="batch %{x}: %{y:.4g} " + unit + "/s, %{customdata}",
        )
    if tuned.largest_unplanned:
        figure.add_vline(tuned.largest_unplanned, line_dash="dot", line_color=_GRID)
    _style(figure, height=420)
    figure.update_xaxes(
        title_text="batch (dotted: the largest without a plan)", type="log"
    )
    figure.update_yaxes(title_text=f"{unit} per second", rangemode="tozero")
    return figure


def _peak(name: str, peak: Sample, color: str) -> Any:
    import plotly.graph_objects as go

    owner = max(peak.by_kind, key=lambda kind: peak.by_kind[kind])
    label = f"peak of {name}: {format_bytes(peak.live_bytes)}"
    return go.Scatter(
        x=[peak.place],
        y=[peak.live_bytes / GIB],
        name=label,
        mode="markers+text",
        text=[f"{format_bytes(peak.live_bytes)}, {owner}"],
        textposition="top center",
        marker={"color": color, "size": 11, "symbol": "star"},
        hovertemplate=f"{label}<br>{peak.where}, most of it {owner}<extra></extra>",
    )


def _area(name: str, samples: Sequence[Sample], kind: str, group: int) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        x=[round(s.place, 4) for s in samples],
        y=[round(s.by_kind[kind] / GIB, 5) for s in samples],
        name=kind,
        meta=name,
        customdata=[[number] for number in range(len(samples))],
        legendgroup=kind,
        showlegend=group == 0,
        stackgroup=str(group),
        line={"width": 0, "color": _KIND_COLORS[kind]},
        hovertemplate="%{y:.3f} GiB",
    )


def _line(
    name: str,
    places: Sequence[float],
    levels: Sequence[int],
    color: str,
    dash: str | None,
) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        x=[round(place, 4) for place in places],
        y=[round(level / GIB, 5) for level in levels],
        name=name,
        mode="lines",
        line={"color": color, "dash": dash, "width": 2},
    )


def _style(figure: Figure, height: int) -> None:
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 20, "t": 40, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808080"},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#808080"},
        legend={"orientation": "h", "yanchor": "top", "y": -60 / height, "x": 0},
    )
    figure.update_xaxes(gridcolor=_GRID, zerolinecolor=_GRID)
    figure.update_yaxes(gridcolor=_GRID, zerolinecolor=_GRID)
