"""What recomputation breaks, row by row: guarded here, or refused with the reason.

Every hazard has a test that fails where its guard is taken out; ``unguarded`` does so
for each, and sees that the training step is then wrong, or an error.
"""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import ckplan
from ckplan import applying
from ckplan.applying.guards import checker as replay
from ckplan.applying.guards import program_cache
from ckplan.applying.hooks import forwards
from ckplan.applying.rebuilding import rebuilder as recompute
from ckplan.applying.recording import recorder as record
from ckplan.applying.recording import saved_tensors as saved
from ckplan.applying.rerunning import attributes, call_check, checkpoint, sources
from ckplan.applying.rerunning import rerun as rerunning
from ckplan.applying.rerunning import snapshot as world
from ckplan.applying.tensors import kept, matchers, storages
from ckplan.applying.tensors import op_traits as facts
from ckplan.applying.tensors import retained as held
from ckplan.applying.tensors.kept import Kept
from ckplan.applying.tensors.storages import Storages
from ckplan.errors import ApplyError, PlanError
from ckplan.graph.records import EngineCosts
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Simulator
from ckplan.solving.planner import Planner

WAYS = ("program", "rerun")
BOTH = pytest.mark.parametrize("by", WAYS)


def plan(by: str, *calls: str) -> Plan:
    return Plan(regions=tuple(PlannedRegion(call, by) for call in calls or ("block",)))


class Outer(nn.Module):
    """A model around one block, so that there is something before and after it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), block, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.last(self.block(self.first(x), *args, **kwargs))


def seeded(step: int) -> None:
    torch.manual_seed(step)
    random.seed(step)
    numpy.random.seed(step)


def state_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    drawn = [random.random(), float(numpy.random.random())]
    found = [loss, *grads, *model.buffers(), torch.get_rng_state(), torch.tensor(drawn)]
    return [tensor.detach().clone() for tensor in found]


def step_of(model: nn.Module, step: int, *args: Any, **kwargs: Any) -> Any:
    model.zero_grad()
    seeded(step)
    loss = model(torch.randn(4, 8), *args, **kwargs).square().sum()
    loss.backward()
    return state_of(model, loss)


def same(make: Callable[[], nn.Module], by: str, steps: int = 3) -> nn.Module:
    """Train with a region and without: everything must be the same bits."""
    torch.manual_seed(0)
    plain = Outer(make())
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    for step in range(steps):
        assert all(map(torch.equal, step_of(plain, step), step_of(planned, step))), step
    (status,) = applying.status(planned).regions
    assert status.runs == steps
    return planned


@contextmanager
def unguarded(where: Any, name: str, value: Any) -> Iterator[None]:
    """Without the guard the same is wrong, or an error: so the guard is tested."""
    with pytest.MonkeyPatch.context() as patch:
        for one in where if isinstance(where, tuple) else (where,):
            patch.setattr(one, name, value)
        failures = (
            AssertionError,
            ApplyError,
            RuntimeError,
            UserWarning,
            pytest.fail.Exception,
        )
        with pytest.raises(failures):
            yield


def nothing(*args: Any, **kwargs: Any) -> None:
    """What stands in for a guard that is taken out."""


def never(_: torch.Tensor) -> int:
    """How often a tensor was changed, for who does not look."""
    return 0


def forgetful_stop(_: call_check.CallCheck) -> call_check.StopRerunError:
    """End a second run once, though the forward may catch that."""
    return call_check.StopRerunError()


def unchecked_meet(check: call_check.CallCheck, tensor: torch.Tensor) -> None:
    """Meet a tensor without a look at its values."""
    check.met.append(weakref.ref(tensor))
    check.versions.append(0)


Guard: TypeAlias = tuple[Any, str, Any]
"""Where it is, its name, and what stands in for it."""

_make = matchers.Matchers.make


def any_arguments(self: matchers.Matchers, frozen: Any, *_: Any) -> matchers.Matcher:
    """Take every number for the same, and meet the tensors."""

    def matches(
        args: Any, kwargs: Any, made: Any, versions: Any, met: Any, guard: Any
    ) -> bool:
        known = [one() for one in (*made, *met)]
        for value in args:
            new = isinstance(value, torch.Tensor) and all(x is not value for x in known)
            if new and len(met) < before + count:
                guard.meet(len(met), value)
        return True

    before = self._num_met
    _make(self, frozen)
    count = self._num_met - before
    return matches


# -- buffers -----------------------------------------------------------------------


@BOTH
def test_running_statistics_are_updated_once(by: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

    same(make, by)
    if by == "rerun":
        with unguarded(world.Snapshot, "restore", nothing):
            same(make, by)
    else:
        facts.traits_of.cache_clear()
        with unguarded(facts, "BATCH_NORMS", ()):
            same(make, by)
        facts.traits_of.cache_clear()


class Own(nn.Module):
    """A batch norm that counts no batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.spread, training=self.training)


