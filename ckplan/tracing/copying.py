"""Copies of a workload that exists, on real tensors or on fake ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode

from ckplan.tracing.watched_step import FakeScope
from ckplan.training.workload import Workload, tensors_of


def copied(workload: Workload, scope: FakeScope | None) -> Workload:
    """A copy whose model and batch share nothing with the workload."""
    real = (workload.model, workload.data)
    if scope is None:
        model, data = copy.deepcopy(real)
    else:
        fake, known = scope
        with FakeCopyMode(fake):
            model, data = copy.deepcopy(real, _generators_of(workload.model))
        known.learn_all(_values_of(model, data), _values_of(*real))
    said = (*workload.assumptions, *_left_out(workload.model))
    return replace(
        workload, model=model, batch=data[0], target=data[1], assumptions=said
    )


def _left_out(model: nn.Module) -> Iterator[str]:
    """What a trace says of hooks on parameters, which no copy has."""
    hooked = (
        name
        for name, one in model.named_parameters()
        if one._post_accumulate_grad_hooks or one._backward_hooks
    )
    if (first := next(hooked, None)) is not None:
        yield (
            f"hooks on parameters, such as that of {first}, are left out: a factory in "
            "a file that adds them, ckplan profile model.py, has them; an optimizer in "
            "backward needs that"
        )


def _generators_of(model: nn.Module) -> dict[int, Any]:
    """A ``deepcopy`` memo with clones of the generators of a model.

    Generators cannot be copied under fake tensors, as their states are real tensors.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    found = (value for value in held if isinstance(value, torch.Generator))
    return {id(one): one.clone_state() for one in found}


def _values_of(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    return [*model.buffers(), *tensors_of(batch)]
