"""One backward pass: the order of nodes, their gradients and their results.

The pass follows torch's engine (``engine.cpp``, ``input_buffer.cpp``,
``accumulate_grad.h``). The latest node of forward runs first. Gradients of one tensor
are summed out of place, as under any dispatch mode. References are held as long as in
the engine: an unshared gradient becomes ``.grad`` of its parameter without a copy.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ckplan.tracing.faking.accumulation import accumulate

Edge: TypeAlias = tuple[Node, int]  # a node, and the index of its gradient
Hook: TypeAlias = Callable[..., Any]
_ACCUMULATES = "AccumulateGrad"
FREED_GRAPH_ERROR = (
    "Trying to backward through the graph a second time (or directly access saved "
    "tensors after they have already been freed). Saved intermediate values of the "
    "graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if "
    "you need to access saved tensors after calling backward."
)
"""The engine's error message, and the metadata key that marks freed nodes."""


class TensorHooks(NamedTuple):
    """Hooks on one output of a node's forward."""

    output: int
    hooks: dict[int, Hook]


@dataclass
class NodeHooks:
    """Hooks of one node."""

    tensor_hooks: list[TensorHooks] = field(default_factory=list)
    before: dict[int, Hook] = field(default_factory=OrderedDict)
    after: dict[int, Hook] = field(default_factory=OrderedDict)
    retained: list[torch.Tensor] = field(default_factory=list)  # keep .grad
    materializes_no_grads: bool = (
        False  # a custom function that takes None for missing gradients
    )


class BackwardPass:
    """One backward pass.

    Args:
        roots: Nodes that get gradients from the caller.
        wanted: Edges of the ``inputs`` argument of backward; empty for all leaves.
        accumulate_grad: Whether gradients are added to ``.grad`` or returned.
        hooks_of: Gives the hooks of a node.
        done: Called with each node that ran.
    """

    def __init__(
        self,
        roots: list[Node],
        wanted: list[Edge],
        accumulate_grad: bool,
        hooks_of: Callable[[Node], NodeHooks],
        done: Callable[[Node], None],
    ) -> None:
        self.captured: dict[Edge, torch.Tensor | None] = {}
        self._hooks_of, self._done = hooks_of, done
        self._waiting = _dependencies(roots)
        self._needed = _leading_to({node for node, _ in wanted}, self._waiting)
        self._captures = set() if accumulate_grad else set(wanted)
        self._grads: dict[Node, list[Any]] = {}
        self._ready: list[tuple[int, int, Node]] = []
        self._tickets = count()

    def add_gradient(self, outs: list[Any], place: int, edge: Edge) -> None:
        """Add a gradient to a node's inputs; the node is ready when it has all of them.

        A gradient that is added to another stays in ``outs``, as in the engine.
        """
        node, slot = edge
        if node not in self._needed:
            return
        slots = self._grads.setdefault(node, [None] * len(node._input_metadata))
        if slots[slot] is None:
            slots[slot], outs[place] = outs[place], None
        elif outs[place] is not None:
            slots[slot] = slots[slot] + outs[place]
        self._waiting[node] -= 1
        if not self._waiting[node]:
            turn = (-node._sequence_nr(), next(self._tickets), node)
            heapq.heappush(self._ready, turn)

    def run_all(self) -> None:
        """Run all nodes, the latest of forward first."""
        while self._ready:
            self._visit(heapq.heappop(self._ready)[-1])

    def will_run(self, node: Node) -> bool:
        """Whether the pass runs a node."""
        return node in self._needed

    def _visit(self, node: Node) -> None:
        outs = self._run(node)
        outs += [None] * (len(node.next_functions) - len(outs))
        for place, edge in enumerate(node.next_functions):
            if edge[0] is not None:
                self.add_gradient(outs, place, edge)

    def _run(self, node: Node) -> list[torch.Tensor | None]:
        grads = self._grads.pop(node)
        hooks = self._hooks_of(node)
        _call_tensor_hooks(hooks, grads)
        for tensor in hooks.retained:
            _retain(tensor, grads[tensor.output_nr])
        for slot in range(len(grads)):
            if (node, slot) in self._captures:
                self.captured[node, slot] = grads[slot]
        if self._ends_at(node):
            return []
        outs = _run_hooked(node, hooks, grads)
        self._done(node)
        return outs

    def _ends_at(self, node: Node) -> bool:
        """Whether a node's inputs are captured and no later node must run."""
        mine = any(captured is node for captured, _ in self._captures)
        nexts = (target for target, _ in node.next_functions)
        return mine and not any(target in self._needed for target in nexts)


def _dependencies(roots: list[Node]) -> defaultdict[Node, int]:
    """The number of gradients that each node below the roots receives."""
    waiting: defaultdict[Node, int] = defaultdict(int)
    for root in roots:
        waiting[root] += 1
    for node in reachable_nodes(roots):
        for target, _ in node.next_functions:
            if target is not None:
                waiting[target] += 1
    return waiting


def reachable_nodes(roots: Sequence[Node]) -> list[Node]:
    """All nodes that are reachable from the roots."""
    found = dict.fromkeys(roots)
    stack = list(found)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                stack.append(node)
    return list(found)


