"""Compiled steps as a lever of ``tune``: bytes, results, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import ckplan
from ckplan.autotune import recorder_of_spec
from ckplan.compiling.step import profile_compiled
from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import COMPILED
from ckplan.report.tuning import tuned_json
from ckplan.simulating.simulate import Simulator
from ckplan.training.loading import WorkloadSpec
from ckplan.tuning.recorded import tune_recorded
from ckplan.tuning.settings import ALLOWED, Way, conflict, levers_of
from ckplan.tuning.tuned import Tuned

CARD = "RTX 4090"
_FILE = """
import torch
from torch import nn


class Activation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))


def loss(output, batch):
    return output.square().mean()


def build(*, batch: int = 8):
    layers = (m for _ in range(2) for m in (nn.Linear(256, 256), Activation()))
    model = nn.Sequential(nn.LayerNorm(256), *layers, nn.Linear(256, 8, bias=False))
    return model, torch.randn(batch, 512, 256), loss
"""


@pytest.fixture(name="spec", scope="module")
def _spec(tmp_path_factory: pytest.TempPathFactory) -> WorkloadSpec:
    path = tmp_path_factory.mktemp("compiled") / "model.py"
    path.write_text(_FILE)
    return WorkloadSpec(str(path))


@pytest.fixture(name="tuned", scope="module")
def _tuned(spec: WorkloadSpec) -> Tuned:
    record, rows, way = recorder_of_spec(spec, gpu=CARD)
    return tune_recorded(
        record, rows, way, budget="160MiB", gpu=None, allow=["compile"]
    )


def kinds(graph: Graph) -> dict[str, int]:
    return {
        kind: graph.bytes_by_kind[kind] for kind in ("parameter", "optimizer", "buffer")
    }


def test_a_compiled_step_has_the_update_of_the_uncompiled_one(
    spec: WorkloadSpec,
) -> None:
    record, _, way = recorder_of_spec(spec, gpu=CARD)
    for optimizer in (None, "adamw:single", "adamw:fused"):
        plain = replace(way, optimizer=optimizer)
        eager, found = record(plain, 8, 1), record(replace(plain, compiled=True), 8, 1)
        update = eager.ops[eager.backward_stop :]
        assert [op.name for op in found.ops[found.backward_stop :]] == [
            op.name for op in update
        ]
        assert sum(op.seconds for op in found.ops[found.backward_stop :]) == (
            pytest.approx(sum(op.seconds for op in update))
        )
        assert kinds(found) == kinds(eager)
        alone = profile_compiled(spec, gpu=CARD)
        assert found.ops[: found.backward_stop][0].name == alone.ops[0].name
        assert found.num_backward == alone.num_backward
        # States, and what it keeps on the device, are all that the update adds before.
        states = kinds(eager)["optimizer"] + kinds(eager)["buffer"]
        backward = Simulator(found).run().live_bytes[: 2 * found.backward_stop]
        peak = Simulator(alone).run().peak_bytes
        assert max(backward) == peak + states


def test_it_goes_with_autocast(spec: WorkloadSpec) -> None:
    assert conflict([ALLOWED["bf16"]], ALLOWED["compile"]) is None
    record, _, way = recorder_of_spec(spec, gpu=CARD)
    compiled = replace(way, compiled=True)
    plain, cast = record(compiled, 8, 1), record(replace(compiled, amp="bf16"), 8, 1)
    uncompiled = record(replace(way, amp="bf16"), 8, 1)
    assert cast.step_seconds < min(plain.step_seconds, uncompiled.step_seconds)
    assert kinds(cast) == kinds(plain)
    peaks = [Simulator(graph).run().peak_bytes for graph in (cast, plain)]
    assert peaks[0] < peaks[1]


def test_it_is_a_row_and_a_setting_like_others(tuned: Tuned) -> None:
    row = next(one for one in tuned.levers if one.name == "compile")
    assert (row.refused, row.bits) == (None, "close")
    assert row.pays and row.in_best
    assert tuned.best.way.compiled
    assert "compiled" in tuned.best.way.title
    assert tuned_json(tuned)["best"]["compile"] is True
    assert tuned.best.peak_bytes <= tuned.limit.bytes
    assert tuned.best.samples_per_second > (tuned.base or tuned.best).samples_per_second
    plan = ckplan.tuned_plan(tuned)
    assert plan.code == COMPILED
    assert plan.workload["micro_batch"] == tuned.best.batch


def test_what_goes_not_together_is_said() -> None:
    lever = ALLOWED["compile"]
    for name, why in (("close", "saved"), ("tiles", "saved"), ("offload", "saved")):
        assert why in str(conflict([ALLOWED[name]], lever))
    (shard,) = (one for one in levers_of(Way(), "fsdp2", 2) if one.name == "fsdp2")
    assert "one rank" in str(conflict([lever], shard))


def test_without_a_card_or_with_accumulation_it_is_refused_in_its_row(
    spec: WorkloadSpec,
) -> None:
    for gpu, many, why in ((None, 1, "without a card"), (CARD, 2, "accumulates")):
        record, _, way = recorder_of_spec(spec, gpu=gpu)
        with pytest.raises(WorkloadError, match=why):
            record(replace(way, compiled=True), 8, many)


def test_a_model_that_exists_is_refused_in_its_row() -> None:
    model, batch = nn.Linear(64, 64), torch.randn(8, 4096, 64)
    found = ckplan.tune(model, batch, gpu=CARD, allow=["compile"])
    row = next(one for one in found.levers if one.name == "compile")
    assert "exists already" in str(row.refused)
