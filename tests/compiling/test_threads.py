"""Threads that compile while another plans."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
from compiled import planner_of
from torch import nn
from torch._inductor.graph import GraphLowering

from ckplan.compiling.inductor import generate_code
from ckplan.compiling.partition import Partitioner


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


def test_two_threads_that_plan_at_once_leave_torch_as_it_was() -> None:
    traced = planner_of(nn.Linear(3, 1), torch.randn(4, 3)).traced
    before = GraphLowering.compile_to_module
    both, seen = threading.Barrier(2), []

    def plan() -> None:
        def record(*_: Any) -> None:
            seen.append(threading.get_ident())
            with suppress(threading.BrokenBarrierError):  # alone, as it should be
                both.wait(0.05)

        generate_code(traced.copied(), traced.inputs, Partitioner(None), {}, record)

    threads = [threading.Thread(target=plan) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert GraphLowering.compile_to_module is before
    assert seen == [seen[0], seen[0], seen[2], seen[2]]
    assert seen[0] != seen[2]
