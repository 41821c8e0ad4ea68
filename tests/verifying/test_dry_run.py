"""Three opinions on one peak: simulated, dry run, and measured by the allocator."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import peak_bytes_of
from small_models import MODELS, build, plans, run_plans
from torch import nn
from trained import measured_peak
from typer.testing import CliRunner

import ckplan
from ckplan import applying
from ckplan.applying.tensors.retained import copy_of
from ckplan.cli import app
from ckplan.errors import PlanError, VerifyError, WorkloadError
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.curve import PHASES
from ckplan.simulating.simulate import simulate
from ckplan.tracing.costs.cost_cache import Cost
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.training.workload import Workload
from ckplan.verifying.dry_run import dry_run, dry_run_workload
from ckplan.verifying.storage_tracker import Phase, StorageTracker

WHOLE = Plan(regions=(PlannedRegion("."),))


@pytest.mark.parametrize(
    "name",
    [
        *("convolution", "masked", "recurrent", "listed"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("attention", "function", "residual", "unrolled")
        ),
    ],
)
def test_simulated_dry_run_and_measured_peaks_are_one(name: str) -> None:
    workload = build(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    chosen = plans(name)[1:3] if name in MODELS else run_plans(name)[:1]
    unplanned = measured_peak(build(name))
    for plan in chosen:
        found = dry_run_workload(lambda: build(name), plan, Training("adamw"))
        model = build(name)
        applying.apply(model.model, plan)
        measured = measured_peak(model)
        assert found.dry_run_peak_bytes == pytest.approx(measured, rel=1e-4, abs=512)
        assert found.unplanned_dry_run_peak_bytes == pytest.approx(unplanned, rel=1e-4)
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        assert predicted == pytest.approx(measured, rel=0.003)
        assert simulate(graph).peak_bytes == pytest.approx(unplanned, rel=0.003)
        assert measured < unplanned


class Overwriting(nn.Module):
    """Overwrites what is wanted later: so a copy of it is made when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        gate = torch.sigmoid(x.t() + 1).t()
        return self.second(x.relu_()) + gate


def peaks_under_rerun(
    make: Callable[[], Workload], calls: str, training: Training
) -> tuple[int, int]:
    """Predicted and of a dry run, where some calls run again."""
    workload, plan = make(), Plan(regions=(PlannedRegion(calls, "rerun"),))
    options = dataclasses.asdict(training)
    graph = ckplan.profile(workload.model, workload.batch, **options)
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    return predicted, dry_run_workload(make, plan, training).dry_run_peak_bytes


class OfTwoTypes(nn.Module):
    """Multiplies what is of two types: the engine casts a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(3):
            x = x.sin()
        return (x.bfloat16() * x.cos()).bfloat16()


def test_torchs_checkpoint_lets_go_before_gradients_are_cast() -> None:
    def workload() -> Workload:
        return Workload(nn.Sequential(OfTwoTypes(), nn.Tanh()), torch.ones(1 << 20))

    predicted, found = peaks_under_rerun(workload, "0", Training("adamw"))
    assert predicted == pytest.approx(found, abs=1024)


class Unread(nn.Module):
    """Is given what it does not read, as masks and positions often are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, *, hints: list[torch.Tensor]) -> torch.Tensor:
        return (x * self.weight).sin().cos()


class Giving(nn.Module):
    """Gives one of its layers a tensor that nothing else holds for long."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Unread()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x, hints=[x + 1])


def test_what_a_call_was_given_is_held_to_run_it_again_though_nothing_reads_it() -> (
    None
):
    def workload() -> Workload:
        return Workload(Giving(), torch.ones(1 << 20))

    predicted, found = peaks_under_rerun(workload, "last", Training("adamw"))
    assert predicted == pytest.approx(found, abs=1024)


class Recurrent(nn.Module):
    """One layer, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(256, 256), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