class Averaged(nn.Module):
    """Goes by a buffer, and changes it by ``.data``, if it is to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x
        return torch.sin(x) * self.mean


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "synchronized": lambda: nn.SyncBatchNorm(8),
    "own": Own,
}


def moved_before_backward(kind: Callable[[], nn.Module], by: str, *modes: bool) -> None:
    """Several forwards, and then their backwards: the same bits as without a region."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), kind(), nn.Tanh())
    plain = Outer(block)
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    for step in range(3):
        found = []
        for model in (plain, planned):
            model.zero_grad()
            seeded(step)
            losses = []
            for mode in modes:
                model.train(mode)
                losses.append(model(torch.randn(4, 8)).square().sum())
            for loss in losses:
                loss.backward()
            found.append(state_of(model, losses[-1]))
        assert all(map(torch.equal, *found)), step


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("modes", [(False, True), (True, False, True, False, True)])
def test_a_norm_that_trains_before_backward_of_one_that_did_not(
    kind: str, modes: Sequence[bool]
) -> None:
    moved_before_backward(NORMS[kind], "program", *modes)
    for where in (record, replay):
        with unguarded(where, "retain_copy", held.retain):
            moved_before_backward(NORMS[kind], "program", *modes)


@pytest.mark.parametrize("kind", [*NORMS.values(), Averaged])
def test_what_moves_before_backward_is_not_run_again(
    kind: Callable[[], nn.Module],
) -> None:
    def refused() -> None:
        with pytest.raises(ApplyError, match=r"block.*was changed in place"):
            moved_before_backward(kind, "rerun", False, True)

    refused()
    if kind in (Own, Averaged):
        with unguarded(rerunning, "is_same", lambda *_: True):
            refused()


