"""Kernels of compiled plans that read a buffer run after those that write into it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.upsampled import Upsampled
from torch import nn

import ckplan
from ckplan.compiling.lowering import in_order


def gradients(model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    call(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["100%", "in order"])
def test_what_a_scatter_writes_is_read_after_it(how: str) -> None:
    torch.manual_seed(0)
    model = Upsampled()
    expected = gradients(copied := copy.deepcopy(model), copied)
    call: Any
    if how == "in order":
        call = torch.compile(model, backend=in_order, fullgraph=True)
    else:
        call = ckplan.compile(model, how)
    found = gradients(model, call)
    assert len(found) == len(expected) == 8
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert float(expected[0].abs().max()) > 1e-3
