"""The ops of a norm that is written out, in a recorded step.

Its values have the input's shape, or one number for each row, or are made of parameters
alone. Backward makes a gradient for each use of the input, which autograd adds to
others, and gradients of parameters, of which each is a sum of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from ckplan.graph.graph import Graph
from ckplan.graph.records import Op
from ckplan.plan.tiles import IN_NORMS, STATISTICS
from ckplan.simulating.row_ops import RowOps
from ckplan.simulating.row_parts import is_weight, refuse_rows

_BACK = IN_NORMS | STATISTICS | {"add_", "mul_", "exp", "sgn"}
_SUMS = ("add", "add_")


@dataclass(frozen=True)
class NormOps(RowOps):
    """Ops of a written-out norm."""

    statistics: frozenset[int] = frozenset()  # storages: sums of rows
    by_row: frozenset[int] = frozenset()  # storages: one number for each row
    of_columns: frozenset[int] = frozenset()  # storages: made of parameters alone
    by_column: tuple[int, ...] = ()  # ops of forward that gradients of weights need

    @property
    def halved(self) -> frozenset[int]:
        """Ops of backward that both passes over tiles run a half of."""
        return frozenset()

    @property
    def in_rows(self) -> tuple[int, ...]:
        """Ops of the pass that makes the input's gradients."""
        return tuple(sorted({*self.forward, *self._back}))

    @property
    def _back(self) -> set[int]:
        return {self.inner_gradient, *self.elementwise, *self.hidden_gradients}

    @property
    def in_columns(self) -> tuple[int, ...]:
        """Ops of the pass that makes gradients of parameters."""
        return (*self.by_column, *self.weight_gradients)

    @property
    def has_gradients_apart(self) -> bool:
        """Whether the input has a gradient for each use."""
        return True


@dataclass
class _Norm:
    """What is known while the ops are followed."""

    hidden: int
    wide: frozenset[int]  # storages with the shape of the input
    by_row: frozenset[int]
    weights: frozenset[int]
    interior: set[int]
    shape: tuple[int, ...]  # of the output
    given: int = -1
    back: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # storages: gradients of uses


def is_norm(graph: Graph, call: int) -> bool:
    """Whether a call sums up values, and has none but elementwise ops beside."""
    one = graph.calls[call]
    names = {op.name.removesuffix("_") for op in graph.ops[one.start : one.stop]}
    return not names.isdisjoint(STATISTICS) and names <= IN_NORMS | STATISTICS


def find_norm(graph: Graph, call: int) -> NormOps:
    """Find the ops of a norm that is written out.

    Args:
        graph: A step.
        call: The call.

    Raises:
        PlanError: Its rows are not apart, or an op is not understood.
    """
    found = _follow_forward(graph, call)
    for number in range(graph.num_forward, graph.backward_stop):
        op = graph.ops[number]
        if op.call >= 0 and graph.is_within(op.call, call):
            _follow_back(graph, call, number, found)
    _find_ends(graph, call, found)
    one = graph.calls[call]
    forward = tuple(range(one.start, one.stop))
    weights = _numbers_of_columns(graph, found, found.back)
    in_rows = _leading_to(graph, found.back, found.ends)
    in_columns = _leading_to(graph, found.back, weights)
    if not in_rows or set(found.back) - {*in_rows, *in_columns}:
        raise refuse_rows(graph, call, "its backward is not understood")
    found.interior.difference_update(found.ends, weights)
    _check_readers(graph, call, found, forward)
    output = graph.ops[forward[-1]].outputs[0]
    tensor = graph.storages[output].tensor
    assert tensor is not None
    statistics = {
        s
        for n in forward
        if graph.ops[n].name in STATISTICS
        for s in graph.ops[n].outputs
    }
    makers = {n for n in in_rows if not {*found.ends}.isdisjoint(graph.ops[n].outputs)}
    return NormOps(
        forward,
        (),
        in_rows[0],
        graph.ops[in_rows[0]].outputs[0],
        tuple(n for n in in_rows[1:] if n not in makers),
        tuple(n for n in in_rows if n in makers),
        in_columns,
        frozenset(found.interior),
        (),
        found.hidden,
        found.given,
        prod(tensor.shape[:-1]),
        tensor.shape[-1],
        (),
        max(graph.storages[s].bytes for s in found.wide),
        sum(graph.storages[s].bytes for s in found.ends),
        weights=found.weights,
        statistics=frozenset(statistics),
        by_row=found.by_row,
        of_columns=frozenset(_numbers_of_columns(graph, found, forward)),
        by_column=_leading_to(graph, forward, [output], statistics),
    )


def _follow_forward(graph: Graph, call: int) -> _Norm:
    """Follow all of forward."""
    one = graph.calls[call]
    ops = graph.ops[one.start : one.stop]
    made = {s for op in ops for s in op.outputs}
    weights = {s for op in ops for s in op.reads if is_weight(graph, s)}
    outside = {s for op in ops for s in op.reads} - made - weights
    if len(outside) != 1:
        raise refuse_rows(graph, call, "it reads others than its input and parameters")
    (hidden,) = outside
    for op in ops:
        _check_op(graph, call, op, hidden, weights)
    output = ops[-1].outputs[0]
    tensor = graph.storages[output].tensor
    if tensor is None or len(tensor.shape) < 2:
        raise refuse_rows(graph, call, "the shape of its output is not known")
    if prod(tensor.shape[:-1]) < 2 or tensor.shape[-1] < 2:
        raise refuse_rows(graph, call, "its output is one row, or one column")
    known = _of_shapes(graph, call, made, tensor.shape)
    if output not in known.wide:
        raise refuse_rows(graph, call, "its output has no rows")
    written = {s for op in ops for s in op.writes}
    if not known.by_row.issuperset(written):
        raise refuse_rows(graph, call, "it changes a value in place")
    interior = made - {output}
    if any(graph.storages[s].last >= one.stop for s in interior):
        raise refuse_rows(graph, call, "a value in it is held after it")
    known.hidden, known.weights, known.interior = hidden, frozenset(weights), interior
    return known


