"""Steps that are compared with and without a plan begin with the same state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckplan.errors import WorkloadError
from ckplan.training.workload import Workload
from ckplan.verifying.compiled_runs import results_of
from ckplan.verifying.compiled_steps import verify_compiled


def test_buffers_are_as_before_when_steps_have_been_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 4)
    workload = Workload(model=model, batch=x)
    first = results_of(workload, lambda: model(x).sum(), 0)
    second = results_of(workload, lambda: model(x).sum(), 0)
    assert model[1].num_batches_tracked == 0
    assert first.values["buffer 1.num_batches_tracked"] == 1
    assert all(torch.equal(one, second.values[n]) for n, one in first.values.items())


FAULTY = """
import torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        if self.bias is None:
            raise ValueError("no bias")
        return super().forward(x).sum()

def raises():
    return Model(2, 2, bias=False), torch.randn(2, 2)

def frozen():
    return Model(2, 2).requires_grad_(False), torch.randn(2, 2)
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("raises", "the uncompiled step raised ValueError: no bias"),
        ("frozen", "the loss requires no gradient"),
    ],
)
def test_a_step_that_fails_uncompiled_is_said(
    tmp_path: Path, factory: str, said: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises(WorkloadError, match=said) as error:
        verify_compiled(f"{tmp_path / 'faulty.py'}:{factory}", "90%")
    assert len(str(error.value).splitlines()) == 3
