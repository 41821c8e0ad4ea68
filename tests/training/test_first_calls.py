"""The first call of a kernel has the bits of later ones (pytorch/pytorch#188792)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckplan.training.warm_up import warm_up_vector_kernels

PROCESSES = 40  # without first calls about one in ten goes wrong
TWICE = """
import torch, ckplan
from ckplan.plan.plan import Plan, PlannedRegion

class Exp(torch.nn.Module):
    def forward(self, x):
        return x.exp()

model = torch.nn.Sequential(Exp())
ckplan.apply(model, Plan(regions=(PlannedRegion("0"),)))
x = torch.randn(2048, 1536)
raise SystemExit(not torch.equal(model(x), model(x)))
"""


def test_first_calls_leave_the_world_as_it_was() -> None:
    warm_up_vector_kernels.cache_clear()
    state = torch.get_rng_state()
    with FakeTensorMode():  # of a dry run: they are real all the same
        warm_up_vector_kernels()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="needs two threads")
def test_the_first_forward_has_the_bits_of_the_second_in_every_process() -> None:
    run = [sys.executable, "-c", TWICE]
    codes = [subprocess.run(run, check=False).returncode for _ in range(PROCESSES)]
    assert codes == [0] * PROCESSES
