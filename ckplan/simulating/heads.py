"""The ops of a head and its loss in a recorded step, which ``tiling.py`` replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Op

_PRODUCTS = {"mm": 2, "addmm": 3}  # of a head -> tensors that it reads
CAP = ("div", "tanh", "mul")  # a soft cap, in order
_FOLLOWED = {"clone", "_to_copy", *CAP}  # between head and loss
_BACKWARD = {"nll_loss_backward", "_log_softmax_backward_data", "_to_copy"} | {
    *("clone", "slice_backward", "mul", "tanh_backward", "div", "add"),
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class HeadOps:
    """The ops of a head and its loss, by number, and what they make."""

    product: int  # makes the logits
    log_softmax: int
    backward: int  # of log_softmax
    hidden_gradient: int | None  # op
    weight_gradients: tuple[int, ...]  # ops
    elementwise: tuple[int, ...]  # other ops of backward
    never_whole: frozenset[int]  # storages
    tokens: int
    words: int
    item_bytes: int  # of a logit, as the head makes it
    log_bytes: int  # of a log-probability
    is_capped: bool  # softly
    has_sums: bool  # of all log-probabilities of a row, as label smoothing needs them
    is_shifted: bool
    sequences: int
    features: int
    dtype: str  # of a logit, as the head makes it

    @property
    def loss(self) -> int:
        """The op that makes the loss."""
        return self.log_softmax + 1

    @property
    def last(self) -> int:
        """The last forward op."""
        return self.loss + self.has_sums

    @property
    def has_bias(self) -> bool:
        """Whether the head has one with a gradient."""
        return len(self.weight_gradients) > 1

    @property
    def upcast(self) -> bool:
        """Whether 16-bit logits are cast."""
        return self.log_bytes > self.item_bytes

    @property
    def is_close(self) -> bool:
        """Whether 16-bit logits are not cast: tiles then give other bits."""
        return self.log_bytes < _ITEM_BYTES["float32"]


def find_head(graph: Graph, call: int) -> HeadOps:
    """Find the ops of a head and its loss.

    Args:
        graph: A step.
        call: The call of the head.

    Raises:
        PlanError: They cannot run in tiles, because an op is not understood.
    """
    found, stop = graph.calls[call], graph.num_forward
    product = found.stop - 1
    op = graph.ops[product] if found.start < found.stop else None
    if op is None or len(op.reads) != _PRODUCTS.get(op.name):
        raise refuse(graph, call, "it is no linear layer")
    for other in graph.ops[found.start : product]:
        if other.name != "_to_copy":
            raise refuse(graph, call, f"it runs {other.name}")
    (logits,) = op.outputs
    way = _Way({logits})
    for number, one in _readers(graph, way.never_whole, product + 1, stop):
        way.add(graph, call, number, one)
    if way.losses[:1] != [way.log_softmax + 1] or way.log_softmax < 0:
        raise refuse(graph, call, "no cross entropy of its logits follows")
    if way.cap not in ((), CAP):
        raise refuse(graph, call, f"{way.cap[-1]} reads its logits")
    return _find_backward(graph, call, product, way)


@dataclass
class _Way:
    """What reads the logits in forward."""

    never_whole: set[int]  # storages
    log_softmax: int = -1
    losses: list[int] = field(default_factory=list)  # ops: the loss, sums by row
    cap: tuple[str, ...] = ()
    is_shifted: bool = False

    def add(self, graph: Graph, call: int, number: int, op: Op) -> None:
        """Follow one more op, or refuse it."""
        if self.log_softmax >= 0:
            if not self._reduces(op):
                raise refuse(graph, call, f"{op.name} reads its log-probabilities")
            self.losses.append(number)
            return
        cap = (*self.cap, *[op.name] * (op.name in CAP))
        known = op.name == "_log_softmax" or op.name in _FOLLOWED
        if not known or cap != CAP[: len(cap)] or len(op.reads) > 1:
            raise refuse(graph, call, f"{op.name} reads its logits")
        self.cap = cap
        if op.name == "_log_softmax":
            self.log_softmax = number
        made = graph.storages[op.outputs[0]]
        self.is_shifted |= made.bytes < _bytes_like(graph, op)
        self.never_whole.update(op.outputs)

    def _reduces(self, op: Op) -> bool:
        """Whether an op makes the loss, or the sums of label smoothing after it."""
        if op.name == "nll_loss_forward":
            return not self.losses  # it may read weights of classes, too
        return op.name == "sum" and len(self.losses) == 1


def _find_backward(graph: Graph, call: int, product: int, way: _Way) -> HeadOps:
    forward, never_whole = graph.ops[product], way.never_whole
    ends: list[int] = []
    elementwise: list[int] = []
    backward, hidden_gradient = -1, None
    of_head = {*forward.reads}
    hidden = hidden_of(graph, forward)
    begin = graph.num_forward
    for number, one in _readers(graph, never_whole, begin, graph.backward_stop):
        if one.name in _BACKWARD:
            backward = number if one.name.startswith("_log_softmax") else backward
            elementwise.append(number)
            never_whole.update(graph.creates[number])
        elif one.name == "mm" and of_head & {*one.reads}:
            if hidden in one.reads:
                ends.append(number)
            elif hidden_gradient is None:
                hidden_gradient = number
        elif one.name == "sum":
            ends.append(number)
        else:
            raise refuse(graph, call, f"{one.name} reads its gradient")
    tensor = graph.storages[forward.outputs[0]].tensor
    size = _ITEM_BYTES.get(tensor.dtype) if tensor is not None else None
    logs = graph.storages[graph.ops[way.log_softmax].outputs[0]].tensor
    if backward < 0 or tensor is None or size is None or logs is None:
        raise refuse(graph, call, "its loss has no backward, or another dtype")
    source = graph.storages[hidden].tensor or tensor
    return HeadOps(
        product,
        way.log_softmax,
        backward,
        hidden_gradient,
        tuple(ends),
        tuple(elementwise),
        frozenset(never_whole),
        prod(tensor.shape[:-1]),
        tensor.shape[-1],
        size,
        _ITEM_BYTES.get(logs.dtype, size),
        bool(way.cap),
        len(way.losses) > 1,
        way.is_shifted,
        prod(source.shape[:-2]),
        source.shape[-1],
        tensor.dtype,
    )


def _readers(
    graph: Graph, storages: set[int], start: int, stop: int
) -> Iterator[tuple[int, Op]]:
    """Ops that read any of some storages; the caller adds to them on the way."""
    for number in range(start, stop):
        if not storages.isdisjoint(graph.ops[number].reads):
            if graph.ops[number].writes:
                raise PlanError(
                    f"cannot tile a head: {graph.ops[number].name} changes its logits",
                    needed="logits that only the loss reads",
                    hint="leave this head out of the plan",
                )
            yield number, graph.ops[number]


def hidden_of(graph: Graph, product: Op) -> int:
    """The storage of the input of a head: an activation that is no cast parameter."""
    return next(
        s
        for s in product.reads
        if graph.storages[s].kind not in ("parameter", "buffer")
        and s not in graph.casts
    )


def _bytes_like(graph: Graph, op: Op) -> int:
    """Bytes of an op's output if it has as many elements as its input."""
    source, made = graph.storages[op.reads[0]], graph.storages[op.outputs[0]]
    if source.tensor is None or made.tensor is None:
        return made.bytes
    sizes = [_ITEM_BYTES.get(one.tensor.dtype, 1) for one in (source, made)]  # type: ignore[union-attr]
    return source.bytes * sizes[1] // sizes[0]


def refuse(graph: Graph, call: int, why: str) -> PlanError:
    """The error for a call that cannot run in tiles."""
    return PlanError(
        f"cannot tile {graph.calls[call]}: {why}",
        needed="a linear layer whose logits only F.cross_entropy reads, softly capped, "
        "cast to float32, viewed or shifted by one on the way",
        hint="leave this call out of the plan",
    )
