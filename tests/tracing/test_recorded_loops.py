"""Steps of loops that others wrote: recorded, planned, trained to the same bits."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import LOOPS, Loop, make_language, state_of
from measured import peak_bytes_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ckplan
from ckplan.errors import WorkloadError
from ckplan.plan.plan import Plan
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.ops_twice import NOTE_SAME
from ckplan.tracing.watched_loop import NOTE_AGAIN, NOTE_KEPT, NOTE_OVER


def trained(loop: Loop, steps: int, plan: Plan | None = None) -> list[torch.Tensor]:
    state = loop.make()
    if plan is not None:
        ckplan.apply(loop.pick(state)[0], plan)
    loop.run(state, steps)
    return state_of(state)


def measured_peak(loop: Loop, plan: Plan | None = None) -> int:
    """Most bytes allocated in three steps, as the allocator of the CPU has them."""
    state = loop.make()
    models = [one for one in state if isinstance(one, nn.Module)]
    held = [t for m in models for t in (*m.parameters(), *m.buffers())]
    if plan is not None:
        ckplan.apply(loop.pick(state)[0], plan)
    return peak_bytes_of(lambda: loop.run(state, 3), held)


def recorded(loop: Loop, steps: int = 3) -> tuple[ckplan.Graph, list[torch.Tensor]]:
    state = loop.make()
    with ckplan.record(*loop.pick(state)) as recorder:
        loop.run(state, steps)
    assert recorder.done
    return recorder.graph, state_of(state)


def test_tensors_that_the_collector_set_apart_are_known():
    loop = LOOPS["generator"]
    state = loop.make()
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with ckplan.record(*loop.pick(state)) as recorder:
            loop.run(state, 3)
        assert gc.get_freeze_count() >= frozen // 2  # some have died since
    finally:
        gc.unfreeze()
    expected = recorded(loop)[0]
    assert Counter(recorder.graph.storages) == Counter(expected.storages)


def _check_what_is_kept(name: str, graph: ckplan.Graph) -> None:
    """Equal batches count once, forwards are counted, held outputs are named."""
    whole = [str(call) for call in graph.calls if not call.fqn]
    assert whole == [f".#{n}" for n in range({"critic": 3, "towers": 2}.get(name, 1))]
    assert graph.fingerprint.get("forwards", 1) == len(whole)
    notes = [note for note in graph.notes if "`del`" in note]
    assert bool(notes) or name not in ("language", "accumulated")
    assert name != "language" or "saves 200.0" in notes[0]


class Bucket(nn.Module):
    """Makes room in forward that backward fills, as DDP does for gradients."""

    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.linear, self.fills = nn.Linear(64, 64), fills

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.room = torch.empty(512, 64)
        out = self.linear(x)
        if self.fills:
            out.register_hook(self.fill)
        return out

    def fill(self, grad: torch.Tensor) -> None:
        self.room.copy_(grad)


@pytest.mark.parametrize("fills", [True, False])
def test_room_that_backward_fills_is_not_held_in_vain(fills: bool) -> None:
    model = Bucket(fills)
    optimizer = torch.optim.SGD(model.parameters())
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(512, 64)).sum().backward()
            optimizer.step()
    held = any("holds tensors longer" in note for note in recorder.graph.notes)
    assert held is not fills


def test_backward_of_a_loop_has_the_lines_of_forward() -> None:
    model = nn.Sequential(Bucket(True), nn.Tanh(), Bucket(False))
    optimizer = torch.optim.SGD(model.parameters())
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(512, 64)).sum()
            loss.backward()
            optimizer.step()
    ops, num_forward = recorder.graph.ops, recorder.graph.num_forward
    forward = {op.line for op in ops[:num_forward] if op.name != "ones_like"}
    later = ops[num_forward : recorder.graph.backward_stop]
    filled = {op.line for op in later if op.name == "copy_"}
    assert len(filled) == 1  # by code of the model
    assert {op.line for op in later} <= forward | filled | {""}


FAST = ("language", "accumulated", "critic", "towers")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LOOPS]
)
def test_a_loop_is_recorded_to_the_byte_and_planned_to_the_bit(name: str) -> None:
    loop = LOOPS[name]
    graph, state = recorded(loop)
    assert all(map(torch.equal, state, trained(loop, 3)))
    _check_what_is_kept(name, graph)
    peak_bytes = simulate(graph).peak_bytes
    assert peak_bytes == pytest.approx(measured_peak(loop), rel=1e-3)
    plan = ckplan.solve(graph, loop.budget)
    assert plan.regions
    planned_bytes = simulate(graph, resolve(plan, graph)).peak_bytes
    assert planned_bytes < 0.95 * peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned_bytes == pytest.approx(measured_peak(loop, plan), rel=1e-3)
        steps = 5 if name in FAST else 20
        unplanned, planned = trained(loop, steps), trained(loop, steps, plan)
    assert len(unplanned) == len(planned)
    assert all(map(torch.equal, unplanned, planned))


def test_a_loop_takes_the_bytes_of_a_workload_of_the_same_step() -> None:
    model, optimizer = make_language()
    batch = torch.randint(0, 200, (8, 64)), torch.randint(0, 200, (8, 64))

    def step() -> None:
        optimizer.zero_grad()
        loss = model(*batch)[1]
        loss.backward()
        optimizer.step()

    with ckplan.record(model, optimizer) as recorder:
        for _ in range(2):
            step()
        step()
    graph, other = recorder.graph, ckplan.profile(make_language()[0], batch)

    def ops(graph: ckplan.Graph) -> list[Any]:
        forward = graph.ops[: graph.num_forward]
        return [(op.name, op.workspace, op.flops) for op in forward if op.call >= 0]

    assert ops(graph) == ops(other)
    logits_bytes = 8 * 64 * 200 * 4  # which `profile` holds to the end of backward
    peaks = [simulate(one).peak_bytes for one in (graph, other)]
    assert 0 <= peaks[1] - peaks[0] <= logits_bytes
    plans = [ckplan.solve(one, "75%").regions for one in (graph, other)]
    assert {region.by for region in plans[0]} == {region.by for region in plans[1]}


def test_functions_are_counted_in_a_loop_as_in_a_profile() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8, dropout=0.1, num_layers=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    modes = torch.overrides._get_current_function_mode_stack()
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(3):
            with torch.device("cpu"):  # a mode that comes and goes within a step
                x = torch.ones(4, 2, 8)
                model(x)[0].sum().backward()
                optimizer.step()
            optimizer.zero_grad()
    assert torch.overrides._get_current_function_mode_stack() == modes
    graph = ckplan.profile(
        model, torch.ones(4, 2, 8), loss=lambda out, _: out[0].sum(), in_step=False
    )
    counts = [
        [call.functions for call in one.calls if call.fqn]
        for one in (graph, recorder.graph)
    ]
    assert counts[0] == counts[1] and all(counts[0])
    for one in (graph, recorder.graph):
        inside = [op.is_inside for op in one.ops[: one.num_forward]]
        assert sum(inside) > len(inside) // 2


@pytest.mark.parametrize("way", ["sum", "two", "retained", "kept", "unused"])
def test_what_autograd_holds_for_longer_is_noted(way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(3):
            out = model(torch.ones(4, 8))
            one, other = out.square().mean(), out.sin().mean()
            if way == "sum":
                (one + other).backward()
            elif way == "two":
                one.backward()
                model(torch.ones(4, 8)).sin().mean().backward()
            elif way == "retained":
                one.backward(retain_graph=True)
                other.backward()
            elif way == "kept":
                (one + other).backward(retain_graph=True)
            else:
                one.backward()
            optimizer.step()
            optimizer.zero_grad()
    notes = recorder.graph.notes
    assert (NOTE_AGAIN in notes) == (way == "retained")
    assert (NOTE_KEPT in notes) == (way == "kept")
    assert (NOTE_OVER in notes) == (way != "sum")


def test_a_step_that_the_next_one_needs_is_noted_and_not_too_small() -> None:
    loop = LOOPS["critic"]
    early = loop._replace(pick=lambda state: (state[1], state[3]))
    graph, state = recorded(early, 4)
    assert all(map(torch.equal, state, trained(loop, 4)))
    assert NOTE_OVER in graph.notes
    assert simulate(graph).peak_bytes >= measured_peak(loop)


def penalized(model: nn.Module) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (grad.norm(dim=1) - 1).square().mean()).backward()


def adversarial(model: nn.Module) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    model((x + 0.1 * grad.sign()).detach()).square().mean().backward()


def twice(model: nn.Module) -> None:
    out = model(torch.randn(16, 32))
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()


def scaled(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(16, 32)).square().mean()
    (loss * 1024).backward()


def checkpointed(model: nn.Module) -> None:
    """The model itself is not called, only modules in it."""
    first, second, *others = model.children()
    x = checkpoint(second, first(torch.randn(16, 32)), use_reentrant=True)
    for module in others:
        x = module(x)
    x.square().mean().backward()


MORE = (pytest.param(one, marks=pytest.mark.slow) for one in (adversarial, scaled))


@pytest.mark.parametrize("step", [penalized, twice, checkpointed, *MORE])
def test_unusual_steps_keep_their_bits(step: Callable[[nn.Module], None]) -> None:
    def run(state: Any, steps: int) -> None:
        torch.manual_seed(4)
        for _ in range(steps):
            state[1].zero_grad()
            step(state[0])
            state[1].step()

    loop = LOOPS["towers"]._replace(run=run)
    graph, state = recorded(loop, 4)
    assert all(map(torch.equal, state, trained(loop, 4)))
    plan = ckplan.solve(graph, goal="min-memory")
    assert all(map(torch.equal, state, trained(loop, 4, plan)))


def test_of_several_steps_that_with_the_largest_batch_is_kept() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ckplan.record(model, optimizer, num_steps=3) as recorder:
        for rows in (9, 3, 7, 5, 8):
            assert not recorder.done or rows == 8
            model(torch.randn(rows, 4)).sum().backward()
            optimizer.step()
    assert recorder.graph.fingerprint["batch"] == {"0": "float32[7,4]"}
    with pytest.raises(WorkloadError, match="cannot record 0 steps"):
        ckplan.record(model, optimizer, num_steps=0)


def test_two_recorders_are_not_open_at_once() -> None:
    one, other = make_language(), make_language()
    with ckplan.record(*one), ckplan.record(*other):
        LOOPS["language"].run(one, 1)
        with pytest.raises(WorkloadError, match="two loops at once"):
            LOOPS["language"].run(other, 1)


def test_hooks_and_garbage_of_the_loop_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps: list[int] = []
    seen: list[bool] = []
    garbage = [nn.Linear(4, 4)]
    garbage.append(garbage)  # type: ignore[arg-type]
    alive = weakref.ref(garbage[0])

    def forward(module: nn.Module, args: Any) -> None:
        del module, args
        if len(steps) == 1:
            gc.collect()
            seen.append(alive() is not None)

    with ckplan.record(model, optimizer) as recorder:
        optimizer.register_step_post_hook(lambda *given: steps.append(1))
        model.register_forward_pre_hook(forward)
        gc.collect()
        del garbage
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert recorder.done
    assert len(steps) == 3
    assert seen == [True]
    gc.collect()
    assert alive() is None
    assert gc.get_freeze_count() == 0


@torch.library.custom_op("ckplan_test::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    return x + int.from_bytes(os.urandom(4), "big") * 2.0**-34


unsteady.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize("change", [unsteady, nn.functional.dropout])
def test_kernels_of_chance_are_told(change: Callable[[torch.Tensor], Any]) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(change(x))

    model = nn.Sequential(nn.Linear(8, 8), Layer())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    before = torch.get_rng_state()
    graph = recorder.graph
    assert torch.equal(before, torch.get_rng_state())
    told = [(graph.calls[one.call].fqn, one.reason) for one in graph.hazards]
    reason = "unsteady gives other values each time"
    assert told == ([("1", reason)] if change is unsteady else [])
    assert (NOTE_SAME in graph.notes) == (change is not unsteady)


def bad_recorder(model: Any, optimizer: Any) -> Callable[[], object]:
    return lambda: ckplan.record(model, optimizer)


def planned_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return ckplan.apply(model, Plan())


def unfinished() -> object:
    model, optimizer = make_language()
    with ckplan.record(model, optimizer) as recorder:
        LOOPS["language"].run((model, optimizer), 1)
    return recorder.graph


def never_called() -> object:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(3):
            model.weight.sum().backward()
            optimizer.step()
    return recorder.graph


LINEAR, OTHER = nn.Linear(2, 2), nn.Linear(2, 2)
BAD = {
    "cannot record a int": bad_recorder(3, torch.optim.SGD(LINEAR.parameters(), 0.1)),
    "which is no optimizer": bad_recorder(LINEAR, "sgd"),
    "cannot record the steps of nothing": bad_recorder(LINEAR, ()),
    "steps no parameter": bad_recorder(
        LINEAR, torch.optim.SGD(OTHER.parameters(), 0.1)
    ),
    "its optimizer stepped 1 time ": unfinished,
    "ran no backward through a call": never_called,
}


@pytest.mark.parametrize("said", BAD)
def test_what_cannot_be_recorded_is_said(said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        BAD[said]()
    lines = str(error.value).splitlines()
    assert said in lines[0]
    assert [line.split()[0] for line in lines] == ["error:", "needed:", "try:"]


def test_a_planned_model_is_not_recorded() -> None:
    model = planned_model()
    with pytest.raises(WorkloadError, match="has a plan already"):
        ckplan.record(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_loop_that_raises_leaves_nothing_behind() -> None:
    model, optimizer = make_language()
    with pytest.raises(KeyError), ckplan.record(model, optimizer) as recorder:
        LOOPS["language"].run((model, optimizer), 1)
        raise KeyError("data")
    assert not recorder.done
    assert not optimizer._optimizer_step_post_hooks
    LOOPS["language"].run((model, optimizer), 1)
    assert recorder.steps == 1
