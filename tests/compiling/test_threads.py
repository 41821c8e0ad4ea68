"""Threads that compile while another plans."""

from __future__ import annotations

import threading
from typing import Any

import torch
from compiled import planner_of
from torch import nn

from ckplan.compiling.partition import Partitioner
from ckplan.compiling.torch_names import generate_code


def test_another_thread_compiles_in_earnest_while_one_plans() -> None:
    planner = planner_of(nn.Linear(3, 1), torch.randn(4, 3))
    traced = planner.traced
    found: list[torch.Tensor] = []
    x = torch.randn(8, 8)

    def other() -> None:
        found.append(torch.compile(lambda v: v @ v)(x))

    def record(*_: Any) -> None:
        if not found:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    generate_code(traced.copied(), traced.inputs, Partitioner(None), {}, record)
    assert torch.allclose(found[0], x @ x)
