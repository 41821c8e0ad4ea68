"""The ops of a row-wise call, such as an MLP, in a recorded step.

A row-wise call multiplies its input by matrices of parameters, applies elementwise ops
to the products, and multiplies the result by one more matrix; or all of these products
are 1x1 convolutions, and rows are the samples of the batch. Norms of its input may
come first, and dropout of its output last: they stay as they are. ``row_tiling.py``
replaces the other ops.
"""

from __future__ import annotations

from ckplan.graph.attentions import has_attention
from ckplan.graph.graph import Graph
from ckplan.graph.records import Op, Storage
from ckplan.plan.tiles import ELEMENTWISE
from ckplan.simulating.attention_ops import find_attention
from ckplan.simulating.norm_ops import find_norm, is_norm
from ckplan.simulating.row_backward import Way, check_gradients, follow_back
from ckplan.simulating.row_ops import RowOps
from ckplan.simulating.row_parts import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    PRODUCTS,
    Numbers,
    is_pointwise,
    is_weight,
    parts_of,
    refuse_rows,
)

# Ops that backward of the last product may begin with.
_FIRST_BACK = ("mm", "sum", CONVOLUTION_BACKWARD)


def find_row_wise(graph: Graph, call: int) -> RowOps:
    """Find the ops of a row-wise call, or of an attention or norm in ops of its own.

    Args:
        graph: A step.
        call: The call.

    Raises:
        PlanError: Its rows are not apart, or an op is not understood.
    """
    if has_attention(graph, call):
        return find_attention(graph, call)
    if is_norm(graph, call):
        return find_norm(graph, call)
    return _find_products(graph, call)


def _find_products(graph: Graph, call: int) -> RowOps:
    """Find the ops of products with elementwise ops between."""
    lead, forward, tail = parts_of(graph, call)
    way = Way()
    known = _follow_forward(graph, call, forward, way)
    forward = tuple(n for n in forward if n not in way.copies.values())
    inside = set(way.interior)
    before = _around(graph, call, lead, way)
    masks = {s for number in tail for s in graph.ops[number].outputs}
    for number in range(graph.num_forward, graph.backward_stop):
        op = graph.ops[number]
        if op.call < 0 or not graph.is_within(op.call, call):
            continue  # of another call
        if not before.isdisjoint(op.reads) or _reads_gradient(graph, op, way):
            before.update(op.outputs)  # of a norm
        elif masks.isdisjoint(op.reads) and (way.given >= 0 or op.name in _FIRST_BACK):
            follow_back(graph, call, number, way)
    if way.given < 0 or way.inner_gradient is None:
        raise refuse_rows(graph, call, "no gradient flows through it")
    _check_readers(graph, call, way, forward)
    check_gradients(graph, call, way)
    for storage in way.interior - inside - way.parts:
        if graph.storages[storage].bytes != known.bytes:
            raise refuse_rows(graph, call, "gradients inside it differ in size")
    gradient = 0
    if way.hidden_gradients and not way.copies:
        last = graph.ops[way.hidden_gradients[-1]].outputs[0]
        gradient = graph.storages[last].bytes
    assert known.tensor is not None
    rows, width, *spatial = known.tensor.shape
    return RowOps(
        forward,
        tuple(way.first),
        way.inner_gradient,
        way.inner,
        tuple(way.elementwise),
        tuple(way.hidden_gradients),
        tuple(way.weight_gradients),
        frozenset(way.interior),
        tuple(way.leaves),
        way.hidden,
        way.given,
        rows,
        width,
        tuple(spatial),
        known.bytes,
        gradient,
        weights=frozenset(way.weights),
        copies=frozenset(way.copies),
    )


def _is_own_weight(graph: Graph, call: int, storage: int) -> bool:
    """Whether it is a parameter, or a copy of one that autocast makes in the call."""
    maker = graph.casts.get(storage)
    inside = maker is None or graph.is_within(graph.ops[maker].call, call)
    return is_weight(graph, storage) and inside


def _around(graph: Graph, call: int, lead: Numbers, way: Way) -> set[int]:
    """What ops before the first product read and make, but for what that reads."""
    ops = [graph.ops[number] for number in lead]
    made = {storage for op in ops for storage in op.outputs}
    if made and way.hidden not in made:
        raise refuse_rows(graph, call, "its first product is of something else")
    for op in ops:
        if not made.issuperset(op.writes):
            raise refuse_rows(graph, call, f"{op.name} changes its input in place")
    return (made | {s for op in ops for s in op.reads}) - {way.hidden}