@pytest.mark.parametrize("calls", ["layer", "layer#[1..2]"])
def test_weights_that_calls_share_are_cast_anew_where_a_call_runs_again(
    calls: str,
) -> None:
    def workload() -> Workload:
        return Workload(Recurrent(), torch.ones(16, 256))

    training = Training("sgd", amp="bf16")
    predicted, found = peaks_under_rerun(workload, calls, training)
    assert predicted == found


class Attending(nn.Module):
    """Attends by an op that draws random numbers, but not without dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_dry_run_draws_no_numbers_where_attention_has_no_dropout() -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Attending(), Attending())
        return Workload(model, torch.randn(1, 4, 32, 16))

    predicted, found = peaks_under_rerun(build, "[1..2]", Training("adamw"))
    assert predicted == pytest.approx(found, abs=1024)


class Mixing(nn.Module):
    """Mixes by a Fourier transform, of which it takes the real part: another type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.fft.fftn(x, dim=(-2, -1)).real).tanh()


def test_a_dry_run_lets_go_of_what_is_seen_as_another_type() -> None:
    def build() -> Workload:
        layers = [nn.Linear(64, 64), *(Mixing() for _ in range(4))]
        return Workload(nn.Sequential(*layers), torch.randn(8, 64, 64))

    graph = ckplan.profile(build().model, build().batch)
    plan = Plan(regions=(PlannedRegion("[1..4]"),))
    found = dry_run_workload(build, plan, Training("adamw"))
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    assert predicted == pytest.approx(found.dry_run_peak_bytes, abs=1024)
    assert not any("could not be measured" in note for note in found.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_fake_copy_of_what_is_not_contiguous_is_held_by_nobody_else(
    dtype: torch.dtype,
) -> None:
    with fake_tensors():
        copied = copy_of(torch.ones(4, 8, dtype=dtype).t())
        assert (copied.shape, copied.stride()) == ((8, 4), (1, 8))
        storage = weakref.ref(copied.untyped_storage())
        del copied
        assert storage() is None


class Branching(nn.Module):
    """Multiplies what it is given by several weights, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [way(x) for way in self.ways]
        return (found[0] * found[1] * found[2]).tanh()


def test_what_is_cast_several_times_is_cast_as_often_where_it_runs_again() -> None:
    def workload() -> Workload:
        layers = nn.LayerNorm(64), Branching(), Branching()
        return Workload(nn.Sequential(*layers), torch.ones(4096, 64))

    training = Training("sgd", amp="bf16")
    predicted, found = peaks_under_rerun(workload, "[1..2]", training)
    assert predicted == pytest.approx(found, abs=1024)


class Owning(nn.Module):
    """Has buffers, and what acts as one, that it reads or not."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("unread", torch.ones(1 << 18))
        if plain:
            self.plain = torch.ones(1 << 19)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) + table[: len(x)]).sin()


class Lending(nn.Module):
    """Lends its layers a buffer that is not theirs."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Owning(plain) for _ in range(2))
        self.register_buffer("table", torch.ones(1 << 16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.table)
        return x


@pytest.mark.parametrize(
    ("calls", "plain"), [("layers.[0..1]", True), ("layers.1", False)]
)
def test_copies_are_of_the_buffers_of_what_runs_again(calls: str, plain: bool) -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        return Workload(Lending(plain), torch.randn(8192, 64))

    plan = Plan(regions=(PlannedRegion(calls, "rerun"),))
    workload, planned = build(), build()
    graph = ckplan.profile(workload.model, workload.batch)
    applying.apply(planned.model, plan)
    measured = measured_peak(planned) + (plain and 2 << 21)
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    assert predicted == pytest.approx(measured, abs=8192)
    found = dry_run_workload(build, plan, Training("adamw"))
    assert found.dry_run_peak_bytes == pytest.approx(measured, abs=8192)


class Asking(nn.Sequential):
    """Lets gradients flow to a view of what it is given, as speech models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        x.requires_grad_()
        return super().forward(x)


