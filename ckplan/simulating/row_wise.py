"""The ops of a row-wise call, such as an MLP, in a recorded step.

A row-wise call multiplies its input by matrices of parameters, applies elementwise ops
to the products, and multiplies the result by one more matrix. Norms of its input may
come first, and dropout of its output last: they stay as they are. ``row_tiling.py``
replaces the other ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckplan.graph.graph import Graph
from ckplan.graph.records import Op, Storage
from ckplan.plan.tiles import ELEMENTWISE
from ckplan.simulating.row_parts import PRODUCTS, parts_of, refuse_rows

_IN_BACKWARD = ELEMENTWISE | {"exp", "threshold_backward"}
_IN_BACKWARD |= {f"{name}_backward" for name in ELEMENTWISE}
_FIRST_BACK = ("mm", "sum")  # ops that backward of the last product may begin with


@dataclass(frozen=True)
class RowOps:
    """Ops of a row-wise call, by number and in order, and what they make."""

    forward: tuple[int, ...]  # the last one makes the output
    first: tuple[int, ...]  # products of the input
    inner_gradient: int  # op: the product that begins the way back
    elementwise: tuple[int, ...]  # of backward
    hidden_gradients: tuple[int, ...]  # ops: products, and sums of them
    weight_gradients: tuple[int, ...]  # ops
    interior: frozenset[int]  # storages that tiles never hold whole
    leaf_gradients: tuple[int, ...]  # storages: gradients of the first products
    hidden: int  # storage of the first products' input
    given: int  # storage of the output's gradient
    rows: int
    width: int  # of hidden values
    tensor_bytes: int  # of a hidden value
    gradient_bytes: int  # of the input's gradient

    @property
    def product(self) -> int:
        """The op that makes the output."""
        return self.forward[-1]

    @property
    def backward(self) -> tuple[int, ...]:
        """All ops of backward, in order."""
        ends = *self.hidden_gradients, *self.weight_gradients
        return tuple(sorted((self.inner_gradient, *self.elementwise, *ends)))


@dataclass
class _Way:
    """What is known while the ops between the products are followed."""

    interior: set[int] = field(default_factory=set)
    first: dict[int, int] = field(default_factory=dict)  # op -> storage that it makes
    weights: dict[int, int] = field(default_factory=dict)  # storage -> op of forward
    hidden: int = -1
    given: int = -1
    inner_gradient: int | None = None
    inner: int = -1  # storage that it makes
    elementwise: list[int] = field(default_factory=list)
    hidden_gradients: list[int] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)  # storages: of the input's gradient
    weight_gradients: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)  # storages read by products


def find_row_wise(graph: Graph, call: int) -> RowOps:
    """Find the ops of a row-wise call.

    Args:
        graph: A step.
        call: The call.

    Raises:
        PlanError: Its rows are not apart, or an op is not understood.
    """
    lead, forward, tail = parts_of(graph, call)
    way = _Way()
    known = _follow_forward(graph, call, forward, way)
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
            _follow_back(graph, call, number, way)
    if way.given < 0 or way.inner_gradient is None:
        raise refuse_rows(graph, call, "no gradient flows through it")
    _check_readers(graph, call, way, forward)
    _check_gradients(graph, call, way)
    for storage in way.interior - inside - way.parts:
        if graph.storages[storage].bytes != known.bytes:
            raise refuse_rows(graph, call, "gradients inside it differ in size")
    gradient = 0
    if way.hidden_gradients:
        last = graph.ops[way.hidden_gradients[-1]].outputs[0]
        gradient = graph.storages[last].bytes
    assert known.tensor is not None
    rows, width = known.tensor.shape
    return RowOps(
        forward,
        tuple(way.first),
        way.inner_gradient,
        tuple(way.elementwise),
        tuple(way.hidden_gradients),
        tuple(way.weight_gradients),
        frozenset(way.interior),
        tuple(way.leaves),
        way.hidden,
        way.given,
        rows,
        width,
        known.bytes,
        gradient,
    )


def _around(graph: Graph, call: int, lead: range, way: _Way) -> set[int]:
    """What ops before the first product read and make, but for what that reads."""
    ops = [graph.ops[number] for number in lead]
    made = {storage for op in ops for storage in op.outputs}
    if made and way.hidden not in made:
        raise refuse_rows(graph, call, "its first product is of something else")
    for op in ops:
        if not made.issuperset(op.writes):
            raise refuse_rows(graph, call, f"{op.name} changes its input in place")
    return (made | {s for op in ops for s in op.reads}) - {way.hidden}


def input_gradient(graph: Graph, found: RowOps) -> int | None:
    """The storage of the gradient of the input."""
    if not found.hidden_gradients:
        return None
    return graph.ops[found.hidden_gradients[-1]].outputs[0]


def _follow_forward(
    graph: Graph, call: int, forward: tuple[int, ...], way: _Way
) -> Storage:
    """Follow all of forward; returns a hidden value."""
    for number in forward[:-1]:
        _follow(graph, call, number, way)
    if not way.first or forward[-1] in way.first:
        raise refuse_rows(graph, call, "it is no product, ops, and a product")
    _follow_last(graph, call, forward[-1], way)
    known = graph.storages[next(iter(way.first.values()))]
    if known.tensor is None or len(known.tensor.shape) != 2:
        raise refuse_rows(graph, call, "the shape of its hidden values is not known")
    for storage in way.interior:
        one = graph.storages[storage]
        if one.bytes != known.bytes:
            raise refuse_rows(graph, call, "its hidden values differ in size")
        if one.last > forward[-1]:
            raise refuse_rows(graph, call, "a hidden value is held after it")
    return known


def _follow(graph: Graph, call: int, number: int, way: _Way) -> None:
    """Follow an op of forward before the last one."""
    op = graph.ops[number]
    if op.name in PRODUCTS:
        values = _factors(graph, call, number, way)
        known = {way.hidden} if way.first else values
        if values != known or values & way.interior:
            raise refuse_rows(graph, call, "it has products after products")
        (way.hidden,) = values
        way.first[number] = op.outputs[0]
    elif (
        op.name not in ELEMENTWISE or op.writes or not way.interior.issuperset(op.reads)
    ):
        raise refuse_rows(graph, call, f"it runs {op.name}")
    way.interior.update(op.outputs)


def _follow_last(graph: Graph, call: int, number: int, way: _Way) -> None:
    op = graph.ops[number]
    if op.name not in PRODUCTS:
        raise refuse_rows(graph, call, f"it ends in {op.name}")
    if not _factors(graph, call, number, way) <= way.interior - {*way.first.values()}:
        raise refuse_rows(
            graph, call, "it has no elementwise op before its last product"
        )


def _factors(graph: Graph, call: int, number: int, way: _Way) -> set[int]:
    """What a product reads beside parameters, which are noted."""
    op = graph.ops[number]
    of = [s for s in op.reads if graph.storages[s].kind == "parameter"]
    values = set(op.reads) - set(of)
    if len(values) != 1 or len(of) != PRODUCTS[op.name] - 1 or op.writes:
        raise refuse_rows(graph, call, f"{op.name} reads others than its parameters")
    if not way.weights.keys().isdisjoint(of):
        raise refuse_rows(graph, call, "it uses a parameter twice")
    way.weights.update(dict.fromkeys(of, number))
    return values


def _reads_gradient(graph: Graph, op: Op, way: _Way) -> bool:
    """Whether an op reads the whole gradient of the first products' input."""
    found = way.hidden_gradients
    if len(found) < 2 * len(way.first) - 1:  # products, and their sums
        return False
    return not {*graph.ops[found[-1]].outputs}.isdisjoint(op.reads)


