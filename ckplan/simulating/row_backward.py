"""Backward of a row-wise call in a recorded step: which op is what."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckplan.graph.graph import Graph
from ckplan.graph.records import Op
from ckplan.plan.tiles import ELEMENTWISE
from ckplan.simulating.row_parts import CONVOLUTION_BACKWARD, is_weight, refuse_rows

_IN_BACKWARD = ELEMENTWISE | {"exp", "threshold_backward"}
_IN_BACKWARD |= {f"{name}_backward" for name in ELEMENTWISE}


@dataclass
class Way:
    """What is known while the ops between the products are followed."""

    interior: set[int] = field(default_factory=set)
    first: dict[int, int] = field(default_factory=dict)  # op -> storage that it makes
    weights: dict[int, int] = field(default_factory=dict)  # storage -> op of forward
    hidden: int = -1
    copies: dict[int, int] = field(default_factory=dict)  # of it by autocast -> op
    given: int = -1
    inner_gradient: int | None = None
    inner: int = -1  # storage that it makes
    elementwise: list[int] = field(default_factory=list)
    hidden_gradients: list[int] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)  # storages: of the input's gradient
    weight_gradients: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)  # storages read by products


def follow_back(graph: Graph, call: int, number: int, way: Way) -> None:
    """Follow an op of backward, in order."""
    op = graph.ops[number]
    values = [s for s in op.reads if s not in way.weights]
    if op.name == CONVOLUTION_BACKWARD:
        _convolution_back(graph, call, number, way)
        return
    if op.name == "_to_copy" and (way.interior - way.parts).isdisjoint(op.reads):
        return  # casts the gradient of a weight, or the input's
    if op.name == "add" and way.parts.issuperset(op.reads):
        way.hidden_gradients.append(number)
        way.parts.update(op.outputs)
    elif op.name in ("mm", "sum") and way.interior.isdisjoint(values):
        _last_gradient(graph, call, number, way)
        return
    elif op.name in ("mm", "sum") and not op.writes:
        _first_gradient(graph, call, number, way)
        return
    elif op.name in _IN_BACKWARD and way.interior.issuperset(op.reads):
        if way.inner in op.writes:
            raise refuse_rows(graph, call, f"{op.name} changes a gradient in place")
        way.elementwise.append(number)
    elif op.name in ("add", "add_") and way.interior.isdisjoint(
        {*op.reads} - way.parts
    ):
        return  # sums with gradients from elsewhere
    else:
        raise refuse_rows(graph, call, f"its backward runs {op.name}")
    way.interior.update(graph.creates[number])


def _last_gradient(graph: Graph, call: int, number: int, way: Way) -> None:
    """Gradients that the last product's backward makes of the given one."""
    op = graph.ops[number]
    given = [s for s in op.reads if s not in way.weights]
    if len(given) != 1 or way.given not in (-1, given[0]):
        raise refuse_rows(graph, call, "its backward reads other tensors")
    way.given = given[0]
    if op.name == "sum":
        way.weight_gradients.append(number)
    elif way.inner_gradient is None:
        way.inner_gradient, way.inner = number, op.outputs[0]
        way.interior.update(op.outputs)
    else:
        raise refuse_rows(graph, call, "its backward has a product too many")


def _first_gradient(graph: Graph, call: int, number: int, way: Way) -> None:
    """Gradients of weights, or of the input."""
    op = graph.ops[number]
    of_weight = [way.weights[s] for s in op.reads if s in way.weights]
    values = [s for s in op.reads if s not in way.weights]
    leaf = next((s for s in values if graph.storages[s].maker >= graph.num_forward), -1)
    if leaf in way.interior:
        if leaf not in way.leaves:
            way.leaves.append(leaf)
        if of_weight:
            if of_weight[0] not in way.first:
                raise refuse_rows(graph, call, "its backward has a product too many")
            way.hidden_gradients.append(number)
            way.parts.update(op.outputs)
            way.interior.update(op.outputs)
            return
        if set(values) - {leaf, way.hidden, *way.copies}:
            raise refuse_rows(graph, call, "its backward reads other tensors")
    elif way.given not in (-1, leaf):
        raise refuse_rows(graph, call, "its backward reads other tensors")
    else:
        way.given = leaf
    way.weight_gradients.append(number)


def _convolution_back(graph: Graph, call: int, number: int, way: Way) -> None:
    """Gradients of what a convolution reads, of its weight and its bias, in one op."""
    op = graph.ops[number]
    of = {way.weights[s] for s in op.reads if s in way.weights}
    values = {s for s in op.reads if s not in way.weights}
    inside = values & way.interior
    if len(of) != 1 or len(values - inside) != 1 or len(inside) != 1:
        raise refuse_rows(graph, call, "its backward reads other tensors")
    (product,), (leaf,), (other,) = of, inside, values - inside
    made = [s for s in op.outputs if _is_of_input(graph, op, s)]
    if product in way.first:
        if other != way.hidden or leaf in way.leaves:
            raise refuse_rows(graph, call, "its backward reads other tensors")
        way.leaves.append(leaf)
        way.hidden_gradients += [number] * len(made)
        way.parts.update(made)
    elif not made or way.inner_gradient is not None:
        raise refuse_rows(graph, call, "its backward has a product too many")
    else:
        way.given, way.inner_gradient, (way.inner,) = other, number, made
    way.interior.update(made)
    if len(made) < len(op.outputs):
        way.weight_gradients.append(number)


def _is_of_input(graph: Graph, op: Op, storage: int) -> bool:
    """Whether an output of a convolution's backward is the gradient of its input."""
    made = graph.storages[storage].tensor
    weights = [graph.storages[s].tensor for s in op.reads if is_weight(graph, s)]
    return made is not None and len(made.shape) > 2 and made not in weights


def check_gradients(graph: Graph, call: int, way: Way) -> None:
    """Check that backward is understood, and keep the input's gradient whole."""
    products = [n for n in way.hidden_gradients if graph.ops[n].name != "add"]
    sums = len(way.hidden_gradients) - len(products)
    expected = 0 if way.copies else len(way.first) - 1
    if products and (len(products), sums) != (len(way.first), expected):
        raise refuse_rows(graph, call, "others add to the gradient of its input")
    if len(way.leaves) != len(way.first):
        raise refuse_rows(graph, call, "gradients of its first products are not apart")
    whole = way.hidden_gradients if way.copies else way.hidden_gradients[-1:]
    way.interior.difference_update(graph.ops[n].outputs[0] for n in whole)
