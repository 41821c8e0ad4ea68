"""Facts about the nodes of a joint graph: values, views, modules, draws, costs."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ckplan.compiling.torch_names import (
    FORWARD_OF_BACKWARD,
    ROLE,
    WRITTEN,
    OpOverload,
)
from ckplan.errors import ApplyError
from ckplan.training.randomness import may_draw

Modules = tuple[tuple[str, str], ...]
"""(FQN, type name) of the modules around a node, the outermost first."""

_LOCAL = re.compile(r"^L\['\w+'\]\.?")
# Dynamo looks up what a class finds by a __getattr__ of its own.
_LOOKED_UP = re.compile(r"__dict__\['_modules'\]\['(\w+)'\]")
_CARD, _CPU = re.compile(r"device\(type='cuda', index=\d+\)"), "device(type='cpu')"
# Of generated kernels on one core of an AMD EPYC, as the profiler of torch shows them.
_SECONDS_OF = {"tanh": 1e-9} | dict.fromkeys(
    ("exp", "erf", "log", "pow", "sigmoid", "sin", "cos"), 3e-10
)
_MOST_KNOWN = 4096  # names and ops of which facts are remembered
# Ops between two of a graph that only the same with dynamic shapes runs, and how many
# equal ones then tell where both go on.
_MOST_MORE, _AHEAD = 32, 3
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_ATTENTION = "scaled_dot_product"  # torch counts no FLOPs of that of CPUs


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares the memory of its first argument."""
    op = node.target
    if isinstance(op, OpOverload):
        if not op.is_view and op is not _UNSAFE_VIEW:
            return False  # most are
    elif op is not operator.getitem:
        return False
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False  # the conjugate of a number, say
    return op is not operator.getitem or is_view(node.args[0])