def _leading_to(wanted: set[Node], nodes: defaultdict[Node, int]) -> set[Node]:
    """Nodes that must run: those on paths to the wanted nodes; all if none is given."""
    if not wanted:
        return set(nodes)
    above: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in list(nodes):
        for target, _ in node.next_functions:
            if target is not None:
                above[target].append(node)
    found, stack = set(wanted), list(wanted)
    while stack:
        for node in above[stack.pop()]:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node accumulates."""
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    return leaf if node.name().endswith(_ACCUMULATES) else None


def _call_tensor_hooks(hooks: NodeHooks, grads: list[torch.Tensor | None]) -> None:
    for output, mine in hooks.tensor_hooks:
        for hook in list(mine.values()):
            found = hook(grads[output])
            if found is not None:
                _check_alike(hook, grads[output], found)
                grads[output] = found


def _check_alike(hook: Hook, grad: Any, found: Any) -> None:
    name = getattr(hook, "__name__", type(hook).__name__)
    if not isinstance(found, torch.Tensor):
        got = type(found).__name__
        raise TypeError(f"expected Variable, but hook returned '{got}'")
    if grad is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if grad.dtype != found.dtype:
        was, got = grad.type(), found.type()
        raise RuntimeError(
            f"hook '{name}' has changed the type of value (was {was} got {got})"
        )
    if grad.shape != found.shape:
        raise RuntimeError(f"hook '{name}' has changed the size of value")


def _retain(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Add a gradient to ``.grad`` of a non-leaf tensor, always as a copy."""
    if grad is None:
        return
    if tensor.grad is not None:
        tensor.grad = tensor.grad + grad
    elif grad.is_sparse:
        tensor.grad = grad.clone()
    else:
        tensor.grad = grad.clone(memory_format=torch.contiguous_format)


def _run_hooked(
    node: Node, hooks: NodeHooks, grads: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    for hook in list(hooks.before.values()):
        found = hook(tuple(grads))
        if found is not None:
            grads[:] = found if isinstance(found, tuple) else (found,)
    outs = _fitting(node, _run(node, grads, hooks.materializes_no_grads))
    for hook in list(hooks.after.values()):
        found = hook(tuple(outs), tuple(grads))
        if found is not None:
            outs = list(found) if isinstance(found, tuple) else [found]
    return outs


def _run(
    node: Node, grads: list[torch.Tensor | None], materializes_no_grads: bool
) -> list[torch.Tensor | None]:
    if node.name().endswith(_ACCUMULATES):
        if grads[0] is not None:
            accumulate(node, grads)
        return []
    if isinstance(node, BackwardCFunction):
        return _run_custom(
            node, grads if materializes_no_grads else _materialized(node, grads)
        )
    if FREED_GRAPH_ERROR in node.metadata and _has_saved(node):
        raise RuntimeError(FREED_GRAPH_ERROR)
    outs = run_node(node, grads)
    return list(outs) if isinstance(outs, tuple) else [outs]


def _has_saved(node: Any) -> bool:
    """Whether a node of torch has saved tensors."""
    raw = "_raw"  # prefix of the second attribute of each saved tensor
    names = [name.removeprefix(raw) for name in dir(node) if name.startswith(raw)]
    return any(getattr(node, name) is not None for name in names)


def run_node(node: Any, grads: list[torch.Tensor | None]) -> Any:
    """Run a formula of torch; all ops below this frame belong to it."""
    return node(*grads)


def _materialized(
    node: Node, grads: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Replace missing gradients by zeros."""
    return [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        if grad is None
        else grad
        for grad, meta in zip(grads, node._input_metadata, strict=True)
    ]


def _run_custom(
    node: Any, grads: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Run ``backward`` of a custom function; return gradients of its tensors."""
    outs = node.apply(*grads)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    _check_number(node, outs)
    # There is one output per argument. Edges exist for tensors only, and have a target
    # only for tensors that need a gradient.
    wants = zip(outs, node.needs_input_grad, strict=False)
    wanted = [out for out, wants_it in wants if wants_it]
    return [wanted.pop(0) if target else None for target, _ in node.next_functions]


def _check_number(node: Any, outs: list[Any]) -> None:
    expected = len(node.needs_input_grad)
    if len(outs) < expected or any(out is not None for out in outs[expected:]):
        raise RuntimeError(
            f"function {node.name()} returned an incorrect number of gradients "
            f"(expected {expected}, got {len(outs)})"
        )
    for out in outs:
        if not (out is None or isinstance(out, torch.Tensor)):
            got = type(out).__name__
            raise RuntimeError(f"expected Variable or None (got {got})")


def _fitting(node: Node, outs: list[Any]) -> list[Any]:
    """Convert gradients to the shape, dtype and device of their tensors."""
    for place, (target, slot) in enumerate(node.next_functions[: len(outs)]):
        if outs[place] is None or target is None:
            continue
        meta = target._input_metadata[slot]
        # Do not name a gradient: it would stay alive while the next one is cast.
        if meta.is_nested_tensor:
            continue  # it has no shape
        if outs[place].shape != torch.Size(meta.shape):
            outs[place] = outs[place].sum_to_size(meta.shape)
        if outs[place].dtype != meta.dtype:
            outs[place] = outs[place].to(meta.dtype)
        if outs[place].device != meta.device and not outs[place].dim():
            outs[place] = outs[place].to(meta.device)
    return outs
