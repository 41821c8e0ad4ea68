"""Steps that are compared with and without a plan begin with the same state."""

from __future__ import annotations

import torch
from torch import nn

from ckplan.training.workload import Workload
from ckplan.verifying.compiled_steps import _results


def test_buffers_are_as_before_when_steps_have_been_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(8, 4)
    workload = Workload(model=model, batch=x)
    first = _results(workload, lambda: model(x).sum(), 0)
    second = _results(workload, lambda: model(x).sum(), 0)
    assert model[1].num_batches_tracked == 0
    assert first.values["buffer 1.num_batches_tracked"] == 1
    assert all(torch.equal(one, second.values[n]) for n, one in first.values.items())
