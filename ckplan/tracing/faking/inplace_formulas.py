"""Formulas of backward that write in place in a plain run.

Torch's C++ formulas make a tensor of zeros and add to it in place. With a tensor
subclass or a dispatch mode, they add out of place instead, so that every mode can
follow. A recording under a mode therefore has one tensor too many. This module turns
such out-of-place ops on a formula's own tensors back into in-place ops. Storages,
lifetimes and workspaces are then those of a plain run.

Some formulas run entirely different ops under a mode. The formula of ``max`` over all
elements is corrected. Those of ``prod`` and ``cumprod`` depend on whether a value is
zero; under a mode they use the general formula, which is recorded. The formulas of
``masked_fill`` by a tensor and of ``linalg.eig`` depend on values, too. From torch 2.14
on, ``quantile`` and ``nanquantile`` on a CPU sort only under a mode. A plain run
selects without an op, needs less memory, and can send a gradient to another of several
equal values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node, _engine_run_backward
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ckplan.tracing.faking.backward_pass import run_node
from ckplan.tracing.faking.python_engine import frees_saved_tensors, hook_node

_aten = torch.ops.aten
_RUNNING_NODES = (_engine_run_backward.__code__, run_node.__code__)
_AROUND_MODES = (  # their wrappers that keep compilation out
    "torch._dynamo.eval_frame",
    "torch._compile",
    "ckplan.applying.tensors.compiled",
)


class _Formula(NamedTuple):
    """Ops that a node runs in place."""

    makes: frozenset[str]  # ops that make its private tensors
    writes: frozenset[str]  # ops that write to those tensors in place


def _formula(makes: str, writes: str) -> _Formula:
    return _Formula(frozenset(makes.split()), frozenset(writes.split()))


_SELECTING = _formula("new_zeros zeros", "scatter")
_CUMULATIVE = _formula("new_zeros zeros", "scatter_add")
_SHARING = _formula("where", "masked_fill")
_CLAMP_SHARES = torch.__version__ >= (2, 14)  # gradient with an equal bound
FORMULAS: Mapping[str, _Formula] = {
    "AminmaxBackward0": _formula("mul", "add"),
    "Atan2Backward0": _formula("reciprocal", "masked_fill"),
    "BinaryCrossEntropyBackward0": _formula("neg mul", "mul"),
    # Not ``neg``: its product with the gradient is a new tensor.
    "BinaryCrossEntropyWithLogitsBackward0": _formula(
        "add sigmoid log_sigmoid_forward sub mul", "sub mul"
    ),
    "ClampBackward0": (
        _SHARING if _CLAMP_SHARES else _formula("ge gt lt", "logical_and logical_or")
    ),
    "ClampMaxBackward1": _SHARING,
    "ClampMinBackward1": _SHARING,
    "CummaxBackward0": _CUMULATIVE,
    "CumminBackward0": _CUMULATIVE,
    "GatherBackward0": _formula("new_zeros", "scatter_add"),
    "IndexBackward0": _formula("new_zeros zeros_like", "index_put"),
    "IndexSelectBackward0": _formula("new_zeros", "index_add"),
    "KthvalueBackward0": _SELECTING,
    "MaskedSelectBackward0": _formula("zeros_like", "masked_scatter"),
    "MaxBackward0": _SELECTING,
    "MaximumBackward0": _SHARING,
    "MedianBackward1": _SELECTING,
    "MinBackward0": _SELECTING,
    "MinimumBackward0": _SHARING,
    "ModeBackward0": _SELECTING,
    "NanmedianBackward1": _SELECTING,
    "SortBackward0": _SELECTING,
    "SortBackward1": _SELECTING,
    "TakeBackward0": _formula("zeros_like", "put"),
    "TopkBackward0": _SELECTING,
    "TraceBackward0": _formula("zeros", "index_fill"),
}
"""Node name -> formula; found by comparing all ops of torch's own tests."""

