"""What is seen of a step: ops, storages, saved tensors and calls, as they come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

STILL_ALIVE = -2
_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided)
"""What makes bytes and moves none."""
_FLOPS = {
    **flop_registry,  # which leaves out the attention of CPUs
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """All that a kernel's cost depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements, repeated ones too."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, repeated ones too."""
        return self.numel * self.dtype.itemsize


@dataclass(slots=True)
class RawOp:
    """An op as it ran, with what is needed to run it again alone."""

    func: Any
    call: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    outputs: tuple[int, ...]
    args: tuple[Any, ...]  # flat, tensors as TensorMeta
    spec: pytree.TreeSpec
    returned: tuple[TensorMeta, ...]  # of every tensor returned
    flops: int
    moved_bytes: int
    accumulates: bool  # between two nodes of backward, into a gradient of its own
    in_grad_mode: bool  # some kernels ask

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional ones and keywords, tensors as ``TensorMeta``."""
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = pytree.tree_unflatten(self.args, self.spec)
        return found


@dataclass(slots=True)
class RawStorage:
    """A storage and when it died."""

    bytes: int
    kind: str
    maker: int
    last: int = STILL_ALIVE
    dense: bool = True  # made as a tensor without gaps or overlaps


@dataclass(slots=True)
class RawSaved:
    """A tensor that went through the saved-tensor hooks."""

    storage: int
    call: int
    at: int
    wanted: int = -1
    done: int = -1
    used: int = -1


@dataclass(slots=True)
class RawCall:
    """A module call that began and perhaps ended."""

    fqn: str
    number: int
    parent: int
    start: int
    module: str
    given: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    stop: int = -1


@dataclass
class Recording:
    """Everything seen in one step."""

    ops: list[RawOp] = field(default_factory=list)
    storages: list[RawStorage] = field(default_factory=list)
    saved: list[RawSaved] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    changes: list[tuple[int, str, str]] = field(default_factory=list)
    """(call, kind of hazard, reason) of state beside tensors."""
    run_again: dict[str, bool] = field(default_factory=dict)
    """Modules that the model itself ran again in backward; whether by a switch."""
    on_host: list[int] = field(default_factory=list)
    """Storages that are in the CPU's memory, whatever the device."""
    num_known: int = 0  # storages that were registered before the step
    num_forward: int = 0
    num_backward: int = 0


def meta(leaf: object) -> object:
    """A tensor without its content, no storage; anything else as it is."""
    if isinstance(leaf, torch.UntypedStorage):
        return None
    return describe(leaf) if isinstance(leaf, torch.Tensor) else leaf


def describe(tensor: torch.Tensor) -> TensorMeta:
    """A tensor without its content."""
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def moved_bytes(func: Any, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that an op reads and writes, if these are its tensors."""
    if func.overloadpacket in _EMPTY:
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """What torch counts for an op; 0 where it does not."""
    formula = _FLOPS.get(func.overloadpacket)
    if formula is None:
        return 0
    name = func.overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        args = _with_all_heads(args, at=1 if name.endswith("backward") else 0)
    return int(formula(*args, **kwargs, out_val=out))


def _with_all_heads(args: tuple[Any, ...], *, at: int) -> tuple[Any, ...]:
    """The shapes of keys and values if no head of the query shared its own.

    What a kernel computes is the same; not all releases of torch count grouped heads.
    """
    query, *others = args[at : at + 3]
    shapes = [(*x.shape[:1], query.shape[1], *x.shape[2:]) for x in others]
    return (*args[: at + 1], *shapes, *args[at + 3 :])


def written_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Tensors that the op's schema says it changes."""
    if not func._schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        leaves = pytree.tree_leaves(value)
        written += [x for x in leaves if isinstance(x, torch.Tensor)]
    return written
