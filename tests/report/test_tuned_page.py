"""The page of a tuned answer: its settings, levers and curve, offline and escaped."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import graphs
import pytest
from commands import Run

import ckplan
from ckplan.graph.file import save
from ckplan.graph.graph import Graph
from ckplan.report.extra_work import extra_work_words
from ckplan.report.figures import batches_figure
from ckplan.report.tables import render
from ckplan.report.tuning import (
    LEVER_HEADERS,
    curve_cells,
    lever_cells,
    rate_words,
    setting_words,
    tuned_json,
    tuned_report,
)
from ckplan.simulating.alive import peak_tensors
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.tuning.settings import Way
from ckplan.tuning.tune import Tuning
from ckplan.tuning.tuned import LeverRow, Tuned

LIMIT = 500


def step_at(rows: int, update: float = 9.0) -> Graph:
    """A chain of one block; ``update`` is the seconds of its optimizer."""
    graph = graphs.chain(
        1,
        width_bytes=10 * rows,
        hidden_bytes=40 * rows,
        stats_bytes=rows,
        weight_bytes=50,
        seconds=1.0 + rows,
    )
    stop = graph.backward_stop
    ops = (
        replace(op, seconds=update) if number >= stop else op
        for number, op in enumerate(graph.ops)
    )
    batch = {"batch": {"x": f"float32[{rows},10]"}}
    return replace(graph, ops=tuple(ops), fingerprint=batch)


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    def record(way: Way, rows: int, accumulate: int) -> Graph:
        graph = step_at(rows, 3.0 if way.optimizer == "adamw:fused" else 9.0)
        return replace(graph, options={"accumulate": accumulate})

    return Tuning(record, MemoryLimit(LIMIT), way=Way(), rows=4).run()


@pytest.fixture(scope="module")
def page(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tuned") / "page.html"
    ckplan.save_tuned_report(tuned, path)
    return path.read_text()


class Tables(HTMLParser):
    """The rows of every table, and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[tuple[str, ...]]] = []
        self.bold: list[tuple[str, ...]] = []
        self.links: list[str] = []
        self._row: list[str] = []
        self._is_bold = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self._row, self._is_bold = [], ("class", "best") in attrs
        elif tag in ("td", "th"):
            self._row.append("")

    def handle_data(self, data: str) -> None:
        if self._row:
            self._row[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            row = tuple(cell.strip() for cell in self._row)
            self.tables[-1].append(row)
            self.bold += [row] * self._is_bold
            self._row = []


def read(page: str) -> Tables:
    found = Tables()
    found.feed(page)
    return found


def test_a_page_has_the_settings_the_levers_and_the_curve(
    tuned: Tuned, page: str
) -> None:
    settings, levers, curve = read(page).tables
    expected = [tuned.best, *(one.setting for one in tuned.next)]
    assert [row[0] for row in settings[1:]] == [setting_words(s) for s in expected]
    speeds = [rate_words(one.samples_per_second) for one in expected]
    assert [row[1] for row in settings[1:]] == speeds
    assert [row[5] for row in settings[2:]] == [one.gives_up for one in tuned.next]
    extra = [extra_work_words(s.extra) if s.regions else "-" for s in expected]
    assert [row[4] for row in settings[1:]] == extra
    assert tuned.best.regions and extra[0].endswith("per sample")
    assert extra[0] in " ".join(render(tuned_report(tuned)).split())
    assert len(tuned.next) == 2
    assert levers[1:] == [lever_cells(row) for row in tuned.levers]
    assert {row[0] for row in levers} >= {"recompute", "adamw:fused", "accumulate 4"}
    assert curve[1:] == [curve_cells(row) for row in tuned.curve]
    bold = [lever_cells(row) for row in tuned.levers if row.in_best]
    best = [curve_cells(row) for row in tuned.curve if row[0] == tuned.best.batch]
    assert read(page).bold == [*bold, *best] and bold


def test_the_tensors_at_the_peak_are_named_and_what_moves_them(tuned: Tuned) -> None:
    timeline = Simulator(tuned.graph).run(tuned.best.regions)
    assert tuned.at_peak == peak_tensors(timeline, 3)
    shown = " ".join(render(tuned_report(tuned)).split())
    assert all(str(row) in shown for row in tuned.at_peak)
    found = tuned_json(tuned)["tensors_at_peak"]
    assert [row["bytes"] for row in found] == [row.bytes for row in tuned.at_peak]
    assert tuned.movers[0].name == "recompute"  # the chain's weights are small
    assert f"moved most by recompute ({saved(tuned.movers[0])})" in shown


def saved(row: LeverRow) -> str:
    return lever_cells(row)[LEVER_HEADERS.index("saves")]


def test_the_chart_draws_the_curve(tuned: Tuned) -> None:
    drawn = json.loads(batches_figure(tuned).to_json())["data"]
    planned, bare, best = drawn
    assert values(planned["x"]) == [batch for batch, _, one in tuned.curve if one]
    speeds = [one.samples_per_second for _, _, one in tuned.curve if one]
    assert values(planned["y"]) == pytest.approx(speeds)
    assert values(bare["x"]) == [batch for batch, one, _ in tuned.curve if one]
    assert values(best["x"]) == [tuned.best.batch]
    assert max(values(planned["y"])) == pytest.approx(tuned.best.samples_per_second)


def values(array: Any) -> list[float]:
    """Numbers of a chart, as a list or packed."""
    if isinstance(array, list):
        return array
    kind = {"f8": "d", "i1": "b", "i2": "h", "i4": "i"}[array["dtype"]]
    content = base64.b64decode(array["bdata"])
    return [*struct.unpack(f"<{len(content) // struct.calcsize(kind)}{kind}", content)]


def test_a_page_loads_nothing_and_names_cannot_break_out_of_it(
    tuned: Tuned, page: str, tmp_path: Path
) -> None:
    assert [link for link in read(page).links if link[:5] != "data:"] == []
    assert page.rstrip().endswith("</html>")
    evil = "</script><b>x"
    row = replace(tuned.levers[0], refused=evil)
    ckplan.save_tuned_report(
        replace(tuned, levers=(row,), notes=(evil,)), tmp_path / "a.html"
    )
    text = (tmp_path / "a.html").read_text()
    assert evil not in text
    assert f"refused: {evil}" in unescape(text)


def test_tokens_are_counted_if_they_were_asked_for(
    tuned: Tuned, tmp_path: Path
) -> None:
    ckplan.save_tuned_report(replace(tuned, tokens_per_sample=7), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "<th>tokens per second</th>" in text
    assert f"<b>{rate_words(7 * tuned.best.samples_per_second)} tokens" in text


def test_the_command_writes_the_page_or_says_why_not(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (4, 8):
        save(step_at(rows), folder / f"{rows}.json.gz")
    (folder / "there.html").write_text("mine")
    command = ("tune", "4.json.gz", "8.json.gz", "--budget", "500B")
    ended = run(*command, "--report", "page.html")
    assert (ended.code, "wrote page.html" in ended.err) == (0, True)
    assert re.search("Most samples per second of Chain in 500 B", ended.out)
    assert "Most samples per second of Chain in 500 B" in Path("page.html").read_text()
    bad = {"there.html": "already exists", "no/a.html": "no folder 'no'"}
    for path, said in bad.items():
        ended = run(*command, "--report", path)
        assert (ended.code, ended.out, said in ended.err) == (1, "", True)
    assert Path("there.html").read_text() == "mine"
    monkeypatch.setitem(sys.modules, "plotly", None)
    ended = run(*command, "--report", "b.html")
    assert (ended.code, ended.out) == (1, "")
    assert "pip install 'ckplan[report]'" in ended.err
