"""Loops that do not fit: recorded at cut batches, extrapolated to whole ones."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import LOOPS, Loop
from measured import peak_bytes_of
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ckplan
from ckplan.errors import CkplanError, WorkloadError
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.cut_batches import BatchCutter

IMAGES, CLASSES = torch.randn(160, 3, 16, 16), torch.arange(160) % 10


def make_classifier() -> Any:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(2048, 10))
    return model, torch.optim.Adam(model.parameters())


def run_classifier(state: Any, steps: int) -> None:
    """Labels are read by the loss alone."""
    model, optimizer = state
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(IMAGES, CLASSES), 16, shuffle=True)
    for _, (image, label) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(model(image), label).backward()
        optimizer.step()


CLASSIFIER = Loop(make_classifier, run_classifier, lambda state: state, "80%")


def recorded(loop: Loop, steps: int, **how: Any) -> ckplan.Graph:
    state = loop.make()
    with ckplan.record(*loop.pick(state), **how) as recorder:
        loop.run(state, steps)
    return recorder.graph


@pytest.mark.parametrize(
    ("loop", "reduce", "where"),
    [(CLASSIFIER, 4, "a DataLoader"), (LOOPS["language"], 2, "a call of a model")],
)
def test_a_step_of_cut_batches_is_that_of_whole_ones(
    loop: Loop, reduce: int, where: str
) -> None:
    small, whole = recorded(loop, 8, reduce=reduce), recorded(loop, 3)
    assert small.fingerprint == whole.fingerprint
    assert f"cut where it leaves {where}" in " ".join(small.notes)
    peak_bytes = simulate(whole).peak_bytes
    # A loop without a loader holds its whole inputs beside those of the model.
    held = 0 if where == "a DataLoader" else small.bytes_by_kind["input"]
    assert 0 <= simulate(small).peak_bytes - peak_bytes <= held
    plan = ckplan.solve(small, goal="min-memory")
    assert plan.regions
    state = loop.make()
    ckplan.apply(loop.pick(state)[0], plan)
    given = [*state[0].parameters(), *state[0].buffers(), IMAGES, CLASSES]
    taken_bytes = peak_bytes_of(
        lambda: loop.run(state, 3), given if loop is CLASSIFIER else given[:-2]
    )
    planned_bytes = simulate(small, resolve(plan, small)).peak_bytes
    assert planned_bytes < peak_bytes
    assert planned_bytes - held <= taken_bytes * 1.001
    assert taken_bytes <= planned_bytes * 1.001


def test_every_part_of_a_batch_is_cut_once() -> None:
    pair = namedtuple("pair", "tokens texts")
    tokens = torch.arange(16).view(8, 2)
    batch = {
        "pair": pair(tokens, [*"abcdefgh"]),
        "labels": tokens,
        "order": OrderedDict(length=torch.tensor(2), mask=torch.ones(8)),
        "weights": torch.ones(3),
    }
    seen: list[Any] = []

    class Watched(nn.Module):
        def forward(self, batch: Any) -> None:
            seen.append(batch)

    cutter = BatchCutter(2)
    model = Watched()
    with cutter.cutting():
        model(batch)
        cutter.halve()
        model(batch)
        with torch.no_grad():
            model(batch)
    model(batch)
    many, few, *others = seen
    assert all(one is batch for one in others)
    assert torch.equal(many["pair"].tokens, tokens[:4])
    assert many["labels"] is many["pair"].tokens
    assert many["pair"].texts == [*"abcd"]
    assert few["pair"].texts == [*"ab"]
    assert type(few["order"]) is OrderedDict
    assert few["order"]["mask"].shape == (2,)
    assert few["weights"] is batch["weights"]
    assert cutter.rows() == (2, 4, 8)
    assert tokens.shape == (8, 2)


def on_the_fly(
    rows: Callable[[int], int] = lambda step: 64,
    width: Callable[[int], int] = lambda step: 8,
    loss: Callable[[torch.Tensor, int], torch.Tensor] = lambda out, rows: out.mean(),
    steps: int = 8,
) -> Loop:
    """A loop of which the batches depend on the step."""

    def make() -> Any:
        model = nn.Linear(4, 4)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def run(state: Any, _: int) -> None:
        for step in range(steps):
            out = state[0](torch.randn(rows(step), width(step), 4))
            loss(out, rows(step)).backward()
            state[1].step()

    return Loop(make, run, lambda state: state, "80%")


def loaded(*rows: int) -> Loop:
    """A loop with a loader for each number of rows."""

    def run(state: Any, steps: int) -> None:
        data = torch.randn(256, 4)
        loaders = [iter(DataLoader(TensorDataset(data), size)) for size in rows]
        for _ in range(steps):
            parts = [next(loader)[0] for loader in loaders]
            state[0](torch.cat(parts)).mean().backward()
            state[1].step()
            del parts

    return on_the_fly()._replace(run=run)


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self) -> torch.Tensor:
        return self.inner(self.inner.weight).mean()


def nothing_given() -> Loop:
    def make() -> Any:
        model = Free()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def run(state: Any, steps: int) -> None:
        for _ in range(steps):
            state[0]().backward()
            state[1].step()

    return Loop(make, run, lambda state: state, "80%")


def alike(out: torch.Tensor, rows: int) -> torch.Tensor:
    """Grows as the square of the rows."""
    del rows
    return (out.flatten(1) @ out.flatten(1).T).square().mean()


BAD: dict[str, tuple[Loop, dict[str, Any]]] = {
    "cannot cut batches to one row of 1": (on_the_fly(), {"reduce": 1}),
    "cannot record the largest": (on_the_fly(), {"reduce": 2, "num_steps": 2}),
    "cannot cut a batch of 64 rows": (on_the_fly(), {"reduce": 32}),
    "optimizer stepped 6 times": (on_the_fly(steps=6), {"reduce": 4}),
    "in a step of 16 rows": (on_the_fly(width=lambda step: 9 - step), {"reduce": 4}),
    "bytes are not linear": (on_the_fly(loss=alike), {"reduce": 4}),
    "failed on the first 16 of 64 rows": (
        on_the_fly(loss=lambda out, rows: (out - torch.ones(rows, 1, 1)).mean()),
        {"reduce": 4},
    ),
    "to the same share": (loaded(32, 12), {"reduce": 3}),
    "has none that can be cut": (nothing_given(), {"reduce": 2}),
}


@pytest.mark.parametrize("said", BAD)
def test_what_cannot_be_cut_is_said(said: str) -> None:
    loop, how = BAD[said]
    with pytest.raises(CkplanError) as error:
        recorded(loop, 8, **how)
    lines = str(error.value).splitlines()
    assert said in lines[0]
    assert [line.split()[0] for line in lines] == ["error:", "needed:", "try:"]


def test_two_loaders_are_cut_to_one_share() -> None:
    small, whole = recorded(loaded(32, 16), 8, reduce=4), recorded(loaded(32, 16), 3)
    assert small.fingerprint["batch"] == whole.fingerprint["batch"]


def test_nothing_is_cut_after_the_recorder() -> None:
    state = CLASSIFIER.make()
    with (
        pytest.raises(WorkloadError, match="2 times"),
        ckplan.record(*state, reduce=4) as recorder,
    ):
        CLASSIFIER.run(state, 2)
        raise WorkloadError("stepped 2 times", needed="more", hint="more")
    assert not recorder.done
    batch = next(iter(DataLoader(TensorDataset(IMAGES), 16)))
    assert batch[0].shape[0] == 16
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