def copied(
    node: fx.Node, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Copy a node to the end of another graph, or where that inserts.

    As ``Graph.node_copy`` does, which looks for symbolic sizes in all arguments. That
    takes longer than all else.

    Args:
        node: The node.
        graph: The other graph.
        copies: There, what the node is made of.
    """
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    made.args = fx.map_arg(node.args, copies.__getitem__)
    if node.kwargs:
        made.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
    made.meta = copy(node.meta)
    return made


def base_of(node: fx.Node) -> fx.Node:
    """The node that made the memory of a node's value."""
    while is_view(node):
        made = node.args[0]
        assert isinstance(made, fx.Node)
        node = made
    return node


def num_bytes(node: fx.Node) -> int:
    """Bytes of the tensors of a node's value."""
    value = node.meta.get("val")
    # Looking for leaves takes longer than all else, and this is asked often.
    leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


def name_of_op(node: fx.Node) -> str:
    """The aten name, such as ``addmm``."""
    return _name_of(node.target)


@lru_cache(_MOST_KNOWN)
def _name_of(op: object) -> str:
    if isinstance(op, OpOverload):
        return op.overloadpacket.__name__
    return getattr(op, "__name__", str(op))


def is_alone(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own: a contraction, or attention."""
    return _is_contraction(node.target)


@lru_cache(_MOST_KNOWN)
def _is_contraction(op: object) -> bool:
    packet = getattr(op, "overloadpacket", None)
    return packet in flop_registry or _ATTENTION in _name_of(op)


def is_draw(node: fx.Node) -> bool:
    """Whether running the node again gives other random numbers.

    Inductor's own random numbers follow from seeds, and only drawing the seeds counts.
    """
    return draws(node.target)


def draws(op: object) -> bool:
    """Whether an op takes random numbers from a generator."""
    return isinstance(op, OpOverload) and may_draw(op)


def changed_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """The inputs that forward writes to, such as buffers of spectral norms."""
    written = (
        base_of(node.all_input_nodes[0])
        for node in ops_of(graph)
        if name_of_op(node).endswith("_") and node.all_input_nodes  # in place
    )
    inputs = frozenset(node for node in written if node.op == "placeholder")
    return inputs.union(_written_after(graph))


def _written_after(graph: fx.Graph) -> Iterator[fx.Node]:
    """The inputs that are written when forward has ended, as they require gradients.

    The graph returns what they are to be filled with.
    """
    (output,) = graph.find_nodes(op="output")
    inputs = {one.meta.get(ROLE): one for one in graph.find_nodes(op="placeholder")}
    filled = (getattr(role, WRITTEN, None) for role in output.meta.get(ROLE, ()))
    return (inputs[one] for one in filled if one is not None and one in inputs)


def is_read(node: fx.Node, user: fx.Node) -> bool:
    """Whether a user reads a node's value, rather than only writing over it."""
    return name_of_op(user) != "copy_" or node in user.args[1:]


def modules_around(node: fx.Node) -> Modules:
    """The modules whose code runs the node, or ran its forward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get(FORWARD_OF_BACKWARD) or {}
    found = (
        (_path(path), kind if isinstance(kind, str) else kind.__name__)
        for path, kind in stack.values()
    )
    return tuple((path, kind.rpartition(".")[2]) for path, kind in found if path)


@lru_cache(_MOST_KNOWN)
def _path(of_dynamo: str) -> str:
    """The FQN of a module, from how Dynamo reaches it."""
    return _LOOKED_UP.sub(r"\1", _LOCAL.sub("", of_dynamo))


def line_of(node: fx.Node) -> str:
    """The line of the user's code that a node comes from; empty if it is not known."""
    lines = (node.stack_trace or "").splitlines()
    code = [line.strip() for line in lines if line.strip(" ^~")]
    return code[-1] if code else ""


def ops_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that call an op, in order."""
    return (node for node in graph.nodes if node.op == "call_function")


def returned(graph: fx.Graph) -> Sequence[object]:
    """What a graph returns: nodes and other values."""
    (node,) = graph.find_nodes(op="output")
    found: Sequence[object] = node.args[0]
    return found


def outputs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph returns."""
    return [one for one in returned(graph) if isinstance(one, fx.Node)]


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a contraction; 0 for every other node."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    count = flop_registry[packet]
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def numel(node: fx.Node) -> int:
    """Numbers of the tensor that a node's value is; 0 of others."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def arithmetic_seconds(node: fx.Node) -> float:
    """Seconds of a node of a generated kernel on one CPU core.

    Besides moving bytes, and drawing numbers.
    """
    return numel(node) * _SECONDS_OF.get(name_of_op(node), 0.0)


def num_drawn(node: fx.Node) -> int:
    """Random numbers that Inductor draws in a node of a generated kernel."""
    return numel(node) if name_of_op(node).startswith("inductor_rand") else 0


def renamed(
    names: Collection[str], sized: fx.Graph, dynamic: fx.Graph
) -> frozenset[str]:
    """Names in a graph with dynamic shapes of nodes of the same with numbers as sizes.

    Where sizes are computed there may be more ops: the gradient of a mean over such a
    size divides by a tensor.

    Raises:
        ApplyError: They do not run the same ops.
    """
    ours, theirs = ([*filter(is_tensor, ops_of(g))] for g in (sized, dynamic))
    places = _places([one.target for one in ours], [one.target for one in theirs])
    if places is None:
        raise ApplyError(
            "cannot plan a graph with dynamic shapes: with its largest sizes it runs "
            "other ops",
            needed="a model whose ops do not depend on the sizes of its batch",
            hint="dynamic=False, and batches of few different shapes",
        )
    others = {
        one.name: theirs[place].name for one, place in zip(ours, places, strict=True)
    }
    return frozenset(others[name] for name in names)


def _places(ours: Sequence[object], theirs: Sequence[object]) -> list[int] | None:
    """Where the ops of a graph are in another one that may run more between them.

    Returns:
        A place for each, in order; None if some are not there.
    """
    found: list[int] = []
    place = 0
    for number, op in enumerate(ours):
        if theirs[place : place + 1] != [op]:  # more ops: find those that follow
            ahead = ours[number : number + _AHEAD]
            later = range(place + 1, place + 1 + _MOST_MORE)
            same = (n for n in later if theirs[n : n + len(ahead)] == ahead)
            if (next_place := next(same, None)) is None:
                return None
            place = next_place
        found.append(place)
        place += 1
    return found


def digest(graph: fx.Graph) -> str:
    """16 hexadecimal digits, equal for equal joint graphs: ops, arguments, shapes.

    The order of inputs does not count: it depends on how the model is called. Nor do
    those without a gradient: sizes may be some. A card is named as the CPU, on which
    such a graph is traced where there is no card.
    """
    names: dict[fx.Node, str] = {}
    parts = []
    for node in graph.nodes:
        given = fx.map_arg((node.args, node.kwargs), lambda one: _as_seen(one, names))
        if node.op == "output":
            parts += sorted(map(str, filter(None, pytree.tree_leaves(given))))
        elif node.op != "placeholder":
            parts.append(f"{_as_seen(node, names)}={node.target}{given}:{_made(node)}")
    text = _CARD.sub(_CPU, "\n".join(parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_seen(node: fx.Node, names: dict[fx.Node, str]) -> str:
    """A number for a node, in the order in which ops name them, and an input's type."""
    if node not in names:
        is_input = node.op == "placeholder"
        names[node] = f"%{len(names)}" + (f" {_made(node)}" if is_input else "")
    return names[node]


def _made(node: fx.Node) -> str:
    made = pytree.tree_map_only(torch.Tensor, _describe, node.meta.get("val"))
    return str(made)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"
