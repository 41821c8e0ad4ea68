"""Plans that offload: the same bits, the predicted peak, errors, and nothing left."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from measured import peak_bytes_of
from moves import mixes, ops_of
from moving_scenes import mover_of
from small_models import MODELS, RUNS, build
from torch import nn
from torch.nn import functional

import ckplan
from ckplan.applying.moving import spill_file
from ckplan.errors import ApplyError, PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.file import loads
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion, Prediction
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Simulator
from ckplan.solving.offloading import movable, only_wanted
from ckplan.training.workload import Workload

_FAST = ("residual", "convolution", "recurrent")
FAMILIES = [
    name if name in _FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in MODELS
]


_DESCRIPTORS = Path("/proc/self/fd")
TANH = PlannedRegion(".", offload=(OpName.parse("1/tanh"),))


@cache
def graph_of(name: str) -> Graph:
    workload = build(name)
    return ckplan.profile(
        workload.model,
        workload.batch,
        loss=workload.loss,
        optimizer="none",
        replay=False,
    )


def spaces(name: str) -> list[Plan]:
    """Every call, the whole model, and runs: what moves is chosen later."""
    calls = "cell" if name == "unrolled" else "[0..2]"
    regions = [(PlannedRegion(calls),), (PlannedRegion("."),)]
    if name in RUNS:
        regions.append(tuple(PlannedRegion("", run=run) for run in RUNS[name]))
    return [Plan(regions=one) for one in regions]


def moving_plans(name: str, count: int) -> Iterator[tuple[Plan, int]]:
    """Plans that move, with their predicted peaks."""
    graph = graph_of(name)
    simulator = Simulator(graph)
    for number, space in enumerate(spaces(name)):
        regions = list(resolve(space, graph))
        for mix in mixes(simulator, regions, number, count):
            assert any(region.offload for region in mix)
            plan = Plan(regions=describe(graph, mix))
            assert set(resolve(plan, graph)) == set(mix)
            yield plan, simulator.run(mix).peak_bytes


def step(workload: Workload, seed: int = 1) -> list[torch.Tensor]:
    """The loss and the gradients of one step."""
    model = workload.model
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(workload.batch)
    loss = workload.loss(out, workload.batch)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def planned(name: str, plan: Plan, folder: Path) -> Workload:
    workload = build(name)
    ckplan.apply(workload.model, plan, spill=folder)
    return workload


def measured_peak(workload: Workload) -> int:
    workload.model.zero_grad()
    gc.collect()
    held = [*workload.model.parameters(), *workload.model.buffers(), workload.batch]
    return peak_bytes_of(lambda: step_without_copies(workload), held)


def step_without_copies(workload: Workload) -> None:
    torch.manual_seed(1)
    out = workload.model(workload.batch)
    workload.loss(out, workload.batch).backward()


@pytest.mark.parametrize("name", FAMILIES)
def test_moved_tensors_come_back_bit_for_bit_at_the_predicted_peak(
    name: str, tmp_path: Path
) -> None:
    for plan, predicted_bytes in moving_plans(name, 1 if name in _FAST else 4):
        plain, moved = build(name), planned(name, plan, tmp_path)
        for seed in range(3):
            assert same(step(plain, seed), step(moved, seed))
        recorded = any(one.recorded > 1 for one in ckplan.status(moved.model).regions)
        if not recorded or name == "unrolled":  # else random states are held longer
            assert measured_peak(moved) == pytest.approx(predicted_bytes, rel=1e-4)
        assert not any(one.missing for one in ckplan.status(moved.model).regions)
        assert ckplan.status(moved.model).spilled_bytes
        assert not list(tmp_path.iterdir())


@cache
def whole_plan(name: str = "residual") -> Plan:
    """The plan that moves whatever it can, of every call."""
    return next(moving_plans(name, 1))[0]


def test_moving_lowers_the_peak_as_keeping_and_recomputing_cannot(
    tmp_path: Path,
) -> None:
    graph = graph_of("residual")
    regions = resolve(Plan(regions=(PlannedRegion("[0..2]"),)), graph)
    simulator = Simulator(graph)
    moved = [
        only_wanted(
            simulator,
            Region(one.call, offload=frozenset(movable(graph, ops_of(graph, one)))),
        )
        for one in regions
    ]
    assert simulator.run(moved).peak_bytes < simulator.run(regions).peak_bytes
    assert simulator.run(moved).peak_bytes < simulator.run().peak_bytes


def test_a_file_neither_grows_nor_stays(tmp_path: Path) -> None:
    gc.collect()
    descriptors = len([*_DESCRIPTORS.iterdir()])
    model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8))
    workload = Workload(model, torch.randn(32, 8), lambda out, _: out.sum())
    ckplan.apply(model, Plan(regions=(TANH,)), spill=tmp_path)
    sizes = set()
    for _ in range(200):
        step_without_copies(workload)
        sizes.add(ckplan.status(workload.model).spilled_bytes)
    assert len(sizes) == 1
    workload.model.zero_grad()
    first = measured_peak(workload)
    assert measured_peak(workload) == first
    ckplan.remove(model)
    del workload, model
    gc.collect()
    assert len([*_DESCRIPTORS.iterdir()]) == descriptors
    assert not list(tmp_path.iterdir())


# -- what is out of the ordinary -----------------------------------------------------


def test_interrupted_steps_leave_a_model_as_good_as_new(tmp_path: Path) -> None:
    plain, moved = build("residual"), planned("residual", whole_plan(), tmp_path)
    for place in range(3):

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        handle = moved.model[place].down.register_forward_hook(fail)  # type: ignore[index,union-attr]
        with pytest.raises(KeyboardInterrupt):
            step(moved)
        handle.remove()
        assert same(step(plain), step(moved))
        out = moved.model(moved.batch)
        out.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            out.sum().backward()
        del out
        assert same(step(plain), step(moved))
    assert ckplan.status(moved.model).spilled_bytes <= 2 * _file_bytes(moved)


def _file_bytes(moved: Workload) -> int:
    fresh = copy.deepcopy(moved)
    step(fresh)
    return ckplan.status(fresh.model).spilled_bytes


def gradients(
    workload: Workload, of: Callable[[torch.Tensor, list[torch.Tensor]], list[object]]
) -> list[object]:
    torch.manual_seed(3)
    x = workload.batch.clone().requires_grad_()
    return of(workload.model(x), [x, *workload.model.parameters()])


def _retained(out: torch.Tensor, given: list[torch.Tensor]) -> list[object]:
    grad = torch.autograd.grad
    loss = out.square().mean()
    return [*grad(loss, given, retain_graph=True), *grad(loss, given)]


def _part(out: torch.Tensor, given: list[torch.Tensor]) -> list[object]:
    loss = out.square().mean()
    last = torch.autograd.grad(loss, given[-2:], retain_graph=True)
    return [*last, *torch.autograd.grad(loss, given)]


def _twice(out: torch.Tensor, given: list[torch.Tensor]) -> list[object]:
    first = torch.autograd.grad(out.square().mean(), given, create_graph=True)
    return [*torch.autograd.grad(sum(one.square().sum() for one in first), given)]  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [_retained, _part, _twice])
def test_graphs_that_are_used_again(
    of: Callable[[torch.Tensor, list[torch.Tensor]], list[object]], tmp_path: Path
) -> None:
    plain, moved = build("residual"), planned("residual", whole_plan(), tmp_path)
    for _ in range(2):
        assert same(gradients(plain, of), gradients(moved, of))  # type: ignore[arg-type]


def test_several_forwards_before_their_backwards(tmp_path: Path) -> None:
    def losses(workload: Workload) -> list[torch.Tensor]:
        workload.model.zero_grad()
        torch.manual_seed(0)
        outs = [workload.model(workload.batch * n).square().mean() for n in (1, 2, 3)]
        with torch.no_grad():
            workload.model(workload.batch)
        for place in (1, 0, 2):
            outs[place].backward()
        return [p.grad for p in workload.model.parameters() if p.grad is not None]

    moved = planned("residual", whole_plan(), tmp_path)
    for _ in range(2):
        assert same(losses(build("residual")), losses(moved))


def test_copies_of_a_model_and_two_models_move_apart(tmp_path: Path) -> None:
    plain, moved = build("residual"), planned("residual", whole_plan(), tmp_path)
    twin = copy.deepcopy(moved)
    outs = []
    for workload in (plain, moved, twin):
        torch.manual_seed(1)
        workload.model.zero_grad()
        outs.append(workload.model(workload.batch).square().mean())
    for out in reversed(outs):
        out.backward()
    grads = [[p.grad for p in w.model.parameters()] for w in (plain, moved, twin)]
    assert same(grads[0], grads[1])  # type: ignore[arg-type]
    assert same(grads[0], grads[2])  # type: ignore[arg-type]


def test_a_copy_takes_room_when_it_trains_and_loads_where_the_folder_is_missing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    predicted = Prediction(1, "", 0.0, 1, moved_bytes=1 << 20)
    moved = planned("residual", replace(whole_plan(), predicted=predicted), folder)
    model = moved.model
    assert ckplan.status(model).spilled_bytes >= 1 << 20
    twin = copy.deepcopy(moved)
    assert ckplan.status(twin.model).spilled_bytes == 0
    assert same(step(moved), step(twin))
    assert ckplan.status(twin.model).spilled_bytes >= 1 << 20
    whole = pickle.dumps(model)
    folder.rmdir()
    loaded = pickle.loads(whole)
    with pytest.raises(ApplyError, match="scratch"):
        step(replace(moved, model=loaded))


def test_a_forward_that_misses_its_guards_moves_as_well(tmp_path: Path) -> None:
    plain, moved = build("residual"), planned("residual", whole_plan(), tmp_path)
    for rows in (256, 100, 256, 17, 100):
        batch = torch.ones(rows, 64)
        pair = (replace(one, batch=batch) for one in (plain, moved))
        assert same(*map(step, pair))


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        hidden = hidden * 2
        return hidden.add_(1.0) * hidden.sigmoid()


def test_a_tensor_that_is_overwritten_is_refused_by_name(tmp_path: Path) -> None:
    model, x = nn.Sequential(Overwriting(), nn.Linear(64, 64)), torch.randn(64, 64)
    plan = loads("ckplan: 1\nregions:\n  - {calls: '0', offload: [./mul]}", "plan")
    graph = ckplan.profile(model, x, optimizer="none", replay=False)
    with pytest.raises(PlanError, match=r"'./mul' .* forward overwrites it later"):
        resolve(plan, graph)
    ckplan.apply(model, plan, spill=tmp_path)
    with pytest.raises(ApplyError, match="changed in place while a plan moved it"):
        model(x)


# -- bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "found"),
    [
        ("up/mm", "runs no such op"),
        ("drop/div_#9", "runs no such op"),
        ("norm/native_layer_norm", "it has 1024 B"),
        ("up/addmm@1", "it has no such output"),
        ("drop/bernoulli_", "forward overwrites it later"),
    ],
)
def test_plans_move_only_what_is_there(ops: str, found: str) -> None:
    plan = loads(f"ckplan: 1\nregions:\n  - {{calls: '0', offload: [{ops}]}}", "plan")
    with pytest.raises(PlanError, match=found) as caught:
        resolve(plan, graph_of("residual"))
    assert caught.value.what.startswith("plan, line 3: cannot offload")


def test_an_output_that_is_not_there_is_named_without_a_trace(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh())
    moved = (OpName.parse("0/addmm@3"), OpName.parse("1/tanh@0"))
    plan = Plan(regions=(PlannedRegion(".", offload=moved),))
    ckplan.apply(model, plan, spill=tmp_path)
    with pytest.warns(UserWarning, match="runs no op 0/addmm@3 "):
        model(torch.randn(8, 64)).sum().backward()
    assert ckplan.status(model).regions[0].missing == ("0/addmm@3",)


def test_a_tensor_is_kept_in_one_way(tmp_path: Path) -> None:
    text = (
        "ckplan: 1\nregions:\n  - {calls: '0', save: [up/addmm], offload: [up/addmm]}"
    )
    with pytest.raises(PlanError, match="the region keeps it as well"):
        resolve(loads(text, "plan"), graph_of("residual"))


LAYERS = 8


class Dropping(nn.Module):
    """Dropout of many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(functional.dropout(self.up(rows).tanh(), 0.3))
        return rows + made