EVENLY_DIVIDING_NODES = frozenset(
    ("MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0")
)
"""Nodes that divide a gradient among all elements equal to the result."""

RESERVE_COPYING_NODES = frozenset(("CudnnBatchNormBackward0", "CudnnRnnBackward0"))
"""Nodes that copy cuDNN's reserve if the engine retains the graph."""

_ENDING = _formula("", "clone")
_DIVIDED = _formula("", "isnan logical_and mul")  # on CPU: ops to correct
_DIVIDED_ON_CUDA = _formula("isnan", "logical_and")


class InplaceFormulas:
    """Follows the nodes of a backward and corrects each op that a mode sees.

    Args:
        on_cuda: Whether the step runs, or is planned for, a GPU.
    """

    def __init__(self, *, on_cuda: bool = False) -> None:
        divided = _DIVIDED_ON_CUDA if on_cuda else _DIVIDED
        self._formulas = {
            **FORMULAS,
            **dict.fromkeys(EVENLY_DIVIDING_NODES, divided),
            **dict.fromkeys(RESERVE_COPYING_NODES, _ENDING),
        }
        self._formula: _Formula | None = None
        self._made = WeakIdKeyDictionary()  # tensor of this node -> name of its op

    @property
    def runs(self) -> bool:
        """Whether a node with a formula to correct runs."""
        return self._formula is not None

    def watch(self, node: Node) -> None:
        """Hook a node if it has a formula to correct."""
        formula = self._formulas.get(node.name())
        if formula is None:
            return

        def begins(grads: object) -> None:
            del grads
            self._formula = formula

        def ends(grad_inputs: object, grad_outputs: object) -> None:
            del grad_inputs, grad_outputs
            self._formula = None
            self._made.clear()

        hook_node(node, begins, ends)

    def engine_op(
        self, func: Any, args: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The op and arguments that a plain run has instead of the given op."""
        formula = self._formula
        if formula is None or _name(func) not in formula.writes:
            return func, args
        if formula is _ENDING:
            goes = frees_saved_tensors() and args[0].dtype == torch.uint8
            return (_aten.alias.default, args) if goes else (func, args)
        if torch.is_grad_enabled() or not _is_asked_by_engine():
            return func, args
        if formula is _DIVIDED:
            return self._divided(func, args)
        mine = self._made.get(args[0]) in formula.makes
        return _in_place(func, args) if mine else (func, args)

    def _divided(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Replace ops by zeros that are filled at a mask, as in a plain run."""
        zeros = [x for x, maker in self._made.items() if maker == "new_zeros"]
        match _name(func):
            case "isnan" if args[0].dim():
                return _aten.new_zeros.default, (args[0], args[0].shape)
            case "logical_and" if zeros:
                return func, (args[1], args[1])
            case "mul" if zeros:
                return _aten.masked_fill_.Tensor, (*zeros, *args)
        return func, args

    def track_output(self, func: Any, out: Any) -> None:
        """Remember the outputs of the running formula's ops."""
        if self._formula is not None and _is_asked_by_engine():
            for tensor in pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._made[tensor] = _name(func).rstrip("_")


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _in_place(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    if func is _aten.index_put.default:
        accumulate = args[3] if len(args) > 3 else False
        return _aten._index_put_impl_.default, (*args[:3], accumulate, True)
    packet = getattr(_aten, f"{_name(func)}_")
    return getattr(packet, func._overloadname), args


def _is_asked_by_engine() -> bool:
    """Whether a formula runs an op itself, with no Python frame in between.

    Ops that rebuild saved tensors, by a plan or otherwise, have such a frame.
    """
    frame = sys._getframe(2).f_back  # the caller is a dispatch mode
    while frame is not None and frame.f_globals.get("__name__") in _AROUND_MODES:
        frame = frame.f_back
    return frame is None or frame.f_code in _RUNNING_NODES
