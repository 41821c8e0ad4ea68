"""Copies of a workload that exists, on real tensors or on fake ones."""

from __future__ import annotations

import copy
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
    return replace(workload, model=model, batch=data[0], target=data[1])


def _generators_of(model: nn.Module) -> dict[int, Any]:
    """A ``deepcopy`` memo with clones of the generators of a model.

    Generators cannot be copied under fake tensors, as their states are real tensors.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    found = (value for value in held if isinstance(value, torch.Generator))
    return {id(one): one.clone_state() for one in found}


def _values_of(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    return [*model.buffers(), *tensors_of(batch)]