def test_a_norm_that_trains_after_it_did_not_in_one_region_is_refused() -> None:
    class Twice(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.batch_norm(x, self.mean, self.spread)
            return functional.batch_norm(x.sin(), self.mean, self.spread, training=True)

    def run() -> None:
        with pytest.raises(ApplyError, match="changes an input in place"):
            moved_before_backward(Twice, "program", True)

    run()
    with unguarded(record, "TRAINING", slice(0, 0)):
        run()


@BOTH
def test_spectral_norm_sees_the_vectors_of_its_forward(by: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())

    same(make, by)
    if by == "program":  # power iteration overwrites what it begins with
        with unguarded(Storages, "retain_written", lambda *_: False):
            same(make, by)
        return
    with unguarded(world.Snapshot, "restore", nothing):
        same(make, by)


class Initialized(nn.Module):
    """Sets its parameters by the first batch that it sees, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = (nn.Parameter(torch.zeros(8)) for _ in range(2))
        self.register_buffer("ready", torch.tensor(False))
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.scale.data.copy_(-x.std(0).log())
                self.ready.fill_(True)
        return torch.tanh(self.fc((x + self.shift) * self.scale.exp()))


def test_parameters_that_the_first_forward_sets_stay_where_they_are() -> None:
    same(Initialized, "program")
    with unguarded(Storages, "retain_written", lambda *_: False):
        same(Initialized, "program")


def test_what_is_written_outside_and_changed_before_backward_is_told() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("level", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.level.add_(x.abs().mean(0))
            return torch.tanh(self.fc(x * self.level))

    same(Marked, "program")
    model = applying.apply(Outer(Marked()), plan("program"))
    for number in range(2):  # recorded, then compared
        first = model(torch.randn(4, 8)).sum()
        second = model(torch.randn(4, 8)).sum()
        with pytest.raises(ApplyError, match="was changed in place"):
            first.backward()
        second.backward()
        assert number == 0 or applying.status(model).regions[0].runs == 4


class Unseen(nn.Module):
    """Changes a buffer in every forward, in a way that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("level", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level.data.mul_(1.5)
        return torch.tanh(self.fc(torch.sin(x * self.level)))


def test_of_what_is_written_unseen_a_copy_stays() -> None:
    def gradients(planned: bool) -> list[list[torch.Tensor | None]]:
        torch.manual_seed(0)
        model: nn.Module = Outer(Unseen())
        if planned:
            applying.apply(model, plan("program"))
        found = []
        for _ in range(3):
            model.zero_grad()
            losses = [model(torch.randn(4, 8)).square().sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
            found.append([one.grad for one in model.parameters()])
        return found

    def compare() -> None:
        for plain, own in zip(gradients(False), gradients(True), strict=True):
            assert all(map(torch.equal, plain, own))

    compare()
    with pytest.MonkeyPatch.context() as patch:  # what the next forward would copy
        patch.setattr(program_cache.ProgramCache, "keep_written", nothing)
        compare()
        with unguarded(storages, "retain_copy", held.retain):
            compare()


class Codebook(nn.Module):
    """Reads a buffer, and changes it in a way that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("codes", torch.ones(8))
        self.register_buffer("usage", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.fc(x * self.codes))
        with torch.no_grad():
            self.codes.data.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.usage = self.usage + y.abs().mean(0)
        return y * self.usage


@BOTH
def test_codebooks_and_averages_change_once(by: str) -> None:
    if by == "program":  # refused: what it is rebuilt from is overwritten
        with pytest.raises(ApplyError, match="changes an input in place"):
            same(Codebook, by)
        return
    same(Codebook, by)
    with unguarded(world.Snapshot, "restore", nothing):
        same(Codebook, by)
    with unguarded(world, "_is_same", lambda *_: True):
        same(Codebook, by)


# -- random numbers ----------------------------------------------------------------


class Drawing(nn.Module):
    """Draws from everywhere: layer drop, noise, dropout, a generator of its own."""

    def __init__(self, *sources: str) -> None:
        super().__init__()
        self.fc, self.sources = nn.Linear(8, 8), sources
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "python" in self.sources:
            x = torch.exp(x * random.random())
            x = torch.sin(x) if random.random() < 0.5 else torch.cos(x)
        if "numpy" in self.sources:
            x = torch.exp(x * float(numpy.random.random()))
        if "torch" in self.sources:
            x = functional.dropout(torch.tanh(x), 0.5)
        if "generator" in self.sources:
            draws = torch.rand(x.shape, generator=self.generator)
            x = torch.tanh(x * draws)
        return torch.sigmoid(self.fc(x))


class MakesGenerators(nn.Module):
    """Draws from a generator that each forward makes, or takes from a few."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how, self.count = nn.Linear(8, 8), how, itertools.count()
        self.alike = [torch.Generator().manual_seed(5) for _ in "ab"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        if self.how == "counted":
            generator.manual_seed(next(self.count))
        if self.how == "alike":
            generator = self.alike[next(self.count) % 2]
        return torch.tanh(self.fc(x) * torch.rand(8, generator=generator))


@pytest.mark.parametrize("how", ["made", "counted", "alike"])
def test_a_generator_that_a_forward_makes_begins_as_the_first_one_did(how: str) -> None:
    seeded(0)
    plain = Outer(MakesGenerators(how))
    planned = Outer(MakesGenerators(how))
    planned.load_state_dict(plain.state_dict())
    ckplan.apply(planned, plan("rerun"))
    x = torch.randn(4, 8)
    plain(x).sum().backward()
    states = [one.get_state() for one in planned.block.alike]
    out = planned(x).sum()
    drawn = [one.get_state() for one in planned.block.alike]
    if how == "counted":
        with pytest.raises(ApplyError, match="another random generator"):
            out.backward()
        return
    out.backward()
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert torch.equal(drawn[0], states[0]) == (how == "made")
    now = [one.get_state() for one in planned.block.alike]
    assert all(map(torch.equal, now, drawn))  # a rerun leaves no trace in others


@BOTH
@pytest.mark.parametrize("source", ["python", "numpy", "torch", "generator"])
def test_random_numbers_are_those_of_the_forward(by: str, source: str) -> None:
    class Own(Drawing):
        def __deepcopy__(self, memo: Any) -> Drawing:  # generators cannot be copied
            other = Own(source)
            other.fc = copy.deepcopy(self.fc, memo)
            return other

    same(lambda: Own(source), by, steps=6)
    program: dict[str, Guard] = {  # numbers are part of calls, states of ops
        "python": (matchers.Matchers, "make", any_arguments),
        "numpy": (matchers.Matchers, "make", any_arguments),
        "torch": (recompute, "set_random_state", nothing),
        "generator": (recompute, "set_random_state", nothing),
    }
    rerun: dict[str, Guard] = {
        "python": (sources.Source, "put", nothing),
        "numpy": (sources.Source, "put", nothing),
        "torch": (sources.Source, "put", nothing),
        "generator": (call_check.CallCheck, "_draw", nothing),
    }
    with unguarded(*{"program": program, "rerun": rerun}[by][source]):
        same(lambda: Own(source), by, steps=6)


class Holding(nn.Module):
    """Draws a mask from a generator that it holds, which no call of torch shows."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.fc, self.held = nn.Linear(8, 8), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.held["inside"] if isinstance(self.held, dict) else self.held
        mask = torch.tensor([held.random() for _ in range(8)]).float()
        return torch.sigmoid(self.fc(torch.tanh(x) * mask))


@BOTH
@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(0),
        lambda: numpy.random.default_rng(0),
        lambda: numpy.random.RandomState(0),
        lambda: {"inside": random.Random(0)},
    ],
)
def test_generators_that_modules_hold_are_put_back(
    by: str, make: Callable[[], Any]
) -> None:
    same(lambda: Holding(make()), by)
    if by == "rerun":
        with unguarded(attributes, "source_in", nothing):
            same(lambda: Holding(make()), by)


# -- inputs and parameters ---------------------------------------------------------


class Taking(nn.Module):
    """Takes tensors as keywords and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, pair: Any = None, *, scale: torch.Tensor
    ) -> torch.Tensor:
        return torch.tanh(self.fc(torch.sin(x + scale) + pair["both"][1]))


@BOTH
@pytest.mark.parametrize("which", ["keyword", "nested", "parameter"])
def test_a_tensor_changed_before_backward_names_the_region(by: str, which: str) -> None:
    def run() -> None:
        model = Outer(Taking())
        applying.apply(model, plan(by))
        scale, inner = torch.rand(4, 8), torch.rand(4, 8)
        out = model(torch.randn(4, 8), {"both": (0, inner)}, scale=scale)
        weight = model.block.fc.weight
        changed = {"keyword": scale, "nested": inner, "parameter": weight}[which]
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(ApplyError, match=r"block.*was changed in place"):
            out.sum().backward()

    run()
    where = {"program": (held, kept), "rerun": (rerunning, call_check)}[by]
    with unguarded(where, "version_of", never):
        run()


class Reaching(nn.Module):
    """Uses what is none of its own: a tensor, and a module that another one owns."""

    def __init__(self, table: torch.Tensor, other: nn.Module) -> None:
        super().__init__()
        self.fc, self.table, self.other = nn.Linear(8, 8), [table], [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.other[0](self.fc(torch.exp(x * self.table[0]))))


@BOTH
@pytest.mark.parametrize("which", ["tensor", "parameter"])
def test_a_tensor_from_elsewhere_changed_before_backward_names_the_region(
    by: str, which: str
) -> None:
    def run() -> None:
        table, other = torch.rand(8), nn.Linear(8, 8)
        model = Outer(Reaching(table, other))
        applying.apply(model, plan(by))
        out = model(torch.randn(4, 8))
        with torch.no_grad():
            {"tensor": table, "parameter": other.weight}[which].mul_(2)
        with pytest.raises(ApplyError, match=r"block.*was changed in place"):
            out.sum().backward()

    run()
    where = {"program": (held, kept), "rerun": (rerunning, call_check)}[by]
    with unguarded(where, "version_of", never):
        run()


@BOTH
def test_statistics_of_a_module_from_elsewhere_are_never_updated_twice(by: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = Outer(Reaching(torch.ones(8), nn.BatchNorm1d(8)))
        planned = copy.deepcopy(plain)
        applying.apply(planned, plan(by))
        expected = step_of(plain, 0)
        if by == "program":
            assert all(map(torch.equal, expected, step_of(planned, 0)))
        else:
            with pytest.raises(ApplyError, match=r"block.*was changed in place"):
                step_of(planned, 0)
        norms = plain.block.other[0], planned.block.other[0]
        assert all(map(torch.equal, *(norm.buffers() for norm in norms)))

    run()
    if by == "rerun":
        with unguarded(call_check.CallCheck, "_meet", unchecked_meet):
            run()


@BOTH
def test_tensors_of_inference_come_in_like_others(by: str) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.fc(torch.exp(x)) + frozen)

    with torch.inference_mode():
        frozen = torch.randn(4, 8)
    torch.manual_seed(0)
    plain = Outer(Adding())
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    for step in range(3):
        seen = (step_of(model, step, frozen) for model in (plain, planned))
        assert all(map(torch.equal, *seen))


@BOTH
def test_tensors_as_keywords_and_in_containers_are_those_of_the_forward(
    by: str,
) -> None:
    torch.manual_seed(0)
    plain = Outer(Taking())
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    for step in range(3):
        seen = []
        for model in (plain, planned):
            pair = {"both": [0, torch.full((4, 8), 1.0 + step)]}
            scale = torch.full((4, 8), 0.5, requires_grad=True)
            seen.append([*step_of(model, step, pair, scale=scale), scale.grad])
        assert all(map(torch.equal, *seen))


class SavingOutput(nn.Module):
    """Its output is what autograd saves of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.fc(x))


def unchecked(packed: Any) -> torch.Tensor:
    """Give autograd what a region kept, whatever became of it."""
    return packed.tensor if isinstance(packed, Kept) else saved.unpack(packed)


@BOTH
def test_a_saved_output_changed_in_place_is_made_again(by: str) -> None:
    torch.manual_seed(0)
    plain = Outer(SavingOutput())
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    x = torch.randn(4, 8)
    plain.block(x).mul(3).sum().backward()
    planned.block(x).mul_(3).sum().backward()
    assert torch.equal(plain.block.fc.weight.grad, planned.block.fc.weight.grad)


def test_a_saved_output_that_a_plan_keeps_and_someone_changes_is_an_error() -> None:
    keeps = PlannedRegion("block", save=(OpName.parse("./exp"),))

    def run() -> None:
        model = Outer(SavingOutput())
        applying.apply(model, Plan(regions=(keeps,)))
        out = model.block(torch.randn(4, 8)).mul_(3)
        with pytest.raises(ApplyError, match=r"block kept a tensor.*changed in place"):
            out.sum().backward()

    run()
    with unguarded(record, "unpack", unchecked):
        run()


# -- what Python does --------------------------------------------------------------


class Counting(nn.Module):
    """Counts, appends, remembers, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls, self.seen = nn.Linear(8, 8), 0, []
        self.times: dict[str, list[int]] = {"forward": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        self.times["forward"].append(self.calls)
        if self.calls % 2:
            x = torch.exp(x)
        return torch.tanh(self.fc(x * self.calls)) / sum(self.seen)


@BOTH
def test_lists_and_counters_change_once(by: str) -> None:
    planned = same(Counting, by, steps=5)
    assert planned.block.calls == len(planned.block.seen) == 5
    assert planned.block.times == {"forward": [1, 2, 3, 4, 5]}
    if by == "rerun":
        with unguarded(world.Snapshot, "restore", nothing):
            same(Counting, by)


class Listing(nn.Module):
    """Goes by a list that it appends to, and changes no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.seen = nn.Linear(8, 8), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1.0)
        return torch.tanh(self.fc(torch.exp(x) / sum(self.seen)))


@BOTH
def test_a_list_alone_changes_once(by: str) -> None:
    planned = same(Listing, by, steps=4)
    assert planned.block.seen == [1.0] * 4


NUMBER = [1.0]


class Numbered(nn.Module):
    """A number from elsewhere, which nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(torch.exp(x * NUMBER[0])))


@BOTH
def test_a_python_number_that_changes_is_seen(by: str) -> None:
    def number(step: int) -> None:
        NUMBER[0] = 1.0 / (step + 1)

    def changed_every_step() -> nn.Module:
        torch.manual_seed(0)
        plain = Outer(Numbered())
        planned = copy.deepcopy(plain)
        applying.apply(planned, plan(by))
        for step in range(4):
            number(step)
            assert all(map(torch.equal, step_of(plain, step), step_of(planned, step)))
        return planned

    planned = changed_every_step()

    def changed_before_backward() -> None:
        number(0)
        loss = planned(torch.randn(4, 8)).sum()
        number(9)
        if by == "program":
            loss.backward()
            return
        with pytest.raises(ApplyError, match="block#0 again: its forward differs"):
            loss.backward()

    changed_before_backward()
    if by == "rerun":
        with unguarded(call_check.CallCheck, "_note", nothing):
            changed_before_backward()
    else:
        with unguarded(matchers.Matchers, "make", any_arguments):
            changed_every_step()


class Routed(nn.Module):
    """Sends each row to an expert, with noise; shapes differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        noisy = scores + torch.randn_like(scores)
        weight, chosen = noisy.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                y = functional.gelu(expert(x[rows])) * weight[rows, None]
                out = out.index_add(0, rows, y)
        return out


@BOTH
def test_experts_are_chosen_once(by: str) -> None:
    same(Routed, by, steps=8)
    if by == "rerun":
        with unguarded(sources.Source, "put", nothing):
            same(Routed, by, steps=8)


class Cache:
    """Keys of earlier calls, as caches of generation keep them."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.keys = keys
        return keys


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        keys = cache.update(torch.tanh(self.fc(x)))
        return self.out((x @ keys.T).softmax(-1) @ keys)


@BOTH
def test_a_cache_that_grows_is_right_or_refused(by: str) -> None:
    torch.manual_seed(0)
    plain = Outer(Cached())
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    caches = Cache(), Cache()
    expected = step_of(plain, 0, caches[0])
    if by == "program":
        assert all(map(torch.equal, expected, step_of(planned, 0, caches[1])))
        assert torch.equal(caches[0].keys, caches[1].keys)
    else:

        def grown(found: str) -> None:
            what = f"block#0 again: its forward differs from the first one .{found}"
            with pytest.raises(ApplyError, match=what):
                step_of(planned, 0, Cache())

        grown("a tensor of shape")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call_check.CallCheck, "_note", nothing)
            grown("it saves other tensors")


class Catching(nn.Module):
    """Goes another way if anything fails."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.failed = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        try:
            y = torch.tanh(self.fc(torch.sin(y)))
        except Exception:
            self.failed += 1
            y = torch.relu(torch.cos(y))
        return y


@BOTH
def test_an_early_stop_is_not_swallowed(by: str) -> None:
    planned = same(Catching, by)
    assert planned.block.failed == 0
    if by == "rerun":
        with unguarded(call_check.CallCheck, "stop", forgetful_stop):
            same(Catching, by)


@BOTH
def test_hooks_of_modules_inside_run_once_or_are_told(by: str) -> None:
    model = Outer(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
    seen: list[str] = []
    model.block[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.block[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    applying.apply(model, plan(by))
    if by == "program":
        model(torch.randn(4, 8)).sum().backward()
        assert seen == ["forward", "backward"]
    else:

        def told() -> None:
            with pytest.warns(UserWarning, match="block#0 has hooks inside"):
                model(torch.randn(4, 8)).sum().backward()

        told()
        assert seen.count("backward") == 1
        applying.apply(model, plan(by))
        with unguarded(forwards, "_has_hooks", nothing):
            told()


# -- modes, copies, backwards ------------------------------------------------------


class Scaled(nn.Module):
    """What hooks change, its forward reads; its dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.fc(torch.exp(self.scale * x)))
        return functional.dropout(x, 0.5)


@BOTH
def test_hooks_of_backward_run_once_and_change_nothing_that_is_made_again(
    by: str,
) -> None:
    """They run between a forward and what of it runs again."""

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Outer(Scaled())
        found: list[torch.Tensor] = []

        def before(module: Any, made: Any) -> None:
            module.scale += 0.5
            found.extend([*made, torch.rand(2)])

        def after(module: Any, given: Any, made: Any) -> None:
            module.scale *= 0.9
            found.extend([*given, *made, torch.rand(2)])

        model.block.register_full_backward_pre_hook(before)
        model.block.register_full_backward_hook(after)
        if planned:
            applying.apply(model, plan(by))
        for step in range(3):
            found += step_of(model, step)
            found.append(torch.tensor(model.block.scale))
        return found

    expected = trained(planned=False)

    def run() -> None:
        assert all(map(torch.equal, expected, trained(planned=True)))

    run()
    guards: dict[str, Guard] = {
        "program": (recompute, "set_random_state", nothing),
        "rerun": (world.Snapshot, "restore", nothing),
    }
    with unguarded(*guards[by]):
        run()


@BOTH
def test_hooks_of_backward_inside_a_region_run_once(by: str) -> None:
    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Outer(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
        found: list[torch.Tensor] = []
        for module in model.block:
            module.register_full_backward_pre_hook(lambda _, made: found.extend(made))
            module.register_full_backward_hook(
                lambda _, given, made: found.extend((*given, *made))
            )
        if planned:
            applying.apply(model, plan(by))
        for step in range(3):
            step_of(model, step)
        return found

    expected = trained(planned=False)
    actual = trained(planned=True)
    assert len(actual) == len(expected) == 3 * 3 * 3
    assert all(map(torch.equal, expected, actual))


def check_switched_before_backward(
    by: str,
    make: Callable[[], Outer],
    begin: Callable[[Outer], object],
    switch: Callable[[Outer], object],
    is_switched: Callable[[Outer], bool],
) -> None:
    """Forward, with a plan and without, something switched, then backward."""

    def run() -> None:
        seen = []
        for planned in (False, True):
            torch.manual_seed(0)
            model = make()
            if planned:
                applying.apply(model, plan(by))
            begin(model)
            seeded(1)
            loss = model(torch.randn(4, 8)).square().sum()
            switch(model)
            loss.backward()
            assert is_switched(model)
            seen.append(state_of(model, loss))
        assert all(map(torch.equal, *seen))

    run()
    if by == "rerun":
        with unguarded(world.Snapshot, "restore", nothing):
            run()


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_switched_before_backward(by: str, training: bool) -> None:
    def make() -> Outer:
        parts = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout()
        return Outer(nn.Sequential(*parts))

    check_switched_before_backward(
        by,
        make,
        lambda model: model.train(training),
        lambda model: model.train(not training),
        lambda model: model.block.training is not training,
    )


@BOTH
def test_weights_frozen_before_backward(by: str) -> None:
    """As adversarial training does to the discriminator that it is done with."""
    check_switched_before_backward(
        by,
        lambda: Outer(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))),
        nothing,
        lambda model: model.block.requires_grad_(False),
        lambda model: not any(p.requires_grad for p in model.block.parameters()),
    )