def _follow_forward(
    graph: Graph, call: int, forward: tuple[int, ...], way: Way
) -> Storage:
    """Follow all of forward; returns a hidden value."""
    for number in forward[:-1]:
        _follow(graph, call, number, way)
    if not way.first or forward[-1] in way.first:
        raise refuse_rows(graph, call, "it is no product, ops, and a product")
    if way.copies and len(way.copies) != len(way.first) - 1:
        why = "some of its first products share a copy of its input"
        raise refuse_rows(graph, call, why)
    _follow_last(graph, call, forward[-1], way)
    known = graph.storages[next(iter(way.first.values()))]
    if known.tensor is None or len(known.tensor.shape) < 2:
        raise refuse_rows(graph, call, "the shape of its hidden values is not known")
    for storage in way.interior:
        one = graph.storages[storage]
        if one.bytes != known.bytes:
            raise refuse_rows(graph, call, "its hidden values differ in size")
        if one.last > forward[-1]:
            raise refuse_rows(graph, call, "a hidden value is held after it")
    return known


def _follow(graph: Graph, call: int, number: int, way: Way) -> None:
    """Follow an op of forward before the last one."""
    op = graph.ops[number]
    if op.name == CONVOLUTION and not is_pointwise(graph, number):
        raise refuse_rows(graph, call, "a convolution in it is not 1x1, or has groups")
    if op.name in PRODUCTS:
        values = _factors(graph, call, number, way)
        inputs = [way.hidden, *way.copies]  # one for each product, or one for all
        known = {*inputs[len(way.first) :][:1]} if way.copies else {way.hidden}
        if (values != known and way.first) or values & way.interior:
            raise refuse_rows(graph, call, "it has products after products")
        if not way.first:
            (way.hidden,) = values
        way.first[number] = op.outputs[0]
    elif op.name == "_to_copy" and _is_copy_of_input(graph, op, way):
        way.copies[op.outputs[0]] = number
        return
    elif (
        op.name not in ELEMENTWISE or op.writes or not way.interior.issuperset(op.reads)
    ):
        raise refuse_rows(graph, call, f"it runs {op.name}")
    way.interior.update(op.outputs)


def _is_copy_of_input(graph: Graph, op: Op, way: Way) -> bool:
    """Whether an op casts what the first product's input is a cast of."""
    if way.hidden < 0 or not way.interior.isdisjoint(op.reads):
        return False
    maker = graph.storages[way.hidden].maker
    return maker >= 0 and (graph.ops[maker].name, graph.ops[maker].reads) == (
        op.name,
        op.reads,
    )


def _follow_last(graph: Graph, call: int, number: int, way: Way) -> None:
    op = graph.ops[number]
    if op.name not in PRODUCTS:
        raise refuse_rows(graph, call, f"it ends in {op.name}")
    if not _factors(graph, call, number, way) <= way.interior - {*way.first.values()}:
        raise refuse_rows(
            graph, call, "it has no elementwise op before its last product"
        )


def _factors(graph: Graph, call: int, number: int, way: Way) -> set[int]:
    """What a product reads beside parameters, which are noted."""
    op = graph.ops[number]
    of = [s for s in op.reads if _is_own_weight(graph, call, s)]
    values = set(op.reads) - set(of)
    if len(values) != 1 or len(of) not in PRODUCTS[op.name] or op.writes:
        raise refuse_rows(graph, call, f"{op.name} reads others than its parameters")
    if not way.weights.keys().isdisjoint(of):
        raise refuse_rows(graph, call, "it uses a parameter twice")
    way.weights.update(dict.fromkeys(of, number))
    return values


def _reads_gradient(graph: Graph, op: Op, way: Way) -> bool:
    """Whether an op reads the whole gradient of the first products' input."""
    found = way.hidden_gradients
    if way.copies:
        return any(not {*graph.ops[n].outputs}.isdisjoint(op.reads) for n in found)
    if len(found) < 2 * len(way.first) - 1:  # products, and their sums
        return False
    return not {*graph.ops[found[-1]].outputs}.isdisjoint(op.reads)


def _check_readers(graph: Graph, call: int, way: Way, forward: tuple[int, ...]) -> None:
    """Check that others read nothing inside, and that backward is in one piece."""
    ends = {*way.weight_gradients, *way.hidden_gradients}
    known = {*forward, *way.elementwise, *ends}
    known |= set() if way.inner_gradient is None else {way.inner_gradient}
    made = {s for n in ends for s in graph.ops[n].outputs} - {way.inner}
    backward = [n for n in known if n >= graph.num_forward]
    begin, end = min(backward, default=0), max(backward, default=0)
    hidden = way.interior - made
    for number, op in enumerate(graph.ops):
        if number in known:
            continue
        if not hidden.isdisjoint(op.reads):
            raise refuse_rows(graph, call, f"{op.name} reads a hidden value")
        if begin < number < end:
            _check_between(graph, call, op, made, number - begin)


def _check_between(
    graph: Graph, call: int, op: Op, made: set[int], distance: int
) -> None:
    """Check that an op amid backward only takes gradients that are made."""
    if distance < 2 or made.isdisjoint(op.reads):
        raise refuse_rows(graph, call, f"{op.name} runs amid its backward")