def _check_op(graph: Graph, call: int, op: Op, hidden: int, weights: set[int]) -> None:
    """Check what an op of forward reads and makes."""
    if op.random or len(op.outputs) != 1:
        raise refuse_rows(graph, call, f"it runs {op.name} at random")
    if op.name == "mul" and op.reads == (hidden,):  # x * 2, or x * x with two uses
        raise refuse_rows(graph, call, "mul reads its input alone")
    if op.name in STATISTICS and not weights.isdisjoint(op.reads):
        raise refuse_rows(graph, call, "it sums up a parameter")


def _of_shapes(
    graph: Graph, call: int, storages: Iterable[int], shape: tuple[int, ...]
) -> _Norm:
    """Sort storages by what they have a number for.

    Raises:
        PlanError: One has another shape.
    """
    columns, rows = shape[-1], prod(shape[:-1])
    wide: set[int] = set()
    by_row: set[int] = set()
    for storage in storages:
        tensor = graph.storages[storage].tensor
        if tensor is None or not tensor.shape:
            raise refuse_rows(graph, call, "the shape of a value is not known")
        count = prod(tensor.shape)
        if count == rows * columns and tensor.shape[-1] == columns:
            wide.add(storage)
        elif count == rows and tensor.shape[-1] == 1:
            by_row.add(storage)
        elif count != columns or tensor.shape[-1] != columns:
            raise refuse_rows(graph, call, "a value has another shape than its input")
    return _Norm(-1, frozenset(wide), frozenset(by_row), frozenset(), set(), shape)


def _follow_back(graph: Graph, call: int, number: int, found: _Norm) -> None:
    """Follow an op of backward, in order."""
    op = graph.ops[number]
    inside = found.interior & {*op.reads}
    others = {*op.reads} - found.interior - found.weights - {found.hidden}
    if op.name in _SUMS and others and found.given >= 0:
        if inside - found.wide and inside & found.wide:
            raise refuse_rows(graph, call, "others add to its gradients")
        found.ends += sorted(inside & found.wide)
        return
    if inside and not others and _are_of_parameters(graph, inside, found):
        return  # casts the gradient of a parameter
    if found.given < 0 and len(others) == 1:
        (found.given,) = others
    if others - {found.given} or op.name not in _BACK:
        raise refuse_rows(graph, call, f"its backward runs {op.name}")
    if not found.interior.issuperset(op.writes):
        raise refuse_rows(graph, call, f"{op.name} changes a gradient in place")
    known = _of_shapes(graph, call, op.outputs, found.shape)
    found.wide |= known.wide
    found.by_row |= known.by_row
    found.interior.update(op.outputs)
    found.back.append(number)


def _are_of_parameters(graph: Graph, storages: set[int], found: _Norm) -> bool:
    """Whether storages are gradients of parameters."""
    by_column = storages.isdisjoint(found.wide | found.by_row)
    return by_column and all(
        graph.storages[s].maker >= graph.num_forward for s in storages
    )


def _find_ends(graph: Graph, call: int, found: _Norm) -> None:
    """Find the gradients of the input, one for each use.

    Where nothing else adds to them, the last ones are their sums.
    """
    if not found.ends:
        read = {s for n in found.back for s in graph.ops[n].reads}
        made = {s: n for n in found.back for s in graph.ops[n].creates}
        later = {s for n in found.back for s in graph.ops[n].writes}
        found.ends = [
            s for s in made if s in found.wide and (s not in read or s in later)
        ][-1:]
    one = graph.calls[call]
    uses = sum(found.hidden in op.reads for op in graph.ops[one.start : one.stop])
    for number in reversed(found.back):
        op = graph.ops[number]
        if len(set(found.ends)) >= uses:
            break
        parts = {s for s in op.reads if s in found.wide and s in found.interior}
        if op.name in _SUMS and not {*found.ends}.isdisjoint(op.outputs):
            found.ends = [s for s in found.ends if s not in op.outputs]
            found.ends += sorted(parts)
            found.back.remove(number)
    if len(found.ends) != uses or len({*found.ends}) != uses:
        raise refuse_rows(graph, call, "others add to the gradient of its input")


def _numbers_of_columns(
    graph: Graph, found: _Norm, numbers: Iterable[int]
) -> list[int]:
    """Storages that ops make, with one number for each column."""
    made = (s for n in numbers for s in graph.ops[n].creates)
    return [s for s in made if s not in found.wide | found.by_row]


def _leading_to(
    graph: Graph,
    numbers: Iterable[int],
    ends: Iterable[int],
    known: Iterable[int] = (),
) -> tuple[int, ...]:
    """The ops that make some storages, of those that are not known, in order."""
    wanted, stop = {*ends}, {*known}
    found: list[int] = []
    for number in sorted(numbers, reverse=True):
        op = graph.ops[number]
        if not wanted.isdisjoint(op.outputs):
            wanted.update(s for s in op.reads if s not in stop)
            found.append(number)
    return tuple(reversed(found))


def _check_readers(
    graph: Graph, call: int, found: _Norm, forward: tuple[int, ...]
) -> None:
    """Check that others read nothing inside."""
    known = {*forward, *found.back}
    for number, op in enumerate(graph.ops):
        if number not in known and not found.interior.isdisjoint(op.reads):
            raise refuse_rows(graph, call, f"{op.name} reads a value in it")