class _Attention(nn.Module):
    """Asks whether it was given one tensor three times, as torch's own does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        assert q is k is v
        return self.heads(q, k, v)[0]


@BOTH
def test_a_tensor_given_twice_is_one_tensor_again(by: str) -> None:
    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), _Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.block(x, x, v=x)

    torch.manual_seed(0)
    plain = Itself()
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    for step in range(3):
        assert all(map(torch.equal, step_of(plain, step), step_of(planned, step)))


@BOTH
def test_a_batch_of_one_is_laid_out_as_it_was_given(by: str) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.first(x).unsqueeze(1).transpose(0, 1))

    torch.manual_seed(0)
    plain = Turned()
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by))
    assert all(map(torch.equal, step_of(plain, 0), step_of(planned, 0)))


@BOTH
def test_a_deep_copy_runs_its_own_weights(by: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = Outer(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
        planned = copy.deepcopy(plain)
        applying.apply(planned, plan(by))
        assert all(map(torch.equal, step_of(plain, 0), step_of(planned, 0)))
        averages = copy.deepcopy(plain), copy.deepcopy(planned)
        with torch.no_grad():
            for parameter in planned.parameters():
                parameter.zero_()
        assert all(map(torch.equal, *(step_of(model, 1) for model in averages)))

    run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards.ForwardWrapper, "__deepcopy__", nothing, raising=False)
        patch.setattr(forwards.ForwardWrapper, "begin", nothing)
        with unguarded(forwards.ForwardWrapper, "__deepcopy__", lambda one, _: one):
            run()


@BOTH
def test_a_capture_of_a_cuda_graph_is_an_error_that_says_so(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda", 0)
    with pytest.raises(ApplyError, match="cuda:0 while a CUDA graph is captured"):
        if by == "program":
            recompute.random_state(device, None)
        else:
            sources.sources_on([device])[-1].state()


class Centred(nn.Module):
    """Subtracts a mean that it then moves: no program can subtract it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        y = torch.tanh(h - self.mean) * torch.sigmoid(h + self.mean)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return x + y