def dropping() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Dropping() for _ in range(LAYERS)))
    return Workload(model, torch.randn(512, 64), lambda out, _: out.square().mean())


MASKS = """
ckplan: 1
regions:
  - calls: '[0..7]'
    encode: {./bernoulli_: bits}
    offload: [up/addmm, ./bernoulli_]
"""


def test_the_bits_of_a_mask_move_in_its_place(tmp_path: Path) -> None:
    plain, moved = dropping(), dropping()
    given = moved.model, moved.batch
    graph = ckplan.profile(*given, loss=moved.loss, optimizer="none", replay=False)
    plan = loads(MASKS, "plan")
    ckplan.apply(moved.model, plan, spill=tmp_path)
    for seed in range(3):
        assert same(step(plain, seed), step(moved, seed))
    line = Simulator(graph).run(resolve(plan, graph))
    numbers = 512 * 512
    assert line.moves.moved_bytes == LAYERS * (4 * numbers + numbers // 8)
    assert ckplan.status(moved.model).spilled_bytes == line.moves.moved_bytes
    assert [one.recorded for one in ckplan.status(moved.model).regions] == [1] * LAYERS
    assert measured_peak(moved) == line.peak_bytes
    kept = loads(MASKS.replace(", ./bernoulli_]", "]"), "plan")
    begin = 2 * graph.num_forward + 1  # of backward
    more = Simulator(graph).run(resolve(kept, graph)).live_bytes[begin]
    assert more - line.live_bytes[begin] >= (LAYERS - 2) * numbers // 8
    assert describe(graph, resolve(plan, graph)) == plan.regions


def test_two_outputs_in_the_same_memory_do_not_both_move() -> None:
    workload = dropping()
    graph = ckplan.profile(
        *(workload.model, workload.batch), loss=workload.loss, replay=False
    )
    text = MASKS.replace("up/addmm", "./div_")
    with pytest.raises(PlanError, match="another output in the same memory moves"):
        resolve(loads(text, "plan"), graph)


def test_a_value_that_nobody_wants_is_not_moved() -> None:
    graph = graph_of("residual")
    text = "ckplan: 1\nregions:\n  - {calls: '2', offload: [./add]}"
    with pytest.raises(PlanError, match="add of 2#0: backward does not want it"):
        Simulator(graph).run(resolve(loads(text, "plan"), graph))


def test_what_an_op_makes_that_runs_again_sooner_is_not_moved() -> None:
    graph = graph_of("recurrent")
    simulator = Simulator(graph)
    (region,) = resolve(Plan(regions=(PlannedRegion("."),)), graph)
    places = frozenset(movable(graph, ops_of(graph, region)))
    everything = only_wanted(simulator, replace(region, offload=places))
    assert 0 < len(everything.offload) < len(places)
    effect = simulator.effect(everything)
    assert effect.moved.keys() == {storage for storage, _ in effect.wants}
    workspaces = {op.outputs[3] for op in graph.ops if op.name == "mkldnn_rnn_layer"}
    assert workspaces
    assert not workspaces & effect.moved.keys()


class Unused(nn.Module):
    """Makes values that no loss reads, and uses others in the reverse order."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        unused = torch.exp(rows.abs())
        first = torch.sin(rows)
        second = torch.cos(first)
        third = torch.sigmoid(second[:128])
        del unused
        made = torch.tanh(third).sum() + torch.tanh(second).sum()
        del third, second
        return made + torch.sin(first).mean()


def unused() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Unused()), torch.randn(1024, 64)


def unused_step() -> Graph:
    model, rows = unused()
    return ckplan.profile(
        model, (rows,), loss_fn=lambda one, _: one, optimizer="none", replay=False
    )


def test_what_only_unused_outputs_want_is_not_moved() -> None:
    graph = unused_step()
    text = "ckplan: 1\nregions:\n  - {calls: '1', offload: [./exp]}"
    with pytest.raises(PlanError, match="exp of 1#0: backward does not want it"):
        Simulator(graph).run(resolve(loads(text, "plan"), graph))
    simulator = Simulator(graph)
    for mix in mixes(
        simulator, resolve(Plan(regions=(PlannedRegion("1"),)), graph), 0, 1
    ):
        (effect,) = (simulator.effect(region) for region in mix)
        assert len(effect.moved) == len(effect.wants) > 0


def test_bytes_are_predicted_where_last_readers_come_in_another_order(
    tmp_path: Path,
) -> None:
    graph = unused_step()
    simulator = Simulator(graph)
    regions = resolve(Plan(regions=(PlannedRegion("."),)), graph)
    for mix in mixes(simulator, regions, 1, 4):
        model, rows = unused()
        ckplan.apply(model, Plan(regions=describe(graph, mix)), spill=tmp_path)

        def run(model: nn.Module = model, rows: torch.Tensor = rows) -> None:
            made = model(rows)
            made.backward()

        run()
        model.zero_grad()
        peak = peak_bytes_of(run, [*model.parameters(), rows])
        assert simulator.run(mix).peak_bytes - peak in range(100)  # numbers


def test_a_copy_back_that_nobody_wants_is_let_go_when_it_ends(tmp_path: Path) -> None:
    model, rows = unused()
    plan = loads("ckplan: 1\nregions: [{calls: '1', offload: [./exp, ./sin]}]", "plan")
    ckplan.apply(model, plan, spill=tmp_path)
    for _ in range(2):
        model(rows).backward()
        mover = mover_of(model)
        assert mover is not None
        gc.collect()
        assert len(mover._remains) == 1  # its room in the file waits for the next step
        for job in mover._remains[0].jobs:
            job.exception()
        assert mover._remains[0].memory == []


def test_a_folder_is_needed_and_checked_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = build("residual")
    with pytest.raises(ApplyError, match="no folder is given"):
        ckplan.apply(workload.model, whole_plan())
    with pytest.raises(ApplyError, match="No such file or directory"):
        ckplan.apply(workload.model, whole_plan(), spill=tmp_path / "none")
    huge = Prediction(1, "", 0.0, 1, moved_bytes=2**60)
    plan = Plan(regions=whole_plan().regions, predicted=huge)
    with pytest.raises(ApplyError, match=r"1073741824\.00 GiB more") as caught:
        ckplan.apply(workload.model, plan, spill=tmp_path)
    assert "is free" in caught.value.needed
    with pytest.raises(ckplan.CkplanError, match="has no plan"):
        ckplan.status(workload.model)
    assert not list(tmp_path.iterdir())

    def is_full(*_: object) -> None:
        raise OSError(28, "full")

    ckplan.apply(workload.model, whole_plan(), spill=tmp_path)
    monkeypatch.setattr(spill_file.os, "posix_fallocate", is_full)
    with pytest.raises(ApplyError, match="No space left on device"):
        step(workload)
    monkeypatch.undo()
    assert same(step(build("residual")), step(workload))


def test_a_disk_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "failed")

    for call in ("pwrite", "preadv"):
        workload = planned("residual", whole_plan(), tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(spill_file.os, call, fails)
            with pytest.raises(ApplyError, match="Input/output error"):
                step(workload)
        assert same(step(build("residual")), step(workload))


class Odd(nn.Module):
    """Between two layers, something that makes an unusual tensor."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.between(self.up(x))))


def _new_memory(hidden: torch.Tensor) -> torch.Tensor:
    made = torch.exp(hidden)
    made.data = made.data.clone()
    return made * 2


def _shared(hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        memory = torch.empty(64, 64).share_memory_()
    return torch.exp(hidden) * torch.exp(hidden.detach(), out=memory)


@pytest.mark.parametrize(
    ("between", "op", "found"),
    [
        (lambda h: torch.sparse.mm(torch.eye(64).to_sparse(), h), "_sparse_mm", "spar"),
        (_new_memory, "exp", "changed in place while a plan moved it"),
        (_shared, "exp#1", "its memory is shared with other processes"),
    ],
)
def test_tensors_that_cannot_move_are_refused_and_nothing_stays(
    between: Callable[[torch.Tensor], torch.Tensor],
    op: str,
    found: str,
    tmp_path: Path,
) -> None:
    model, x = nn.Sequential(Odd(between)), torch.randn(64, 64)
    text = f"ckplan: 1\nregions: [{{calls: '0', offload: [./{op}]}}]"
    ckplan.apply(model, loads(text, "plan"), spill=tmp_path)
    with pytest.raises(ApplyError, match=found):
        model(x).sum().backward()
    assert not list(tmp_path.iterdir())
    ckplan.remove(model)
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("between", "op"),
    [
        (lambda h: h * len(torch.ones(64, 64, device="meta")), "ones"),
        (
            lambda h: (
                h
                * torch.quantize_per_tensor(
                    h.detach(), 0.1, 0, torch.quint8
                ).dequantize()
            ),
            "quantize_per_tensor",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_without_plain_memory_stay_with_a_notice(
    between: Callable[[torch.Tensor], torch.Tensor], op: str, tmp_path: Path
) -> None:
    plain, planned = nn.Sequential(Odd(between)), nn.Sequential(Odd(between))
    planned.load_state_dict(plain.state_dict())
    text = f"ckplan: 1\nregions: [{{calls: '0', offload: [./{op}]}}]"
    ckplan.apply(planned, loads(text, "plan"), spill=tmp_path)
    x = torch.randn(64, 64)
    with pytest.warns(UserWarning, match=f"keeps ./{op}, which the plan moves"):
        planned(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_of_a_view_that_a_call_returns_the_whole_moves(tmp_path: Path) -> None:
    class Block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    torch.manual_seed(0)
    batch, plain = torch.randn(2, 5, 8), nn.Sequential(Block(), Block())
    moving = copy.deepcopy(plain)
    moved = tuple(map(OpName.parse, ("0/addmm", "1/gelu")))
    plan = Plan(regions=(PlannedRegion("[0..1]", offload=moved),))
    ckplan.apply(moving, plan, spill=tmp_path)
    for _ in range(3):
        for model in (plain, moving):
            model.zero_grad()
            model(batch).square().mean().backward()
        pairs = zip(plain.parameters(), moving.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    status = ckplan.status(moving)
    assert [one.recorded for one in status.regions] == [1, 1]
    assert status.spilled_bytes
