"""Which dimension of a batch counts rows, and where a workload is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ckplan
from ckplan.errors import WorkloadError
from ckplan.graph.batch import batch_rows
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.workload import as_arguments
from ckplan.tracing import profile as profiling
from ckplan.tracing.profile import profile_workload
from ckplan.tracing.rows import model_rows, spec_rows
from ckplan.tracing.smaller_batches import DoesNotFitError
from ckplan.training.loading import WorkloadSpec
from ckplan.training.remembered import complete, describe_workload
from ckplan.training.step import Training
from ckplan.training.workload import Workload, first_rows, rows_of, with_rows

TIME, ROWS, WIDTH = 6, 4, 8


def sequences() -> torch.Tensor:
    return torch.randn(TIME, ROWS, WIDTH)


def test_lengths_and_masks_are_cut_beside_inputs_with_time_first() -> None:
    batch = sequences(), torch.ones(ROWS), torch.ones(ROWS, TIME)
    target = torch.zeros(ROWS, dtype=torch.long)
    workload = Workload(nn.Identity(), batch, target=target, batch_dim=1)
    assert rows_of(workload) == ROWS
    more = with_rows(workload, 2 * ROWS + 1)
    shapes = [tuple(one.shape) for one in (*more.batch, more.target)]
    assert shapes == [(TIME, 9, WIDTH), (9,), (9, TIME), (9,)]
    assert torch.equal(more.batch[0][:, :ROWS], more.batch[0][:, ROWS : 2 * ROWS])
    less = first_rows(workload, 3)
    assert [len(one) for one in (less.batch[1], less.batch[2], less.target)] == [3] * 3
    assert torch.equal(less.batch[0], batch[0][:, :3])


def test_of_one_row_labels_and_lengths_are_repeated_and_scales_are_not() -> None:
    scale, lengths = torch.ones(1), torch.ones(1, dtype=torch.long)
    workload = Workload(
        nn.Identity(), (torch.randn(1, WIDTH), lengths, scale), target=torch.ones(1)
    )
    more = with_rows(workload, 2)
    assert [len(one) for one in (*more.batch, more.target)] == [2, 2, 1, 2]


def test_a_batch_of_no_rows_is_told_so() -> None:
    with pytest.raises(WorkloadError) as error:
        with_rows(Workload(nn.Identity(), torch.ones(0, WIDTH)), 2)
    assert error.value.hint == "a batch of one row or more"


@pytest.mark.parametrize(
    ("dim", "hint"),
    [(0, "--batch-dim 1 "), (2, "--batch-dim 1 "), (7, "--batch-dim 1 ")],
)
def test_rows_that_are_not_found_name_the_dimension_that_would_do(
    dim: int, hint: str
) -> None:
    batch = (sequences(), torch.ones(ROWS))
    with pytest.raises(WorkloadError) as error:
        with_rows(Workload(nn.Identity(), batch, batch_dim=dim), 2)
    assert "cannot find the rows of the batch" in error.value.what
    assert error.value.hint.startswith(hint)


class Turned(nn.Module):
    """A module of sequences that gets its input with the first two sizes swapped."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return call(self.inner, x.transpose(0, 1))