def test_what_no_program_can_rebuild_is_run_again() -> None:
    """Plans for it are found, never behind everyday practice, and none too good."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[Centred() for _ in range(6)]), torch.randn(512, 32)
    graph = ckplan.profile(model, batch, optimizer="none", replay=False)
    timed = [replace(op, seconds=op.moved_bytes * 1e-9) for op in graph.ops]
    graph = replace(graph, ops=tuple(timed), engine=EngineCosts())
    planner = Planner(graph)
    (every_call,) = [timeline for timeline, _ in planner.standard_baselines.every_call]
    assert planner.floor.peak_bytes <= every_call.peak_bytes
    assert planner.floor.peak_bytes < 0.7 * planner.unplanned.peak_bytes
    for point in planner.frontier():
        assert point.overhead >= point.bound_overhead - 1e-9
        dearer = every_call.peak_bytes > point.peak_bytes
        assert dearer or point.overhead <= every_call.overhead
    plan = ckplan.solve(graph, budget="75%")
    assert {region.by for region in plan.regions} == {"rerun"}
    planned = copy.deepcopy(model)
    ckplan.apply(planned, plan)
    for _ in range(3):
        found = []
        for one in (model, planned):
            one.zero_grad()
            loss = one(batch).square().sum()
            loss.backward()
            found.append(state_of(one, loss)[:-2])
        assert all(map(torch.equal, *found))
    assert all(region.runs == 3 for region in ckplan.status(planned).regions)


def test_what_only_costs_is_never_planned() -> None:
    """No region in a frozen prefix, or of calls that only look at a tensor."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Sequential(nn.Flatten(), nn.Identity()))
    model[:2].requires_grad_(False)
    graph = ckplan.profile(model, torch.randn(8192, 64), replay=False)
    simulator = Simulator(graph)
    frozen = {"0", "0.0", "0.1", "1", "1.0", "1.1"}
    looking = {"4", "4.0", "4.1"}
    plans = [ckplan.solve(graph, max_overhead=share) for share in (0.05, 0.2, 0.5)]
    regions = [region for plan in plans for region in resolve(plan, graph)]
    assert regions
    for region in regions:
        last = region.call if region.last is None else region.last
        assert graph.calls[last].fqn not in frozen | looking
        assert simulator.effect(region).dropped


