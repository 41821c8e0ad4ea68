"""The page of ``ckplan report``: whole, offline, with the numbers of the simulator."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ckplan
from ckplan.cli import app
from ckplan.errors import CkplanError, PlanError
from ckplan.graph.file import load
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.report import html
from ckplan.report.layer_tree import layer_tree
from ckplan.report.samples import sample, sample_moments
from ckplan.report.step import step_json
from ckplan.simulating.allocations import Level, reserved_on_card
from ckplan.simulating.simulate import Simulator
from ckplan.solving import planner
from ckplan.solving.planner import Planner
from ckplan.units import format_bytes

TRACES = Path(__file__).parents[2] / "traces"
MLP = TRACES / "mlp.json.gz"
MIB = 1 << 20


@pytest.fixture(scope="module")
def plan() -> Plan:
    return ckplan.solve(load(MLP), budget="80%")


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "page.html"
    ckplan.save_report(load(MLP), {"mine": plan}, path)
    return path.read_text()


def run(*argv: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(one) for one in argv])
    return found.exit_code, found.output


class Links(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"src", "href"} if tag != "a" else set()
        self.found += [v or "" for k, v in attrs if k in names]


def test_a_page_loads_nothing_and_is_small(page: str) -> None:
    links = Links()
    links.feed(page)
    assert [link for link in links.found if not link.startswith("data:")] == []
    assert len(page.encode()) < 6 * MIB
    assert "</html>" in page[-20:]


def test_a_page_says_what_the_simulator_says(page: str, plan: Plan) -> None:
    graph = load(MLP)
    simulator = Simulator(graph)
    for timeline in (simulator.run(), simulator.run(resolve(plan, graph))):
        assert format_bytes(timeline.peak_bytes) in page
    assert plan.budget_bytes is not None
    assert f"budget {format_bytes(plan.budget_bytes)}" in page
    found = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    alive = json.loads(found[1])["steps"]["unplanned"]
    assert max(live for _, live, _, _ in alive) == simulator.run().peak_bytes
    assert {reserved for _, _, reserved, _ in alive} == {None}  # on no GPU


def rows_of(page: str, step: str) -> list[list[tuple[list[str], int, int]]]:
    """For every moment, the rows that a click shows: texts, count and bytes."""
    found = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    content = json.loads(found[1])
    texts, makers = content["texts"], content["makers"]
    return [
        [([texts[i] for i in makers[m]], count, size) for m, count, size in rows]
        for *_, rows in content["steps"][step]
    ]


def texts_of(page: str, step: str, name: str = "") -> set[tuple[str, ...]]:
    """The texts of all rows, or of those with one name."""
    moments = rows_of(page, step)
    rows = {tuple(texts) for rows in moments for texts, _, _ in rows}
    return {texts for texts in rows if name in ("", texts[0])}


def test_a_click_names_shape_type_and_line_of_the_largest_first(tmp_path: Path) -> None:
    graph = load(TRACES / "gpt2.json.gz")
    plan = Plan(regions=(PlannedRegion("transformer.h.[0..11]"),))
    ckplan.save_report(graph, {"mine": plan}, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    made = {
        (str(one.tensor), graph.line_of(number))
        for number, one in enumerate(graph.storages)
    }
    for step in ("unplanned", "mine"):
        moments = rows_of(text, step)
        for rows in moments:
            assert [size for *_, size in rows] == sorted(
                (size for *_, size in rows), reverse=True
            )
        seen = [texts for rows in moments for texts, _, _ in rows if texts[3]]
        assert seen
        for _, _, shape, dtype, line in seen:
            assert (f"{dtype}[{shape.strip('-')}]", line) in made
    # The MLP of 12 x 384, on 8 x 256 tokens, as its matrix product returns it.
    found = texts_of(text, "unplanned", "transformer.h.0.mlp.c_fc/addmm")
    ((_, kind, shape, dtype, line),) = found
    assert (kind, shape, dtype) == ("activation", "2048,1536", "float32")
    assert re.fullmatch(r"transformers/pytorch_utils\.py:\d+", line)
    assert texts_of(text, "mine", "transformer.h.0.mlp.c_fc/addmm, rebuilt")


def test_show_names_the_largest_tensor_at_the_peak() -> None:
    trace = TRACES / "gpt2.json.gz"
    graph = load(trace)
    timeline = Simulator(graph).run()
    alive = timeline.alive(timeline.peak_moment)
    made = [s for s in alive if graph.storages[s].kind in ("activation", "temporary")]
    together = Counter[tuple[str, str, str]]()
    for s in made:
        maker = graph.ops[graph.storages[s].maker].name
        key = maker, str(graph.storages[s].tensor), graph.line_of(s)
        together[key] += graph.storages[s].bytes
    ((_, *most), largest), *_ = together.most_common()
    code, output = run("show", trace, "--json")
    found = json.loads(output)["largest_at_peak"]
    assert (code, found["bytes"]) == (0, largest)
    sizes = ",".join(map(str, found["shape"]))
    tensor = f"{found['dtype']}[{sizes}]"
    assert [tensor, found["line"]] == most
    each = format_bytes(largest // found["count"])
    code, output = run("show", trace)
    said = " ".join(output.split())
    assert f"{found['count']} x {each} {tensor} by {found['made_by']}, " in said
    assert found["line"] in said
    rows = json.loads(run("show", trace, "--json")[1])["tensors_at_peak"]
    assert [row["bytes"] for row in rows] == sorted(
        (row["bytes"] for row in rows), reverse=True
    )


def test_a_trace_of_an_older_format_is_reported_without_lines(tmp_path: Path) -> None:
    graph = load(MLP)
    graph = replace(
        graph,
        ops=tuple(replace(op, line="") for op in graph.ops),
        storages=tuple(replace(one, tensor=None) for one in graph.storages),
    )
    assert step_json(graph, Simulator(graph).run(), "x")["largest_at_peak"] is None
    ckplan.save_report(graph, {}, tmp_path / "a.html")
    found = texts_of((tmp_path / "a.html").read_text(), "unplanned")
    assert found and {texts[2:] for texts in found} == {("", "", "")}


def test_reserved_memory_is_drawn_beside_live_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)), nn.Tanh())
    graph = ckplan.profile(model, torch.ones(2048, 512), gpu="T4", replay=False)
    timeline = Simulator(graph).run()
    levels: list[Level] = []
    reserved = reserved_on_card(timeline, levels)
    assert reserved is not None
    assert len(levels) == len(timeline.live_bytes)
    assert max(one.reserved_bytes for one in levels) == reserved.bytes
    assert max(one.allocated_bytes for one in levels) == reserved.allocated_bytes
    for one, live in zip(levels, timeline.live_bytes, strict=True):
        assert one.reserved_bytes >= one.allocated_bytes >= live - 512
    ckplan.save_report(graph, {}, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert '"name":"unplanned, reserved"' in text
    assert str(reserved.bytes) in text


def test_a_step_is_simulated_and_a_plan_resolved_once(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: made.append(name) or function(*args, **kwargs)

    monkeypatch.setattr(planner, "Simulator", counted("simulator", Simulator))
    monkeypatch.setattr(html, "resolve", counted("resolve", resolve))
    ckplan.save_report(load(MLP), {"mine": plan}, tmp_path / "a.html")
    assert sorted(made) == ["resolve", "simulator"]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "unet"])
def test_samples_have_the_peak_and_kinds_add_up(name: str) -> None:
    graph = load(TRACES / f"{name}.json.gz")
    timeline = Simulator(graph).run(resolve(ckplan.solve(graph, budget="80%"), graph))
    assert timeline.peak_moment in sample_moments(timeline)
    samples = sample(timeline)
    assert max(one.live_bytes for one in samples) == timeline.peak_bytes
    for moment, one in zip(sample_moments(timeline), samples, strict=True):
        assert one.live_bytes == timeline.live_bytes[moment]
        assert sum(row.bytes for row in one.alive) <= one.live_bytes
    assert [one.place for one in samples] == sorted(one.place for one in samples)


def test_the_tree_adds_up_to_what_is_saved() -> None:
    graph = load(TRACES / "gpt2.json.gz")
    regions = resolve(ckplan.solve(graph, budget="55%"), graph)
    timeline = Simulator(graph).run(regions)
    unplanned = layer_tree(graph, Simulator(graph).run(), ())
    planned = layer_tree(graph, timeline, regions)
    for rows in (unplanned, planned):
        tops = [row.cost for row in rows if row.depth == 0]
        seconds = sum(
            graph.critical_seconds[i]
            for i, op in enumerate(graph.ops[: graph.num_forward])
            if op.call != OUTSIDE_CALLS
        )
        assert sum(c.forward_seconds for c in tops) == pytest.approx(seconds)
    saved = [row.cost for row in unplanned if row.depth == 0]
    split = [row.cost for row in planned if row.depth == 0]
    assert not any(row.cost.dropped_bytes for row in unplanned)
    assert sum(c.kept_bytes for c in saved) == sum(
        c.kept_bytes + c.dropped_bytes for c in split
    )
    assert sum(c.recompute_seconds for c in split) == pytest.approx(
        sum(graph.critical_seconds[s] for e in timeline.effects for s in e.steps)
    )
    blocks = [row for row in planned if row.module == "GPT2Block"]
    assert sum(row.count for row in blocks) == 12
    assert all("program" in row.action for row in blocks)


def test_the_command_writes_a_page_and_counters(plan: Plan, tmp_path: Path) -> None:
    from ckplan.plan.file import save

    save(plan, tmp_path / "plan.yaml", force=False)
    page, counters = tmp_path / "r.html", tmp_path / "t.json"
    argv = ("report", MLP, tmp_path / "plan.yaml", "-o", page)
    code, output = run(*argv, "--chrome-trace", counters)
    assert code == 0, output
    assert "peak, plan" in page.read_text()
    events = json.loads(counters.read_text())["traceEvents"]
    live = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert max(live) == Simulator(load(MLP)).run().peak_bytes
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {
        "unplanned",
        "plan",
    }


def test_bad_input_is_told_in_three_lines_and_nothing_is_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("ckplan: 1\nmodel: Bert\nregions: []\n")
    Path("cut.json.gz").write_bytes(MLP.read_bytes()[:4000])
    Path("there.html").write_text("mine")
    cases = {
        ("report", str(MLP), "other.yaml", "-o", "a.html"): "a plan of Bert",
        ("report", "cut.json.gz", "-o", "a.html"): "cut.json.gz",
        ("report", str(MLP), "-o", "there.html"): "already exists",
        ("report", str(MLP), "-o", "no/a.html"): "no folder 'no'",
        ("report", str(MLP), "--chrome-trace", "no/a.json"): "no folder 'no'",
    }
    for argv, said in cases.items():
        code, output = run(*argv)
        error = [line for line in output.splitlines() if ":" in line][-3:]
        assert code == 1, (argv, output)
        assert said in output, (argv, output)
        starts = ("error:", "  needed:", "  try:")
        assert [line.startswith(s) for line, s in zip(error, starts, strict=True)]
    assert Path("there.html").read_text() == "mine"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"other.yaml", "cut.json.gz", "there.html"}


def test_without_the_extra_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, output = run("report", MLP, "-o", tmp_path / "a.html")
    assert code == 1
    assert "plotly is not installed" in output
    assert "pip install 'ckplan[report]'" in output
    assert not (tmp_path / "a.html").exists()


def test_a_plan_with_calls_that_are_not_there_is_refused(tmp_path: Path) -> None:
    plan = Plan(regions=(PlannedRegion("nowhere"),))
    with pytest.raises(PlanError, match="nowhere"):
        ckplan.save_report(load(MLP), {"mine": plan}, tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_names_cannot_break_out_of_the_page(plan: Plan, tmp_path: Path) -> None:
    ckplan.save_report(load(MLP), {"</script><b>x": plan}, tmp_path / "a.html")
    assert "</script><b>x" not in (tmp_path / "a.html").read_text()


def test_a_plan_called_unplanned_does_not_hide_the_unplanned_step(
    plan: Plan, tmp_path: Path
) -> None:
    ckplan.save_report(load(MLP), {"unplanned": plan}, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    peak = format_bytes(Simulator(load(MLP)).run().peak_bytes)
    assert peak in page and "unplanned (plan)" in page


def test_plans_have_names_on_the_page(tmp_path: Path) -> None:
    graph = load(MLP)
    plan: Any = ckplan.solve(graph, "80%")
    with pytest.raises(CkplanError, match="cannot report on a Plan"):
        ckplan.save_report(graph, plan, tmp_path / "a.html")


def test_a_plan_that_moves_costs_what_the_solver_said() -> None:
    graph = load(MLP)
    plan = ckplan.solve(graph, budget="75%", spill_rate="20GB")
    assert plan.predicted is not None
    assert plan.predicted.moved_bytes
    regions = resolve(plan, graph)
    timeline = html._timeline(Planner(graph), plan, regions)
    assert timeline.overhead == pytest.approx(plan.predicted.overhead, abs=1e-4)
    without = Simulator(graph).run(regions)  # nobody knows how fast they move
    assert without.overhead < timeline.overhead
