"""The raw record of a step: ops, storages, saved tensors and calls, in order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ckplan.applying.tensors.backwards import NOT_KEPT
from ckplan.applying.tensors.op_traits import OpTraits
from ckplan.tracing.recording.flattening import is_leaf

STILL_ALIVE = -2
_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided)
"""Ops that allocate bytes and move none."""
_FLOPS = {
    **flop_registry,  # which lacks attention on CPUs
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, stride in elements and dtype: a kernel's cost depends on these."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of all elements, counting repeated ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", self.numel * self.dtype.itemsize)

    @property
    def numel(self) -> int:
        """Number of elements, counting repeated ones."""
        return math.prod(self.shape)


@dataclass(slots=True)
class RawOp:
    """An op as it ran, with the arguments needed to rerun it alone."""

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
    accumulates: bool  # autograd's sum of two gradients, between two nodes
    in_grad_mode: bool  # some kernels depend on it
    line: str = ""  # of the model's source; "" if not known
    is_inside: bool = False  # of a function of torch that returns none of its outputs

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with tensors as ``TensorMeta``."""
        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = pytree.tree_unflatten(self.args, self.spec)
        return found


@dataclass(slots=True)
class RawStorage:
    """A storage, the op that made it and the last op before it was freed."""

    bytes: int
    kind: str
    maker: int
    last: int = STILL_ALIVE
    dense: bool = True  # its first tensor had no gaps or overlaps
    tensor: TensorMeta | None = None  # its first tensor, where it is told


@dataclass(slots=True)
class RawUse:
    """A backward, or several that do not keep the graph, takes a saved tensor."""

    wanted: int  # ops before it was first unpacked
    used: int = -1  # last op before its unpacked tensor was freed
    kept: int = NOT_KEPT  # number of the backward, if it keeps the graph


@dataclass(slots=True)
class RawSaved:
    """A tensor that went through the saved-tensor hooks."""

    storage: int
    call: int
    at: int  # ops before it was saved
    done: int = -1  # last op before autograd freed it
    uses: list[RawUse] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """Ops before it was first unpacked; -1: never."""
        return self.uses[0].wanted if self.uses else -1

    @property
    def used(self) -> int:
        """Last op before its unpacked tensor was freed; -1: it was never unpacked."""
        return max((use.used for use in self.uses), default=-1)


@dataclass(slots=True)
class RawCall:
    """A module call; ``stop`` is -1 until it ends."""

    fqn: str
    number: int
    parent: int
    start: int
    module: str
    given: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    stop: int = -1
    functions: int | None = None  # of torch, that its forward calls itself


@dataclass
class Recording:
    """The record of one step."""

    ops: list[RawOp] = field(default_factory=list)
    storages: list[RawStorage] = field(default_factory=list)
    saved: list[RawSaved] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    changes: list[tuple[int, str, str]] = field(default_factory=list)
    """(call, kind of hazard, reason) for changes of state outside tensors."""
    run_again: dict[str, bool] = field(default_factory=dict)
    """Module that the model itself recomputes in backward -> whether a switch of
    transformers (``gradient_checkpointing``) causes it."""
    on_host: list[int] = field(default_factory=list)
    """Storages in CPU memory, whatever the step's device."""
    num_known: int = 0  # storages that were registered before the step
    num_forward: int = 0
    num_backward: int = 0


def meta(leaf: object) -> object:
    """The description of a tensor, None for a storage, other leaves unchanged."""
    if isinstance(leaf, torch.Tensor):
        return describe(leaf)
    return None if isinstance(leaf, torch.UntypedStorage) else leaf


_described: dict[Any, TensorMeta] = {}
_MOST_DESCRIBED = 1 << 14


def describe(tensor: torch.Tensor) -> TensorMeta:
    """The shape, stride and dtype of a tensor."""
    key = (tensor.shape, tensor.stride(), tensor.dtype)
    found = _described.get(key)
    if found is None:
        if len(_described) == _MOST_DESCRIBED:
            _described.clear()
        found = _described[key] = TensorMeta(tuple(key[0]), tuple(key[1]), key[2])
    return found


def moved_bytes(func: Any, tensors: Iterable[TensorMeta]) -> int:
    """Bytes that an op reads and writes, given its tensors."""
    if func.overloadpacket in _EMPTY:
        return 0
    return sum([tensor.num_bytes for tensor in tensors])


@cache
def _formula_of(func: Any) -> Any:
    return _FLOPS.get(func.overloadpacket)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of an op by torch's ``flop_counter``; 0 if it has no formula."""
    formula = _formula_of(func)
    if formula is None:
        return 0
    name = func.overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        args = _with_all_heads(args, at=1 if name.endswith("backward") else 0)
    of_shapes = getattr(formula, "__wrapped__", None)
    if of_shapes is None:
        return int(formula(*args, **kwargs, out_val=out))
    given = {name: _shape_of(value) for name, value in kwargs.items()}
    return int(of_shapes(*map(_shape_of, args), out_shape=_shape_of(out), **given))


def _shape_of(value: Any) -> Any:
    """As torch's counter gives tensors to its formulas, in less time."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(map(_shape_of, value))
    return value


def _with_all_heads(args: tuple[Any, ...], *, at: int) -> tuple[Any, ...]:
    """Shapes of keys and values as if each query head had its own.

    Kernels compute the same; not all releases of torch count grouped heads.
    """
    query, *others = args[at : at + 3]
    shapes = [(*x.shape[:1], query.shape[1], *x.shape[2:]) for x in others]
    return (*args[: at + 1], *shapes, *args[at + 3 :])


def written_by(
    traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Tensors that an op changes, according to its schema."""
    written: list[torch.Tensor] = []
    for position, name in traits.writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        leaves = [value] if is_leaf(value) else pytree.tree_leaves(value)
        written += [x for x in leaves if isinstance(x, torch.Tensor)]
    return written
