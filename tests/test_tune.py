"""``tune``, ``largest_batch`` and ``auto(tune=True)`` on real models, end to end."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ckplan
from ckplan import autotune
from ckplan.autotune import recorder
from ckplan.errors import CkplanError, InfeasibleError, WorkloadError
from ckplan.graph.graph import Graph
from ckplan.graph.transplant import transplanted
from ckplan.integrations.loop import LoopPlanner
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan
from ckplan.report.tuning import tuned_json
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.tracing.other_steps import OtherSteps
from ckplan.training.step import TrainingStep
from ckplan.training.workload import as_workload, with_rows
from ckplan.tuning import ahead
from ckplan.tuning.lever_rows import row_of
from ckplan.tuning.searches import Searches
from ckplan.tuning.settings import ALLOWED, Way
from ckplan.units import MIB

WIDTH = 64
HOW: dict[str, Any] = {
    "loss_fn": nn.functional.mse_loss,
    "optimizer": "sgd:single",
    "replay": False,
    "gpu": "RTX 4090",  # its roofline: nothing is measured
}


def model() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def batch(rows: int = 64) -> dict[str, Any]:
    return {"batch": torch.randn(rows, WIDTH), "target": torch.randn(rows, WIDTH)}


def peak(rows: int) -> int:
    graph = ckplan.profile(model(), **batch(rows), **HOW)
    return ckplan.solve(graph, goal="min-memory").predicted.unplanned_peak_bytes


@pytest.mark.parametrize("how", [{}, {"allow": "bf16"}])
def test_the_answer_is_the_same_with_steps_recorded_in_copies(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    taken: list[bool] = []
    learn_from_copy = autotune._KnownSteps.learn_from_copy

    def noted(*args: Any) -> None:
        taken.append(True)
        learn_from_copy(*args)

    monkeypatch.setattr(autotune._KnownSteps, "learn_from_copy", noted)
    answers = []
    for copies in (0, 2):
        monkeypatch.setattr(ahead, "spare_processors", lambda copies=copies: copies)
        taken.clear()
        found = ckplan.tune(model(), **batch(), budget=24 * MIB, **HOW, **how)
        answers.append(tuned_json(found))
        assert bool(taken) is bool(copies)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "other", [{"accumulate": 2}, {"optimizer": "adafactor"}, {"optimizer": "sgd:fused"}]
)
def test_another_way_at_another_batch_is_as_recorded(other: dict[str, Any]) -> None:
    base = model()

    def at(rows: int, **how: Any) -> Graph:
        return ckplan.profile(base, **batch(rows), **{**HOW, **how})

    few, many = 4, 64
    found = transplanted(at(many, **other), at(many), at(few))
    assert found == at(few, **other)
    wider = ckplan.profile(nn.Sequential(*base, *base), **batch(many), **HOW)
    assert transplanted(wider, at(many), at(few)) is None


@pytest.mark.parametrize(
    "other", [{"accumulate": 3}, {"optimizer": "adafactor"}, {"optimizer": "sgd:fused"}]
)
def test_a_known_first_step_changes_nothing_that_is_recorded(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, steps = model(), OtherSteps()
    how = {**HOW, "check": False}
    assert ckplan.profile(base, **batch(4), **how, in_step=steps) == ckplan.profile(
        base, **batch(4), **how
    )
    assert steps.first.gradients == dict(base.named_parameters()).keys()
    whole = ckplan.profile(base, **batch(8), **{**how, **other})
    monkeypatch.setattr(TrainingStep, "run", None)  # no whole step any more
    monkeypatch.setattr(TrainingStep, "accumulate", None)
    short = ckplan.profile(base, **batch(8), **{**how, **other}, in_step=steps)
    assert short == whole


class Counting(nn.Linear):
    """Its forward depends on how often it ran."""

    ran = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        return super().forward(x)


def test_of_a_model_that_its_first_step_changes_nothing_is_known() -> None:
    steps = OtherSteps()
    ckplan.profile(Counting(WIDTH, WIDTH), **batch(4), **HOW, in_step=steps)
    assert steps.first.gradients is None


@pytest.mark.slow
def test_the_largest_batch_is_the_largest_whose_profile_fits() -> None:
    rows = ckplan.largest_batch(
        model(), **batch(), budget=24 * MIB, planned=False, **HOW
    )
    assert peak(rows) <= 24 * MIB < peak(rows + 1)
    assert ckplan.largest_batch(model(), **batch(), budget=24 * MIB, **HOW) > rows


def loss_of(model: nn.Module, rows: int) -> torch.Tensor:
    return model(torch.randn(rows, WIDTH)).square().mean()


# On the CPU dropout is another op, which some plans for a card name.
@pytest.mark.filterwarnings("ignore:.* runs no op :UserWarning")
def test_auto_applies_the_tuned_plan_and_says_its_setting() -> None:
    planned = ckplan.auto(
        model(), **batch(), budget="24MiB", tune=True, total_batch=2**14, **HOW
    )
    plan = ckplan.status(planned).plan
    assert plan is not None
    rows, many = plan.workload["micro_batch"], plan.workload["accumulate"]
    assert rows * many == 2**14
    assert many > 1
    assert plan.fingerprint["batch"] == {"0": f"float32[{rows},{WIDTH}]"}
    plan = replace(plan, fingerprint={**plan.fingerprint, "device": "cpu"})
    ckplan.apply(planned, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the setting itself
        warnings.filterwarnings("ignore", ".* runs no op ")
        loss_of(planned, rows).backward()
    ckplan.apply(planned, plan)
    with pytest.warns(UserWarning, match=f"a micro-batch of {rows}, and 0 is"):
        loss_of(planned, rows // 2)
    ckplan.apply(planned, plan)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(UserWarning, match="no autocast, and forward runs with autocast"),
    ):
        loss_of(planned, rows)
    again = plan_file.loads(plan_file.dumps(plan), "plan.yaml")
    assert again.workload == plan.workload
    assert f"training: {{micro_batch: {rows}" in plan_file.dumps(plan)


@pytest.mark.parametrize(
    ("made", "how", "error", "message"),
    [
        (
            {"batch": torch.randn(5, 3, WIDTH), "target": torch.randn(3, WIDTH)},
            {"budget": "1GiB"},
            WorkloadError,
            "cannot find the rows",
        ),
        (batch(), {"budget": "1kB"}, InfeasibleError, "no batch fits"),
        (
            batch(),
            {"budget": None, "gpu": None},
            CkplanError,
            "neither a budget nor a card",
        ),
        (batch(), {"budget": "1GiB", "allow": ["x"]}, CkplanError, "cannot allow"),
        (batch(), {"budget": "1GiB", "allow": "bf16, x"}, CkplanError, "allow 'x'"),
        (
            batch(),
            {"budget": "1GiB", "total_batch": "8"},
            CkplanError,
            "cannot keep a total batch of '8' samples",
        ),
    ],
)
def test_bad_input(
    made: dict[str, Any], how: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ckplan.tune(model(), **{**made, **HOW, **how})


def test_rows_are_cut_and_repeated_in_order() -> None:
    given = torch.arange(6.0).reshape(3, 2)
    workload = as_workload({"model": model(), "batch": (given, torch.tensor(1))}, "f")
    cut, number = with_rows(workload, 2).batch
    assert torch.equal(cut, given[:2])
    assert number == 1
    assert torch.equal(with_rows(workload, 4).batch[0], torch.cat([given, given[:1]]))


def test_a_loop_is_told_what_it_does_otherwise() -> None:
    plan = Plan("Sequential", workload={"micro_batch": 4, "accumulate": 2})
    same = {"micro_batch": 4, "accumulate": 2, "amp": None}
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoopPlanner(plan, None).begin(trained, optimizer, same)
    other = {**same, "accumulate": 1, "amp": "bf16"}
    with pytest.warns(UserWarning, match="accumulate 1 in place of 2, amp bf16 in"):
        LoopPlanner(plan, None).begin(trained, optimizer, other)


class Speaker(nn.Module):
    """Blocks whose words a head of many classes says."""

    def __init__(self, words: int = 3000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.embedding(words)
        for block in self.blocks:
            found = found + block(found).relu()
        return self.head(found)


def said(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), words.flatten())


WIDE = 2048  # a product on a T4 takes longer than to move what it makes


def wide() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(4))
    )


WAY = Way(optimizer="sgd:single")
SPEECH: dict[str, Any] = {**HOW, "loss_fn": said}


SPOKEN = torch.arange(8 * 16).reshape(8, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lever", "made", "given", "how"),
    [
        ("tiles", Speaker, (SPOKEN, SPOKEN), SPEECH),
        ("offload", wide, (torch.zeros(1024, WIDE),) * 2, {**HOW, "gpu": "T4"}),
    ],
)
def test_a_lever_of_plans_has_a_row_and_its_plans_replay(
    lever: str, made: Any, given: tuple[torch.Tensor, ...], how: dict[str, Any]
) -> None:
    record, rows = recorder(made(), given[0], {**how, "target": given[1]})
    step = record(WAY, rows, 1)
    unplanned = Simulator(step).run().peak_bytes
    limit = MemoryLimit(unplanned - MIB)
    searches = Searches(record, limit, WAY, rows)
    bare, way = searches.of(WAY), ALLOWED[lever].pulled(WAY)
    search = searches.of(way)
    assert search.graph_at(rows) is bare.graph_at(rows)  # nothing is recorded again
    assert search.largest_unplanned == bare.largest_unplanned < rows
    without, one = bare.setting(rows), search.setting(rows)
    assert one is not None and one.way == way and one.peak_bytes <= limit.bytes
    timeline = search.simulator(step).run(one.regions)
    assert (timeline.peak_bytes, timeline.overhead) == (one.peak_bytes, one.overhead)
    assert without is None or one.overhead <= without.overhead
    alone = searches.best_of(way)
    assert alone is not None
    row = row_of(searches, ALLOWED[lever], alone, alone, {})
    assert row.refused is None
    assert row.saved_bytes is not None
    assert search.largest_planned >= bare.largest_planned  # a lever only adds
    most = search.setting(search.largest_planned)
    assert most is not None and most.way == way and most.peak_bytes <= limit.bytes
    if lever == "offload":
        assert timeline.moves.moved_bytes > 0
    else:  # they take the logits away, which own the peak
        assert row.saved_bytes > MIB
        assert search.largest_planned > bare.largest_planned


@pytest.mark.slow
def test_chosen_fp16_scales_its_gradients_in_the_setting_and_in_the_plan() -> None:
    wide = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    given = {"batch": torch.randn(256, 512), "target": torch.randn(256, 512)}
    found = ckplan.tune(wide, **given, budget="64MiB", allow=["fp16"], **HOW)
    assert (found.best.way.amp, found.best.way.scaler) == ("fp16", True)
    assert tuned_json(found)["best"]["scaler"] is True
    told = ckplan.tuned_plan(found).workload
    assert (told["amp"], told["scaler"]) == ("fp16", True)
    row = next(one for one in found.levers if one.name == "fp16")
    assert row.pays and row.in_best and row.bits == "changes"


@pytest.mark.slow
def test_shards_are_levers_and_count_the_samples_of_all_ranks() -> None:
    how = {"budget": "17MiB", "total_batch": 2**12}
    found = ckplan.tune(model(), **batch(), **how, **HOW, allow=["zero3"], world_size=4)
    best, way = found.best, found.best.way
    assert (way.shard, way.ranks) == ("zero3", 4)
    assert best.batch * best.accumulate * 4 == best.samples == 2**12
    assert best.accumulate > 1
    accumulated = {**HOW, **SHARDED, "accumulate": 2}
    own = ckplan.profile(model(), **batch(best.batch), **accumulated)
    assert Simulator(own).run(best.regions).peak_bytes == best.peak_bytes
    rings = "of all 4 ranks, of one machine: rings at 27.5 GB/s each way"
    assert any(rings in one for one in found.notes)


SHARDED: dict[str, Any] = {"shard": "zero3", "world_size": 4}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"allow": ["ddp"]}, "cannot tune 'ddp' on one rank"),
        ({"world_size": 4}, "cannot tune 4 ranks without a scheme"),
        ({"allow": ["close"]}, "cannot allow close bits alone"),
        ({"allow": ["tile"]}, "there is no such lever"),
        (
            {"allow": ["ddp"], "world_size": 3, "total_batch": 64},
            "3 ranks do not divide the total batch 64",
        ),
    ],
)
def test_levers_that_cannot_be_are_named(how: dict[str, Any], message: str) -> None:
    if "total_batch" in how:  # one way of several: its row says why
        found = ckplan.tune(model(), **batch(), budget="24MiB", **how, **HOW)
        assert message in str([row.refused for row in found.levers])
        return
    with pytest.raises(CkplanError, match=message):
        ckplan.tune(model(), **batch(), budget="24MiB", **how, **HOW)


def test_what_a_model_has_no_lever_for_is_refused_in_its_row() -> None:
    found = ckplan.tune(
        *(model(), batch()["batch"]),
        **{**HOW, "gpu": None, "in_step": False, "loss_fn": None},
        budget="24MiB",
        total_batch=64,
        allow=["offload", "tiles"],
    )
    why = {row.name: row.refused for row in found.levers if row.refused}
    assert "to host memory: the step runs there" in str(why["offload"])
    assert "cannot tile" in str(why["tiles"])
