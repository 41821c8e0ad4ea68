"""Timelines: live bytes over the step, predicted beside measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import pytest
from typer.testing import CliRunner

from ckplan.cli import app
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import Region
from ckplan.report import timeline as reporting
from ckplan.report.tables import render
from ckplan.report.timeline import timeline_report
from ckplan.simulating.curve import PHASES, Curve, curves_json, predicted_curve
from ckplan.simulating.simulate import simulate
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.verifying.predict import predict
from ckplan.verifying.worker import FIRST_STEPS, FirstSteps, Job, Worker

CURVE = Curve(
    ((-1.0, 99), (0.0, 1), (1.0, 5), (1.5, 2), (4.0, 7), (5.0, 3)), (0.0, 2.0, 4.0, 6.0)
)

MODEL = """
import torch
from torch import nn

def build(*, width=64, batch=256):
    block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
    return nn.Sequential(*(block() for _ in range(4))), torch.randn(batch, width)
"""


def test_columns_hold_the_most_of_their_part_and_what_was_there_before() -> None:
    assert CURVE.columns(2) == [[1, 5], [2, 2], [7, 3]]
    assert CURVE.columns(1) == [[5], [2], [7]]


def test_every_phase_is_drawn_as_wide_as_the_others() -> None:
    places = [(0.0, 1), (0.5, 5), (0.75, 2), (2.0, 7), (2.5, 3)]
    assert places == CURVE.placed()
    instant = replace(CURVE, bounds=(0.0, 2.0, 4.0, 4.0))
    assert [place for place, _ in instant.placed()][-2:] == [3.0, 3.0]


def test_the_predicted_curve_is_the_simulated_one_at_the_seconds_of_its_ops() -> None:
    graph = graphs.chain(3, seconds=2.0)
    timeline = simulate(graph, [Region(1)])
    curve = predicted_curve(timeline)
    assert curve.peak_bytes == timeline.peak_bytes
    ends = [2.0 * n for n in (0, graph.num_forward)]
    backward = 2.0 * (graph.num_forward + graph.num_backward)
    assert curve.bounds == (*ends, backward, 2.0 * len(graph.ops))
    assert max(max(phase) for phase in curve.columns(7)) == timeline.peak_bytes


@pytest.mark.parametrize(
    ("blocks", "signs"), [(True, "\u2582\u2586\u2583"), (False, ":*-")]
)
def test_a_row_is_as_high_as_its_share_of_the_highest_peak(
    blocks: bool, signs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_can_encode_blocks", lambda: blocks)
    low = Curve(((0.0, 20), (1.0, 75), (2.0, 30)), (0.0, 1.0, 2.0, 3.0))
    high = Curve(((0.0, 100),), (0.0, 1.0, 2.0, 3.0))
    shown = render(
        timeline_report({"unplanned": {"predicted": high}, "planned": {"dry run": low}})
    )
    assert "in eighths of 100 B" in shown
    *_, unplanned, planned = (line.split() for line in shown.splitlines())
    assert unplanned[:2] == ["unplanned,", "predicted"]
    assert [row[-1] for row in unplanned[2:]] == ["\u2588" if blocks else "@"] * 3
    assert planned[:3] == ["planned,", "dry", "run"]
    assert planned[3:] == [16 * sign for sign in signs]


def test_json_has_every_point_with_its_units() -> None:
    found = curves_json({"planned": {"dry run": CURVE}})["planned"]["dry_run"]
    assert found["live_bytes"] == [99, 1, 5, 2, 7, 3]
    assert found["seconds"] == [-1.0, 0.0, 1.0, 1.5, 4.0, 5.0]
    assert found["phase_seconds"] == dict(
        zip((*PHASES, "end"), (0.0, 2.0, 4.0, 6.0), strict=True)
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "plan.yaml").write_text("ckplan: 1\nregions:\n- calls: '[0..3]'\n")
    return tmp_path


def steps(plan: Plan | None, **training: Any) -> FirstSteps:
    job = Job(WorkloadSpec("model.py"), plan, Training(**training), 0)
    found = Worker(job).answer(FIRST_STEPS)
    assert isinstance(found, FirstSteps)
    return found


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_was_measured_ends_as_it_began_and_peaks_at_the_peak(
    accumulate: int,
) -> None:
    found = steps(None, accumulate=accumulate, optimizer="sgd")
    curve = found.curve
    assert curve is not None
    assert curve.peak_bytes == found.peak_bytes
    seconds = [second for second, _ in curve.points]
    assert seconds == sorted(seconds)
    assert list(curve.bounds) == sorted(curve.bounds)
    parameters = 4 * 4 * (64 * 64 + 64)
    assert curve.points[0][1] == parameters + 4 * 256 * 64
    _, backward, optimizer = curve.columns(8)
    assert max(backward) == curve.peak_bytes
    assert 0 <= optimizer[-1] - (curve.points[0][1] + parameters) < 100  # and the loss
    begin, turn = (
        [level for second, level in curve.points if second <= bound][-1]
        for bound in curve.bounds[:2]
    )
    assert turn > begin
    gradients = parameters if accumulate > 1 else 0
    assert 0 <= begin - (curve.points[0][1] + gradients) < 100


def run(*argv: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, argv)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.usefixtures("folder")
def test_predicted_and_measured_timelines_from_the_command_line() -> None:
    assert run("profile", "model.py")[0] == 0
    arguments = ("verify", "model.py", "plan.yaml", "--steps", "0")
    code, out, err = run(*arguments, "--json", "--plot", "steps.svg")
    assert (code, "wrote steps.svg" in err) == (0, True)
    assert Path("steps.svg").read_text().count("<svg") == 1
    timeline = json.loads(out)["timeline"]
    assert list(timeline) == ["unplanned", "planned"]
    for found in timeline.values():
        peaks = {kind: max(curve["live_bytes"]) for kind, curve in found.items()}
        assert list(peaks) == ["predicted", "measured"]
        assert peaks["predicted"] == pytest.approx(peaks["measured"], rel=0.003)
    code, out, _ = run(*arguments, "--fake")
    assert code == 0
    assert "planned, dry run" in out


@pytest.mark.usefixtures("folder")
def test_a_picture_that_is_there_already_is_not_overwritten() -> None:
    Path("steps.png").write_text("mine")
    arguments = ("verify", "model.py", "plan.yaml", "--fake", "--plot", "steps.png")
    code, _, err = run(*arguments)
    assert code == 1
    assert "it already exists" in err
    assert Path("steps.png").read_text() == "mine"


def test_a_trace_of_another_step_predicts_nothing() -> None:
    graph, plan = graphs.chain(3), Plan(regions=(PlannedRegion("h.0"),))
    graph = replace(graph, options=Training().as_options())
    here = dict(graph.fingerprint)
    assert set(predict(graph, plan, Training(), here)[0]) == {"unplanned", "planned"}
    assert not predict(None, plan, Training(), here)[0]
    wrong = {
        "in batch.input_ids: trace int64[8,256], here int64[4,256]": predict(
            graph, plan, Training(), {**here, "batch": {"input_ids": "int64[4,256]"}}
        ),
        "in options": predict(graph, plan, Training(amp="bf16"), here),
        "h.9": predict(graph, Plan(regions=(PlannedRegion("h.9"),)), Training(), here),
    }
    for said, (curves, (note,), *_) in wrong.items():
        assert not curves
        assert note.startswith("no predicted timeline: ")
        assert said in note