def test_a_dry_run_ends_where_a_region_is_given_a_view_that_wants_gradients() -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        return Workload(Asking(nn.Conv1d(1, 8, 3), nn.Tanh()), torch.randn(4, 256))

    plan = Plan(regions=(PlannedRegion("0"), PlannedRegion("1")))
    planned = build()
    applying.apply(planned.model, plan)
    found = dry_run_workload(build, plan, Training("adamw"))
    assert found.dry_run_peak_bytes == pytest.approx(measured_peak(planned), abs=512)


class Steady(nn.Sequential):
    """Norms that go by running statistics, of which copies are held."""

    def __init__(self, *layers: nn.Module) -> None:
        norms = (nn.BatchNorm1d(4096).eval() for _ in range(2))
        super().__init__(next(norms), nn.Tanh(), next(norms), nn.Sigmoid())


REGIONS = {
    "layers": (PlannedRegion("[1..3]"),),
    "whole": (PlannedRegion("."),),
    "keeping": (PlannedRegion("[1..3]", save=(OpName("1", "tanh"),)),),
    "nested": (PlannedRegion(".", inner=(PlannedRegion("[1..3]"),)),),
}


@pytest.mark.parametrize(
    ("kind", "where"), [(Overwriting, "layers"), *((Steady, one) for one in REGIONS)]
)
def test_copies_that_regions_make_are_counted(kind: Any, where: str) -> None:
    rows, width = (4096, 64) if kind is Overwriting else (8, 4096)

    def build() -> Workload:
        torch.manual_seed(0)
        layers = [kind() for _ in range(3)]
        model = nn.Sequential(nn.Linear(4, width), *layers, nn.Linear(width, 4))
        return Workload(model, torch.randn(rows, 4))

    plan = Plan(regions=REGIONS[where])
    workload, planned = build(), build()
    graph = ckplan.profile(workload.model, workload.batch)
    applying.apply(planned.model, plan)
    measured = measured_peak(planned)
    assert simulate(graph, resolve(plan, graph)).peak_bytes == measured
    training = Training("adamw")
    assert dry_run_workload(build, plan, training).dry_run_peak_bytes == measured


def test_a_rerun_keeps_running_statistics_that_norms_moved() -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        norms = (nn.Sequential(nn.BatchNorm1d(4096), nn.Tanh()) for _ in range(3))
        model = nn.Sequential(nn.Linear(4, 4096), *norms, nn.Linear(4096, 4))
        return Workload(model, torch.randn(8, 4))

    predicted, found = peaks_under_rerun(build, "[1..3]", Training("adamw"))
    planned = build()
    applying.apply(planned.model, Plan(regions=(PlannedRegion("[1..3]", "rerun"),)))
    near = pytest.approx(measured_peak(planned), abs=2048)
    assert (predicted, found) == (near, near)