class Straight(Turned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return call(self.inner, x)


def call(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(inner, nn.MultiheadAttention):
        return inner(x, x, x)[0].sum()
    out = inner(x)
    return (out[0] if isinstance(out, tuple) else out).sum()


MODULES = {
    "lstm": lambda first: nn.LSTM(WIDTH, WIDTH, batch_first=first),
    "gru": lambda first: nn.GRU(WIDTH, WIDTH, batch_first=first),
    "attention": lambda first: nn.MultiheadAttention(WIDTH, 2, batch_first=first),
    "layer": lambda first: nn.TransformerEncoderLayer(WIDTH, 2, batch_first=first),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("outer", [Turned, Straight])
@pytest.mark.parametrize("batch_first", [False, True])
def test_time_that_is_taken_for_rows_is_refused(
    name: str, outer: type[Turned], batch_first: bool
) -> None:
    model = outer(MODULES[name](batch_first))
    workload = Workload(model, sequences())
    if batch_first == (outer is Straight):
        assert model_rows(workload, named=False) == TIME
        return
    with pytest.raises(WorkloadError) as error:
        model_rows(workload, named=False)
    assert "dimension 0 of the batch as its samples: it is time to" in error.value.what
    assert "'inner" in error.value.what
    assert error.value.hint.startswith("--batch-dim 1 ")
    assert model_rows(workload, named=True) == TIME  # the user knows better
    assert model_rows(replace(workload, batch_dim=1), named=True) == ROWS


def test_one_sequence_without_a_batch_is_time() -> None:
    workload = Workload(nn.LSTM(WIDTH, WIDTH, batch_first=True), sequences()[0])
    with pytest.raises(WorkloadError, match=r"it is time to the model \(LSTM\)"):
        model_rows(workload, named=False)


def test_a_model_that_fails_on_its_batch_is_left_to_profiling() -> None:
    workload = Workload(Straight(nn.LSTM(WIDTH, WIDTH)), torch.randn(4, WIDTH + 1))
    assert model_rows(workload, named=False) == 4


MODEL = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).mean()

def build():
    return Tagger(), torch.randn(6, 4, 8)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tagger.py"
    path.write_text(MODEL)
    return path


def test_a_path_is_a_target(file: Path) -> None:
    spec = WorkloadSpec(file)
    assert spec == WorkloadSpec(str(file))
    assert (spec.name, spec.target) == ("tagger", str(file))
    assert isinstance(spec.build().model, nn.Module)


def test_a_named_dimension_is_cut_and_remembered(file: Path) -> None:
    with pytest.raises(WorkloadError, match="it is time to 'rnn'"):
        spec_rows(WorkloadSpec(str(file)))
    spec = WorkloadSpec(str(file), rows=2, batch_dim=1)
    assert spec_rows(replace(spec, rows=None)) == 4
    assert spec.build().batch.shape == (6, 2, 8)
    known = describe_workload(spec, 0)
    assert known == {"target": str(file), "micro_batch": 2, "batch_dim": 1}
    assert as_arguments(known) == f"{file} --batch-dim 1 --micro-batch 2"
    plan = Plan("Tagger", workload=known)
    again = complete(WorkloadSpec(str(file)), Training(), 0, plan).spec
    assert (again.rows, again.batch_dim) == (2, 1)


def test_a_trace_counts_rows_at_the_dimension_that_was_named(file: Path) -> None:
    def traced(spec: WorkloadSpec) -> Graph:
        return profile_workload(spec, gpu="RTX 4090", replay=False, check=False)

    assert batch_rows(traced(WorkloadSpec(str(file)))) == 6
    assert batch_rows(traced(WorkloadSpec(str(file), batch_dim=1))) == 4


def test_a_profile_in_python_counts_rows_at_the_dimension_that_is_named(
    file: Path,
) -> None:
    workload = WorkloadSpec(str(file)).build()
    how = {"loss_fn": workload.loss, "target": workload.target, "gpu": "RTX 4090"}

    def rows_at(batch_dim: int | None) -> int | None:
        graph = ckplan.profile(
            workload.model, workload.batch, batch_dim=batch_dim, replay=False, **how
        )
        assert graph.options.get("batch_dim", 0) == (batch_dim or 0)
        return ckplan.fit(graph, gpu="RTX 4090").rows

    assert [rows_at(dim) for dim in (None, 0, 1)] == [6, 6, 4]


@pytest.mark.parametrize("wrong", [3, -1, True, "1"])
def test_a_dimension_without_rows_is_refused_in_python(wrong: object) -> None:
    how = {"batch_dim": wrong, "gpu": "RTX 4090"}
    with pytest.raises(WorkloadError, match="the batch") as error:
        ckplan.profile(nn.Linear(8, 8), torch.ones(4, 8), **how)
    assert "--batch-dim 1" in error.value.hint or "batch_dim" in error.value.hint
    with pytest.raises(WorkloadError, match="the batch"):
        ckplan.tune(nn.Linear(8, 8), torch.ones(4, 8), **how)


def test_a_dimension_without_rows_is_refused_before_a_file_is_profiled(
    file: Path,
) -> None:
    with pytest.raises(WorkloadError, match="cannot find the rows of the batch"):
        WorkloadSpec(str(file), batch_dim=5).build()


def test_a_batch_that_does_not_fit_is_cut_where_its_rows_are(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **how: object) -> None:
        raise DoesNotFitError("no", needed="real tensors", hint="none")

    monkeypatch.setattr(profiling, "trace", refused)
    workload = WorkloadSpec(str(file)).build()
    how = {"loss_fn": workload.loss, "target": workload.target, "in_step": False}
    graph = ckplan.profile(
        workload.model, workload.batch, batch_dim=1, replay=False, **how
    )
    assert any("from batches of 1 and 2 rows to 4" in note for note in graph.notes)
