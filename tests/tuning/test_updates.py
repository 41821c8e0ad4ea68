"""Of a further optimizer the update alone is recorded, and nothing else changes."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.autotune import recorder_of_spec
from ckplan.graph.graph import Graph
from ckplan.graph.records import Storage
from ckplan.simulating.allocations import reserved_bytes
from ckplan.simulating.simulate import Simulator
from ckplan.tracing import other_steps
from ckplan.tracing import profile as profiling
from ckplan.tracing.first_step import in_one_call
from ckplan.tracing.rows import spec_rows
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import TrainingStep

_FILE = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    return model.to(torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
"""


@pytest.fixture(name="spec")
def _spec(tmp_path: Path) -> WorkloadSpec:
    path = tmp_path / "model.py"
    path.write_text(_FILE)
    return WorkloadSpec(str(path))


@pytest.mark.parametrize("optimizer", ["adamw:fused", "adamw:single", "sgd"])
def test_a_step_with_an_exchanged_update_is_the_recorded_one(
    spec: WorkloadSpec, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged: list[Any] = []

    def with_update_of(*steps: object) -> object:
        exchanged.append(original(*steps))
        return exchanged[-1]

    original = other_steps.with_update_of
    monkeypatch.setattr(other_steps, "with_update_of", with_update_of)
    found = []
    for first in (True, False):
        record, rows, way = recorder_of_spec(spec, gpu="RTX 4090")
        if first:
            record(way, rows, 1)
        found.append(record(replace(way, optimizer=optimizer), rows, 1))
    assert [one.ops is found[0].ops for one in exchanged] == [True]
    mine, whole = (Simulator(graph).run() for graph in found)
    assert mine.peak_bytes == whole.peak_bytes
    assert reserved_bytes(mine) == reserved_bytes(whole)
    ops = [[op.name for op in graph.ops] for graph in found]
    assert ops[0] == ops[1]
    sizes = [sorted((s.bytes, s.kind) for s in g.storages) for g in found]
    assert sizes[0] == sizes[1]
    assert found[0].step_seconds == found[1].step_seconds


def test_an_update_is_recorded_at_one_batch_and_holds_at_others(
    spec: WorkloadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, rows, way = recorder_of_spec(spec, gpu="RTX 4090")
    other = replace(way, optimizer="adamw:single")
    for batch in (rows, 2 * rows):
        record(way, batch, 1)
    record(other, rows, 1)

    def trace(*step: object, **how: object) -> None:
        pytest.fail("nothing is to be traced")

    with monkeypatch.context() as untraced:
        untraced.setattr(profiling, "trace", trace)
        derived = record(other, 2 * rows, 1)
    whole = recorder_of_spec(spec, gpu="RTX 4090")[0](other, 2 * rows, 1)
    assert derived.fingerprint == whole.fingerprint
    assert derived.options == whole.options
    assert _ops(derived) == _ops(whole)
    assert _storages(derived) == _storages(whole)
    calls = [[(str(c), c.start, c.stop) for c in g.calls] for g in (derived, whole)]
    assert calls[0] == calls[1]
    assert Simulator(derived).run().live_bytes == Simulator(whole).run().live_bytes


def _ops(graph: Graph) -> list[Any]:
    """Ops with what their storages are, whose numbers may differ.

    Of gradients of one size in blocks it is not known which is which.
    """

    def told(storages: tuple[int, ...]) -> list[Storage]:
        found = [graph.storages[number] for number in storages]
        return [
            replace(one, maker=0, tensor=None) if one.kind == "gradient" else one
            for one in found
        ]

    return [
        (
            replace(op, reads=(), writes=(), outputs=()),
            *map(told, (op.reads, op.writes, op.outputs)),
        )
        for op in graph.ops
    ]


def _storages(graph: Graph) -> Counter[Storage]:
    return Counter(graph.storages)


def test_rows_of_a_model_that_is_cast_are_found_without_bytes(
    spec: WorkloadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes = []
    load = WorkloadSpec.load

    def counted(self: WorkloadSpec) -> object:
        make = load(self)
        return lambda: makes.append(1) or make()

    monkeypatch.setattr(WorkloadSpec, "load", counted)
    assert spec_rows(spec) == 4
    assert len(makes) == 1  # not a second time on real tensors


@pytest.mark.parametrize(
    ("optimizer", "updates"),
    [
        *((one, 1) for one in (None, "adamw:fused", "adamw:single", "momentum", "sgd")),
        ("adafactor", 2),  # its state shares storages
    ],
)
def test_the_state_before_another_batch_needs_no_update(
    spec: WorkloadSpec,
    optimizer: str | None,
    updates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, rows, way = recorder_of_spec(spec, gpu="RTX 4090")
    way = replace(way, optimizer=optimizer)
    record(way, rows, 1)
    taken = []
    update = TrainingStep.update
    with monkeypatch.context() as counted:
        counted.setattr(
            TrainingStep, "update", lambda step: taken.append(1) or update(step)
        )
        known = record(way, 2 * rows, 1)
    assert len(taken) == updates  # one is recorded
    whole = recorder_of_spec(spec, gpu="RTX 4090")[0](way, 2 * rows, 1)
    assert replace(known, notes=()) == replace(whole, notes=())


def test_kernels_share_the_state_before_their_step(spec: WorkloadSpec) -> None:
    record, rows, way = recorder_of_spec(spec, gpu="RTX 4090")
    single = replace(way, optimizer="adamw:single")
    record(way, rows, 1)
    known = record(single, 2 * rows, 1)
    whole = recorder_of_spec(spec, gpu="RTX 4090")[0](single, 2 * rows, 1)
    assert replace(known, notes=()) == replace(whole, notes=())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_the_state_before_a_recorded_step_is_made_in_one_call(make: Any) -> None:
    names: list[list[str]] = []
    states = []
    for scope in (nullcontext, in_one_call):
        torch.manual_seed(0)
        parameters = [torch.randn(3, requires_grad=True) for _ in range(9)]
        for one in parameters:
            one.grad = torch.ones_like(one)
        optimizer = make(parameters, lr=0.1, foreach=False)
        with scope(optimizer), Names() as seen:
            optimizer.step()
        assert optimizer.param_groups[0]["foreach"] is False
        names.append(seen.names)
        states.append([optimizer.state[one] for one in parameters])
    assert len(names[1]) < len(names[0]) and any("foreach" in one for one in names[1])
    assert str(states[0]) == str(states[1])


def test_an_optimizer_of_ones_own_is_left_as_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    optimizer = Own([torch.zeros(1, requires_grad=True)], lr=0.1, foreach=False)
    with in_one_call(optimizer), in_one_call(None):
        assert optimizer.param_groups[0]["foreach"] is False


class Names(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