class Deep(nn.Module):
    """What it was given is wanted by nobody once its first op has run again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            thrice = torch.cat([x, x, x], dim=1).view(-1, 3, 64)
            x = nn.functional.dropout(thrice.sum(1).tanh(), self.dropout)
        return x


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_peaks_in_the_midst_of_a_recomputation_are_predicted(dropout: float) -> None:
    def build() -> Workload:
        model = nn.Sequential(nn.Linear(64, 64), Deep(dropout))
        return Workload(model, torch.randn(1024, 64))

    workload, planned = build(), build()
    graph = ckplan.profile(workload.model, workload.batch)
    plan = Plan(regions=(PlannedRegion("1"),))
    timeline = simulate(graph, resolve(plan, graph))
    applying.apply(planned.model, plan)
    measured = measured_peak(planned)
    assert timeline.peak_at.startswith("recomputation")
    assert measured <= timeline.peak_bytes <= 1.0005 * measured


@pytest.mark.parametrize("training", [Training(amp="bf16"), Training(accumulate=3)])
def test_every_way_to_train_is_followed(training: Training) -> None:
    workload = build("attention")
    plan = Plan(regions=(PlannedRegion("[0..2]"),))
    found = dry_run_workload(lambda: build("attention"), plan, training)
    graph = ckplan.profile(
        workload.model,
        workload.batch,
        loss=workload.loss,
        amp=training.amp,
        accumulate=training.accumulate,
    )
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    unplanned = simulate(graph).peak_bytes
    assert found.dry_run_peak_bytes == pytest.approx(predicted, rel=0.003)
    assert found.unplanned_dry_run_peak_bytes == pytest.approx(unplanned, rel=0.003)


def test_a_meter_counts_what_is_alive_and_nothing_else() -> None:
    meter = StorageTracker()
    with meter.watching():
        before = torch.empty(100, dtype=torch.uint8)
        meter.begin("forward")
        kept = torch.empty(30, dtype=torch.uint8)
        for _ in range(3):
            torch.empty(1000, dtype=torch.uint8)
        meter.begin("backward")
        view = kept[:10]
        del kept, before
        meter.begin("optimizer")
        state = torch.get_rng_state()
    assert sum(isinstance(event, Phase) for event in meter.log.events) == 3
    curve = meter.log.curve([Cost(1.0, 0, 0, measured=False)] * len(meter.log.ops))
    assert curve.peak_bytes == 5056 + 30
    assert (view.numel(), state.numel()) == (10, 5056)
    levels = [level for _, level in curve.points]
    assert (levels[0], max(levels[:-2]), levels[-1]) == (100, 1130, 5086)


def test_gradients_that_meet_are_added_in_place_as_on_a_plain_run() -> None:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        return (y * 2.0 + y * 3.0).sum()

    plain = loss_of(torch.zeros(10**5, requires_grad=True))
    measured = peak_bytes_of(plain.backward)
    meter = StorageTracker()
    with meter.watching():
        loss = loss_of(torch.zeros(10**5, requires_grad=True))
        meter.watch_nodes(loss)
        meter.begin("backward")
        loss.backward()
    curve = meter.log.curve([Cost(1.0, 0, 0, measured=False)] * len(meter.log.ops))
    levels = [level for _, level in curve.points]
    assert max(levels) - levels[0] == pytest.approx(measured, abs=16)  # scalars
    assert measured < 3 * 400_000  # what adding out of place would need


HUGE = """
import torch
from torch import nn

def build(*, width=400_000, layers=3, batch=400_000):
    model = nn.Sequential(*(
        nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
        for _ in range(layers)
    ))
    return model, torch.randn(batch, 64)
"""


@pytest.fixture
def huge(tmp_path: Path) -> WorkloadSpec:
    path = tmp_path / "huge.py"
    path.write_text(HUGE)
    return WorkloadSpec(str(path))


def test_a_model_of_terabytes_is_followed_on_any_machine(huge: WorkloadSpec) -> None:
    hidden_bytes = 4 * 400_000**2
    plan = Plan(budget_bytes=4 * hidden_bytes, regions=(PlannedRegion("[0..2]"),))
    found = dry_run(huge, plan, optimizer="sgd")
    # Backward of tanh: its output, and its gradients on both sides.
    assert 3 * hidden_bytes < found.dry_run_peak_bytes < 3.01 * hidden_bytes
    unplanned = found.unplanned_dry_run_peak_bytes
    assert 5 * hidden_bytes < unplanned < 5.01 * hidden_bytes
    assert found.fits


@pytest.mark.parametrize("check", [ckplan.verify, ckplan.dry_run])
def test_a_target_and_a_path_are_enough(check: Any, tmp_path: Path) -> None:
    path, plan = tmp_path / "small.py", tmp_path / "plan.yaml"
    path.write_text(HUGE.replace("400_000", "40"))
    plan.write_text("ckplan: 1\nregions:\n  - calls: '[0..2]'\n")
    assert check(f"{path}:build", plan).regions_ran == 3
    if check is ckplan.dry_run:  # to verify takes seconds, and targets are read alike
        assert check(str(path), str(plan)).regions_ran == 3
    with pytest.raises(WorkloadError, match="build a workload from a Linear"):
        check(nn.Linear(8, 8), plan)
    with pytest.raises(PlanError, match="use a dict as a plan"):
        check(str(path), {"regions": []})


def run(*argv: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["verify", *argv])
    return done.exit_code, done.stdout, done.stderr


def test_a_dry_run_over_budget_ends_with_code_4(
    huge: WorkloadSpec, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("ckplan: 1\nbudget_bytes: 1000000\nregions:\n- calls: '0'\n")
    arguments = (huge.target, str(plan), "--fake", "--set", "layers=1")
    arguments = (*arguments, "--set", "width=1000", "--set", "batch=300")
    code, out, err = run(*arguments, "--json")
    assert code == 4
    assert "exceeds its budget by " in err
    assert ": peak of the dry run" in err
    found = json.loads(out)
    assert found["dry_run_peak_bytes"] > found["budget_bytes"] == 1000000
    assert (found["fits"], found["passed"]) == (False, False)
    curve = found["timeline"]["planned"]["dry_run"]
    assert max(curve["live_bytes"]) == found["dry_run_peak_bytes"]
    assert list(curve["phase_seconds"]) == [*PHASES, "end"]
    code, out, _ = run(*arguments)
    assert code == 4
    assert "measured on this machine, one distinct op at a time" in " ".join(
        out.split()
    )


class Curious(nn.Module):
    """Goes by values, which a dry run has not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return y * 2 if y.sum() > 0 else y


