"""The first step of a model, known from another batch or another optimizer.

The second step is recorded, as the first one makes the state of the optimizer. That
takes gradients, and no forward: of other batches of a model on fake tensors, the
gradients that its first step left are set, and the optimizer alone takes a step. The
state that torch's optimizers leave is made again, without any step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from ckplan.training.step import TrainingStep

_PLAIN = (bool, int, float, str, type(None))
_NOT_OF_STATE = ("params", "foreach", "fused")
_OTHER = object()


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor of an optimizer's state that fills a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_State: TypeAlias = dict[str, dict[str, Any]]
"""Parameter -> what an optimizer keeps of it: ``_Like`` for tensors, plain values."""


@dataclass
class FirstStep:
    """What the first step of a model leaves.

    Nothing is known of a model that its first step changes (a cache, a counter), of one
    whose step leaves tensors behind, and of gradients other than dense ones: every
    first step of it runs whole.
    """

    gradients: frozenset[str] | None = None  # names of parameters; None: not known
    alone: bool = False  # record the update alone: a step of another optimizer is known
    states: dict[str, _State] = field(default_factory=dict)  # by kind of optimizer

    def stands_in(self, step: TrainingStep) -> bool:
        """Whether a step needs no forward and backward before it is recorded."""
        return self.gradients is not None and step.scaler is None

    def set_gradients(self, step: TrainingStep) -> None:
        """Give the parameters gradients, as a backward leaves them."""
        assert self.gradients is not None, "internal error: no first step is known"
        for name, parameter in step.workload.model.named_parameters():
            if name in self.gradients:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)

    def update(self, step: TrainingStep) -> None:
        """Leave the state of a first update: that of one that was taken, if known."""
        optimizer, kind = step.optimizer, _kind(step)
        if optimizer is None or kind not in self.states:
            with in_one_call(optimizer):
                step.update()
            self._learn_state(step)
            return
        named = dict(step.workload.model.named_parameters())
        for name, entries in self.states[kind].items():
            made = {key: _made_like(value) for key, value in entries.items()}
            optimizer.state[named[name]] = made

    def _learn_state(self, step: TrainingStep) -> None:
        kind = _kind(step)
        if step.optimizer is not None and kind is not None:
            state = _described(step.optimizer, step.workload.model)
            if state is not None:
                self.states[kind] = state

    def forget(self) -> None:
        """Let every first step run whole: what it leaves counts in the second."""
        self.gradients = None

    def run(self, step: TrainingStep) -> torch.Tensor:
        """Take a whole first step, and learn what it leaves."""
        model = step.workload.model
        before = list(_state_of(model))
        loss = step.run()
        if before == list(_state_of(model)):
            pairs = {name: p for name, p in model.named_parameters() if _has_grad(p)}
            if all(_is_dense(p) for p in pairs.values()):
                self.gradients = frozenset(pairs)
                self._learn_state(step)
        return loss


@contextmanager
def in_one_call(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A scope in which torch's optimizers update all parameters with one op each.

    They make the same state as kernels that update one parameter after the other.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    groups = optimizer.param_groups if optimizer is not None and is_torchs else []
    single = [g for g in groups if g.get("foreach") is False and not g.get("fused")]
    for group in single:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in single:
            group["foreach"] = False


def _kind(step: TrainingStep) -> str | None:
    """What determines the state of an optimizer of torch; None for others."""
    optimizer = step.optimizer
    if optimizer is None or optimizer is step.workload.optimizer:
        return None
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    groups = [
        {key: value for key, value in group.items() if key not in _NOT_OF_STATE}
        for group in optimizer.param_groups
    ]
    fused = [bool(group.get("fused")) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups} {fused}"


def _described(optimizer: torch.optim.Optimizer, model: nn.Module) -> _State | None:
    """The state of an optimizer, in its order; None if it holds other things."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: _State = {}
    for parameter, entries in optimizer.state.items():
        described = {key: _as_like(value) for key, value in entries.items()}
        if id(parameter) not in names or _OTHER in described.values():
            return None
        found[names[id(parameter)]] = described
    return found


def _as_like(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return _OTHER
    num_bytes = value.numel() * value.itemsize
    if value.untyped_storage().nbytes() != num_bytes:
        return _OTHER
    return _Like(tuple(value.shape), value.stride(), value.dtype, value.device)


def _made_like(value: Any) -> Any:
    if not isinstance(value, _Like):
        return value
    if not value.shape:  # a count of steps, which the next one can ask for
        return torch.ones((), dtype=value.dtype, device=value.device)
    how = {"dtype": value.dtype, "device": value.device}
    return torch.empty_strided(value.shape, value.stride, **how)


def _has_grad(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether a gradient fills a storage of its own and lies as its parameter does."""
    grad = parameter.grad
    if grad is None or grad.layout != torch.strided or grad.dtype != parameter.dtype:
        return False
    size = math.prod(grad.shape) * grad.itemsize
    like = grad.shape == parameter.shape and grad.stride() == parameter.stride()
    return like and grad.untyped_storage().nbytes() == size


def _state_of(model: nn.Module) -> Iterator[Any]:
    """What of a model a forward may change, besides the values of its tensors."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield name, key, tuple(value.shape), value.dtype
            elif isinstance(value, _PLAIN):
                yield name, key, value
            else:
                length = (
                    len(value) if isinstance(value, (dict, list, tuple, set)) else 0
                )
                yield name, key, id(value), length
        for key, buffer in module.named_buffers(recurse=False):
            yield name, key, tuple(buffer.shape), buffer.dtype