def _follow_back(graph: Graph, call: int, number: int, way: _Way) -> None:
    """Follow an op of backward, in order."""
    op = graph.ops[number]
    values = [s for s in op.reads if s not in way.weights]
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


def _last_gradient(graph: Graph, call: int, number: int, way: _Way) -> None:
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


def _first_gradient(graph: Graph, call: int, number: int, way: _Way) -> None:
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
        if set(values) - {leaf, way.hidden}:
            raise refuse_rows(graph, call, "its backward reads other tensors")
    elif way.given not in (-1, leaf):
        raise refuse_rows(graph, call, "its backward reads other tensors")
    else:
        way.given = leaf
    way.weight_gradients.append(number)


def _check_gradients(graph: Graph, call: int, way: _Way) -> None:
    """Check that backward is understood, and keep the input's gradient whole."""
    products = [n for n in way.hidden_gradients if graph.ops[n].name == "mm"]
    sums = len(way.hidden_gradients) - len(products)
    if products and (len(products), sums) != (len(way.first), len(way.first) - 1):
        raise refuse_rows(graph, call, "others add to the gradient of its input")
    if len(way.leaves) != len(way.first):
        raise refuse_rows(graph, call, "gradients of its first products are not apart")
    if way.hidden_gradients:
        way.interior.discard(graph.ops[way.hidden_gradients[-1]].outputs[0])


def _check_readers(
    graph: Graph, call: int, way: _Way, forward: tuple[int, ...]
) -> None:
    """Check that others read nothing inside, and that backward is in one piece."""
    ends = {*way.weight_gradients, *way.hidden_gradients}
    known = {*forward, *way.elementwise, *ends}
    known |= set() if way.inner_gradient is None else {way.inner_gradient}
    made = {s for n in ends for s in graph.ops[n].outputs}
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