def test_a_model_that_wants_values_is_an_error_of_three_lines() -> None:
    def make() -> Workload:
        return Workload(Curious(), torch.randn(2, 8))

    with pytest.raises(VerifyError, match="the dry run failed") as caught:
        dry_run_workload(make, WHOLE)
    assert len(str(caught.value).splitlines()) == 3


def test_a_region_that_never_runs_is_named() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def make() -> Workload:
        return Workload(Lazy(), torch.randn(2, 8))

    plan = Plan(regions=(PlannedRegion("used"), PlannedRegion("spare")))
    found = dry_run_workload(make, plan)
    assert (found.regions_ran, found.regions_idle) == (1, ("spare",))


class Drawing(nn.Module):
    """Draws from a generator of its own, and from the device's if it likes."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(16, 16), rate
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = torch.tanh(x * (torch.rand(x.shape, generator=self.generator) > 0.1))
        return nn.functional.dropout(x, self.rate) if self.rate else x


@pytest.mark.parametrize(("by", "rate"), [("program", 0.1), ("rerun", 0.0)])
def test_states_of_other_generators_are_counted(by: str, rate: float) -> None:
    def make() -> Workload:
        model = nn.Sequential(*[Drawing(rate) for _ in range(4)])
        return Workload(model, torch.randn(256, 16), lambda out, _: out.square().mean())

    plan = Plan(regions=(PlannedRegion("[0..3]", by),))
    workload = make()
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    ckplan.apply(workload.model, plan)
    found = dry_run_workload(make, plan, Training("adamw"))
    assert predicted == found.dry_run_peak_bytes == measured_peak(workload)


class Beginning(nn.Module):
    """What it needs for a moment is most of the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            most = torch.ones(1000, 256) * x.sum()
        return x + most.mean()


def test_what_modules_hold_from_the_last_step_is_there_until_it_is_replaced() -> None:
    def make() -> Workload:
        old = nn.utils.spectral_norm  # whose hook sets a plain attribute
        layers = [old(nn.Linear(256, 256)) for _ in range(3)]
        model = nn.Sequential(Beginning(), *layers)
        return Workload(model, torch.randn(8, 256), lambda out, _: out.square().mean())

    first = make()
    graph = ckplan.profile(first.model, first.batch, loss=first.loss, replay=False)
    found = dry_run_workload(make, None, Training("adamw"))
    assert simulate(graph).peak_bytes == found.unplanned_dry_run_peak_bytes
    assert simulate(graph).peak_at == "forward of 0"
