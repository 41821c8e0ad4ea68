"""The ops of an attention that is written out, in a recorded step.

A product of queries and keys, ops that treat heads apart, a softmax, and a product with
values; all within one call. Rows are heads of samples. What comes before and after in
the call, such as projections and masks, stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckplan.graph.attentions import PRODUCT, SOFTMAX
from ckplan.graph.graph import Graph
from ckplan.graph.records import Op
from ckplan.simulating.row_ops import Drawn, RowOps
from ckplan.simulating.row_parts import refuse_rows

_SOFTMAX_BACK = "_softmax_backward_data"
_OPS = SOFTMAX | {"mul", "div", "add", "masked_fill", "_to_copy"}
_MASK, _DRAW = "empty_like", "bernoulli_"
_DROPOUT = frozenset({_MASK, _DRAW, "div_"})  # ops of its mask, on a CPU
_BACK = frozenset({_SOFTMAX_BACK, "mul", "div", "masked_fill", "_to_copy"})


@dataclass
class _Found:
    """What is known while the ops are followed."""

    forward: list[int] = field(default_factory=list)
    elementwise: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    interior: set[int] = field(default_factory=set)
    operands: set[int] = field(default_factory=set)  # storages that passes read
    ends: list[int] = field(default_factory=list)  # ops: the gradients that are made
    mask: int = -1  # storage of dropout's mask
    draw: int = -1  # op that draws it
    inner_gradient: int | None = None
    inner: int = -1
    leaf: int = -1
    given: int = -1


def find_attention(graph: Graph, call: int) -> RowOps:
    """Find the ops of a call's attention.

    Args:
        graph: A step.
        call: The call.

    Raises:
        PlanError: Heads are not apart, or an op is not understood.
    """
    found = _Found()
    _follow_forward(graph, call, found)
    for number in range(graph.num_forward, graph.backward_stop):
        _follow_back(graph, call, number, found)
    if found.inner_gradient is None or found.leaf < 0 or found.given < 0:
        raise refuse_rows(graph, call, "no gradient flows through its scores")
    _check_readers(graph, call, found)
    scores = graph.storages[graph.ops[found.forward[0]].outputs[0]]
    assert scores.tensor is not None
    rows, queries, keys = scores.tensor.shape
    drawn = None
    if found.draw >= 0:
        drawn = Drawn(found.draw, found.mask, rows, queries * keys)
    return RowOps(
        tuple(found.forward),
        (found.forward[0],),
        found.inner_gradient,
        found.inner,
        tuple(found.elementwise),
        tuple(found.ends),
        (),
        frozenset(found.interior),
        (found.leaf,),
        min(found.operands),
        found.given,
        rows,
        keys,
        (),
        scores.bytes,
        0,
        _heads(graph, found, rows),
        frozenset(found.operands),
        drawn,
        unused=tuple(found.unused),
    )


def _heads(graph: Graph, found: _Found, rows: int) -> tuple[int, int]:
    """Samples, and heads of each."""
    for number in found.forward[1:-1]:
        tensor = graph.storages[graph.ops[number].outputs[0]].tensor
        if tensor is not None and len(tensor.shape) == 4:
            return tensor.shape[0], tensor.shape[1]
    return rows, 1


def _follow_forward(graph: Graph, call: int, found: _Found) -> None:
    one = graph.calls[call]
    products = [n for n in range(one.start, one.stop) if graph.ops[n].name == PRODUCT]
    if len(products) != 2:
        raise refuse_rows(graph, call, f"it has {len(products)} products of heads")
    first, last = products
    (scores,) = graph.ops[first].outputs
    tensor = graph.storages[scores].tensor
    if tensor is None or len(tensor.shape) != 3:
        raise refuse_rows(graph, call, "the shape of its scores is not known")
    found.interior.add(scores)
    found.operands.update(graph.ops[first].reads)
    current, names = _follow_scores(graph, call, range(first + 1, last), scores, found)
    if current not in graph.ops[last].reads or SOFTMAX.isdisjoint(names):
        raise refuse_rows(graph, call, "it is no product, softmax, and a product")
    found.operands.update({*graph.ops[last].reads} - {current})
    found.forward = [first, *found.forward, last]
    if not found.interior.isdisjoint(found.operands):
        raise refuse_rows(graph, call, "its scores meet themselves")
    if any(graph.storages[s].kind == "parameter" for s in found.operands):
        raise refuse_rows(graph, call, "its scores meet a parameter")


def _follow_scores(
    graph: Graph, call: int, numbers: range, current: int, found: _Found
) -> tuple[int, set[str]]:
    """Follow ops on scores; returns what they make in the end, and their names."""
    names: set[str] = set()
    for number in numbers:
        op = graph.ops[number]
        if _is_of_mask(op, current, found):
            _note_mask(op, number, found)
        elif _is_unused_cast(graph, op, current):
            found.unused.append(number)
            found.interior.update(op.outputs)
        elif current in op.reads:
            current = _follow_op(graph, call, number, current, found)
            names.add(op.name)
        elif not found.interior.isdisjoint(op.reads):
            raise refuse_rows(graph, call, f"{op.name} reads scores")
    return current, names


def _follow_op(
    graph: Graph, call: int, number: int, current: int, found: _Found
) -> int:
    """Follow an op on scores; returns what it makes of them."""
    op = graph.ops[number]
    if op.name not in _OPS or op.writes or op.random or len(op.outputs) != 1:
        raise refuse_rows(graph, call, f"its scores go through {op.name}")
    found.forward.append(number)
    found.operands.update({*op.reads} - {current, found.mask})
    (made,) = op.outputs
    found.interior.add(made)
    return made


def _is_of_mask(op: Op, current: int, found: _Found) -> bool:
    """Whether an op makes the mask of dropout on scores, which is drawn once."""
    if op.name not in _DROPOUT:
        return False
    if op.name == _MASK:
        return found.mask < 0 and op.reads == (current,)
    return op.reads == op.writes == (found.mask,)


def _is_unused_cast(graph: Graph, op: Op, current: int) -> bool:
    """Whether an op casts scores for nobody, as torch's own attention does."""
    if op.name != "_to_copy" or op.reads != (current,):
        return False
    made = {*op.outputs}
    return all(made.isdisjoint(one.reads) for one in graph.ops)


