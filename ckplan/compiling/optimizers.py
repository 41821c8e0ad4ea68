"""Bytes of an optimizer's step, from a step on fake tensors.

A step of training holds the optimizer's state all the time, and its gradients while the
optimizer runs. Where gradients are accumulated, those there are stay while backward
makes others, which compiled code returns all at once.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ckplan.compiling.ledger import Ledger, Meter
from ckplan.compiling.lowering import lower_alone
from ckplan.compiling.replay import replay_alone
from ckplan.compiling.torch_names import COMPILED, FakeTensorMode
from ckplan.compiling.workspaces import KernelBytes, bytes_on
from ckplan.errors import ApplyError
from ckplan.training.workload import device_of, tensors_of


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Bytes of an optimizer, as from its second step on."""

    gradient_bytes: int
    state_bytes: int
    step_peak_bytes: int  # that a step allocates at once, and frees

    def reserved_bytes(self, accumulates: bool) -> int:
        """Bytes that it holds in forward and backward."""
        return self.state_bytes + (self.gradient_bytes if accumulates else 0)

    def peak_bytes(self, held_bytes: int) -> int:
        """Most bytes alive at once in the optimizer's step.

        Args:
            held_bytes: By parameters, buffers and batch.
        """
        mine = self.gradient_bytes + self.state_bytes + self.step_peak_bytes
        return held_bytes + mine


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    """Bytes of an optimizer's state and step; nothing runs, nothing is changed.

    Args:
        optimizer: It has state, or none yet. Where its ``step`` is what
            ``torch.compile`` returned, the generated code is replayed.

    Raises:
        ApplyError: Its step does not run on fake tensors.
    """
    kernels = KernelBytes()
    try:
        found = _replayed(optimizer, kernels)
        if kernels.measure():
            found = _replayed(optimizer, kernels)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ApplyError(
            f"cannot count the bytes of {type(optimizer).__name__}: "
            f"{type(error).__name__}: {said}",
            needed="an optimizer whose step runs on fake tensors, without a closure",
            hint="reserve=, the size of its state and gradients",
        ) from error
    return found


def _replayed(optimizer: torch.optim.Optimizer, kernels: KernelBytes) -> OptimizerBytes:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ledger = Ledger(device_of(held).type)
    is_compiled = hasattr(optimizer.step, COMPILED)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        twin = _twin(optimizer)
        parameters = [p for group in twin.param_groups for p in group["params"]]
        for one in parameters:
            one.grad = torch.empty_like(one)
        gradients = sum(ledger.ignore(one.grad) for one in parameters)
        for one in parameters:
            ledger.ignore(one)
        with Meter(ledger, kernels):
            twin.step()  # makes the state
            state = tensors_of([*twin.state.values()])
            state_bytes = sum(bytes_on(ledger.device, one) for one in state)
        step_bytes = _compiled_bytes(twin) if is_compiled else None
        if step_bytes is None:
            with Meter(ledger, kernels):
                before = ledger.live_bytes
                ledger.peak_bytes = before
                twin.step()
            step_bytes = ledger.peak_bytes - before
    return OptimizerBytes(gradients, state_bytes, step_bytes)


def _compiled_bytes(twin: Any) -> int | None:
    """Most bytes that a compiled step allocates at once, from its generated code.

    None if torch compiles nothing of it, so that it runs as it is.
    """
    found: list[int] = []

    def only_replay(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(replay_alone(lower_alone(graph, inputs)))
        return graph.forward

    torch.compile(twin.step, backend=only_replay)()
    return max(found, default=None)


def _twin(optimizer: torch.optim.Optimizer) -> Any:
    """The same optimizer of fake parameters, without state, hooks and schedulers.

    Raises:
        TypeError: It steps another one, which would be the real one.
    """
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            kind = type(value).__name__
            raise TypeError(f"it holds another optimizer, .{name}, of type {kind}")
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, or a compiled one
    twin.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, name, OrderedDict())
    twin.param_groups = [
        {**group, "params": [_fake(p) for p in group["params"] if p.requires_grad]}
        for group in optimizer.param_groups
    ]
    return twin


def _fake(parameter: torch.Tensor) -> nn.Parameter:
    how: Any = {"dtype": parameter.dtype, "device": parameter.device}
    return nn.Parameter(torch.empty_strided(parameter.shape, parameter.stride(), **how))