@BOTH
def test_several_backwards_are_right(by: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = Outer(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout()))
        planned = copy.deepcopy(plain)
        applying.apply(planned, plan(by))
        grads = []
        for model in (plain, planned):
            seeded(0)
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads))

    run()
    guards: dict[str, Guard] = {
        "program": (recompute.Rebuilder, "_draw", nothing),
        "rerun": (sources.Source, "put", nothing),
    }
    with unguarded(*guards[by]):
        run()


class Island(nn.Module):
    """Casts its weight where autocast says so, and not in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.fc(x))
        with torch.autocast("cpu", enabled=False):
            x = functional.gelu(self.fc(x.float()))
        return functional.gelu(self.fc(x))


def cast_alike(by: str, backward_inside: bool) -> None:
    """One block twice: the second call finds its weight cast by the first."""
    torch.manual_seed(0)
    block = Island()
    plain = nn.Sequential(block, block)
    planned = copy.deepcopy(plain)
    applying.apply(planned, plan(by, "0"))
    for step in range(3):
        seen = []
        for model in (plain, planned):
            model.zero_grad()
            seeded(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 8)).float().square().sum()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            seen.append(state_of(model, loss))
        assert all(map(torch.equal, *seen))


def only_below_autograd() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(torch._C._AutoDispatchBelowAutograd())
    return stack


def without_autocast(casting: checkpoint.Casting) -> AbstractContextManager[Any]:
    """Cast nothing in the second run."""
    devices = [device for device, *_ in casting._types]
    stack = ExitStack()
    for device in devices:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@BOTH
@pytest.mark.parametrize("backward_inside", [False, True])
def test_casts_of_autocast_are_the_same(by: str, backward_inside: bool) -> None:
    cast_alike(by, backward_inside)
    if by == "rerun":
        with unguarded(checkpoint.Casting, "again", without_autocast):
            cast_alike(by, backward_inside)
    elif backward_inside:
        with unguarded(recompute, "_below_autograd", only_below_autograd):
            cast_alike(by, backward_inside)


class Mask(nn.Module):
    """A buffer whose rows share their bytes, and an attribute that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(1, 8).expand(4, 8))
        self.config: dict[str, Any] = {"width": 8}
        self.config["self"] = self.config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mask[:1].mul_(0.5)
        return torch.tanh(self.linear(x) * self.mask.clone())


def test_expanded_buffers_and_attributes_in_a_circle_are_put_back() -> None:
    same(Mask, "rerun")


def test_a_batch_changed_in_place_is_not_run_again() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x.mul_(2)))

    graph = ckplan.profile(nn.Sequential(Doubled()), torch.ones(4, 8), replay=False)
    for by in WAYS:
        with pytest.raises(PlanError, match="changes its input in place"):
            Simulator(graph).run(resolve(plan(by, "0"), graph))