def _note_mask(op: Op, number: int, found: _Found) -> None:
    found.forward.append(number)
    if op.name == _MASK:
        (found.mask,) = op.outputs
        found.interior.add(found.mask)
    elif op.name == _DRAW:
        found.draw = number


def _follow_back(graph: Graph, call: int, number: int, found: _Found) -> None:
    """Follow an op of backward, in order."""
    op = graph.ops[number]
    if op.call < 0 or not graph.is_within(op.call, call):
        return
    inside = found.interior & {*op.reads}
    outside = {*op.reads} - inside
    if op.name == PRODUCT and not op.writes:
        (probabilities,) = {*graph.ops[found.forward[-1]].reads} & found.interior
        if probabilities in inside:
            found.given = next(iter(outside - found.operands), -1)
            found.ends.append(number)
        elif inside:
            (found.leaf,) = inside
            found.ends.append(number)
        elif found.inner_gradient is None:
            found.inner_gradient, (found.inner,) = number, op.outputs
            found.interior.add(found.inner)
            found.given = max(found.given, next(iter(outside - found.operands), -1))
        else:
            raise refuse_rows(graph, call, "its backward has a product too many")
    elif any(graph.storages[s].maker >= graph.num_forward for s in inside):
        if op.name not in _BACK or op.writes or not outside <= found.operands:
            raise refuse_rows(graph, call, f"its backward runs {op.name}")
        found.elementwise.append(number)
        found.interior.update(op.outputs)
    elif inside:
        raise refuse_rows(graph, call, f"its backward runs {op.name}")


def _check_readers(graph: Graph, call: int, found: _Found) -> None:
    """Check that others read nothing inside, and that operands are there in time."""
    assert found.inner_gradient is not None
    known = {*found.forward, *found.unused, *found.elementwise, *found.ends}
    known.add(found.inner_gradient)
    for number, op in enumerate(graph.ops):
        if number not in known and not found.interior.isdisjoint(op.reads):
            raise refuse_rows(graph, call, f"{op.name} reads its scores")
    begin = min(found.inner_gradient, *found.ends)
    if any(graph.storages[s].maker >= begin for s in found.operands):
        raise refuse_rows(graph, call, "its backward makes what its scores meet")


def held_by_scores(graph: Graph, found: RowOps) -> tuple[set[int], int]:
    """Storages that scores without bytes hold, and until when.

    They can be made from queries and keys as long as somebody has them.
    """
    first = found.forward[0]
    until = max(
        graph.storages[s].last
        for number in found.forward[:-1]
        for s in graph.ops[number].outputs
    )
    held: set[int] = set()
    for storage in graph.ops[first].reads:
        maker = graph.storages[storage].maker
        is_copy = maker >= 0 and graph.ops[maker].name == "clone"
        held.update(graph.ops[maker].reads if is_copy else (storage,))
    if found.drawn is not None:
        held.add(found.drawn.storage)
    return held, until


def attention_sizes(graph: Graph, found: RowOps) -> tuple[int, int, int, int, int]:
    """Samples, heads, queries, keys, and features of each head."""
    assert found.heads is not None
    first = graph.ops[found.forward[0]]
    tensor = graph.storages[first.outputs[0]].tensor
    assert tensor is not None
    rows, queries, keys = tensor.shape
    features = first.flops // (2 * rows * queries * keys or 1)
    return (*found.heads, queries, keys, max(features, 1))
