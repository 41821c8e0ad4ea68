"""A step whose head and loss run in tiles, as another graph.

Ops, storages and calls keep their numbers, so regions on other calls stay valid. What
is never whole has no bytes: logits, log-probabilities, their gradients. Two ops stand
for the tiles: ``_log_softmax`` for the pass over tokens, its backward for the pass over
the vocabulary. Their workspaces are the buffers of the passes, as in
``applying/tiling/passes.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    NO_WORKSPACE,
    OUTSIDE_CALLS,
    Hazard,
    Op,
    Storage,
    Workspace,
)
from ckplan.plan.region import Region
from ckplan.plan.tiles import Tiles

_PRODUCTS = {"mm": 2, "addmm": 3}  # of a head -> tensors that it reads
_FOLLOWED = {"clone", "_to_copy"}  # between head and loss
_BACKWARD = {"nll_loss_backward", "_log_softmax_backward_data", "_to_copy"} | {
    *("clone", "slice_backward"),
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LOG_BYTES = 4  # of a log-probability, float32
_INDEX_BYTES = 8


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
    is_shifted: bool
    sequences: int

    @property
    def last(self) -> int:
        """The last forward op."""
        return self.log_softmax + 1


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
        raise _refused(graph, call, "it is no linear layer")
    for other in graph.ops[found.start : product]:
        if other.name != "_to_copy":
            raise _refused(graph, call, f"it runs {other.name}")
    (logits,) = op.outputs
    never_whole, is_shifted = {logits}, False
    log_softmax = nll = -1
    for number, one in _readers(graph, never_whole, product + 1, stop):
        if one.name == "_log_softmax" and log_softmax < 0:
            log_softmax = number
        elif one.name == "nll_loss_forward" and len(one.reads) == 2:
            nll = number
            continue
        elif one.name not in _FOLLOWED or log_softmax >= 0:
            raise _refused(graph, call, f"{one.name} reads its logits")
        is_shifted |= graph.storages[one.outputs[0]].bytes < _bytes_like(graph, one)
        never_whole.update(one.outputs)
    if nll != log_softmax + 1 or log_softmax < 0:
        raise _refused(graph, call, "no cross entropy of its logits follows")
    return _find_backward(graph, call, product, log_softmax, never_whole, is_shifted)


def _find_backward(
    graph: Graph,
    call: int,
    product: int,
    log_softmax: int,
    never_whole: set[int],
    is_shifted: bool,
) -> HeadOps:
    forward = graph.ops[product]
    ends: list[int] = []
    elementwise: list[int] = []
    backward, hidden_gradient = -1, None
    of_head = {*forward.reads}
    hidden = _hidden(graph, forward)
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
            raise _refused(graph, call, f"{one.name} reads its gradient")
    tensor = graph.storages[forward.outputs[0]].tensor
    size = _ITEM_BYTES.get(tensor.dtype) if tensor is not None else None
    if backward < 0 or tensor is None or size is None:
        raise _refused(graph, call, "its loss has no backward, or another dtype")
    source = graph.storages[hidden].tensor
    rows = source.shape[:-1] if source is not None else tensor.shape[:-1]
    return HeadOps(
        product,
        log_softmax,
        backward,
        hidden_gradient,
        tuple(ends),
        tuple(elementwise),
        frozenset(never_whole),
        prod(tensor.shape[:-1]),
        tensor.shape[-1],
        size,
        is_shifted,
        prod(rows[:-1]),
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


def _hidden(graph: Graph, product: Op) -> int:
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


def refuse_regions_of_loss(graph: Graph, call: int, others: Iterable[Region]) -> None:
    """Check that no other region holds ops of a tiled head or of its loss.

    Raises:
        PlanError: One does.
    """
    found = find_head(graph, call)
    for one in others:
        first = graph.calls[one.call]
        last = first if one.last is None else graph.calls[one.last]
        if first.start <= found.last and found.product < last.stop:
            raise _refused(graph, call, f"its loss is in the region of {first}")


def tile_graph(graph: Graph, call: int, tiles: Tiles) -> Graph:
    """The step with the head of a call, and its loss, in tiles.

    Args:
        graph: The step.
        call: The call of the head.
        tiles: Numbers of tiles.

    Raises:
        PlanError: The head cannot run in tiles.
    """
    found = find_head(graph, call)
    ops, storages = list(graph.ops), list(graph.storages)
    for number in found.never_whole:
        storages[number] = replace(storages[number], bytes=0, tensor=None)
    _move(found, ops, storages)
    # By row: two statistics and the expected gradient; and the class, which the loss
    # holds. Lazy logits hold the hidden state as long as the model's output lives.
    loss = ops[found.last].outputs[0]
    made = len(storages)
    for size, last in (
        (3 * _LOG_BYTES, found.backward),
        (_INDEX_BYTES, storages[loss].last),
    ):
        bytes_ = found.tokens * size
        storages.append(Storage(bytes_, "activation", found.log_softmax, last))
    ops[found.log_softmax] = replace(
        ops[found.log_softmax],
        outputs=(*ops[found.log_softmax].outputs, made, made + 1),
    )
    hidden = _hidden(graph, graph.ops[found.product])
    (logits,) = graph.ops[found.product].outputs
    until = max(storages[hidden].last, storages[logits].last)
    storages[hidden] = replace(storages[hidden], last=until)
    skipped = {found.product, found.log_softmax}
    values = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    values.update(
        ops=tuple(_costed(graph, found, tiles, ops)),
        storages=tuple(storages),
        hazards=tuple(sorted(_hazards(graph, call, found), key=lambda one: one.call)),
        encodings=tuple(
            one
            for one in graph.encodings
            if one.op not in skipped
            and found.never_whole.isdisjoint(graph.ops[one.op].outputs)
        ),
    )
    return Graph(**values)


def _hazards(graph: Graph, call: int, found: HeadOps) -> Iterator[Hazard]:
    """Those of the step; no region can rebuild the head or its loss."""
    yield from graph.hazards
    for one in {call, graph.ops[found.log_softmax].call} - {OUTSIDE_CALLS}:
        yield Hazard(one, "unseen", "runs in tiles", ())


def _move(found: HeadOps, ops: list[Op], storages: list[Storage]) -> None:
    """Let the two passes make the gradients that other ops made."""
    moves = [(number, found.backward) for number in found.weight_gradients]
    if found.hidden_gradient is not None:
        moves.append((found.hidden_gradient, found.log_softmax))
    for number, maker in moves:
        made = ops[number].creates
        ops[number] = replace(
            ops[number],
            outputs=tuple(s for s in ops[number].outputs if s not in made),
        )
        ops[maker] = replace(ops[maker], outputs=(*ops[maker].outputs, *made))
        for storage in made:
            storages[storage] = replace(storages[storage], maker=maker)


def _costed(graph: Graph, found: HeadOps, tiles: Tiles, ops: list[Op]) -> Iterator[Op]:
    """Ops with the seconds, FLOPs and workspaces of tiles.

    The pass over tokens runs the head, the loss, its backward and the gradient of the
    hidden state. The pass over the vocabulary runs the head and the backward again.
    """
    number_of = (found.product, found.log_softmax, *found.elementwise)
    again = tuple(n for n in number_of if n != found.backward)
    ahead = () if found.hidden_gradient is None else (found.hidden_gradient,)
    passes = {
        found.log_softmax: ((*number_of, *ahead), len(tiles.of_tokens(found.tokens))),
        found.backward: (
            (*again, found.backward, *found.weight_gradients),
            len(tiles.of_vocabulary(found.words)),
        ),
    }
    spaces = {
        found.log_softmax: _forward_bytes(found, tiles),
        found.backward: _backward_bytes(found, tiles, len(found.weight_gradients) > 1),
    }
    gone = {*number_of, *ahead, *found.weight_gradients}
    for number, op in enumerate(ops):
        if number in passes:
            parts, count = passes[number]
            run = [graph.ops[n] for n in parts]
            kernel = max(sum(one.workspace.after) for one in run)
            yield replace(
                op,
                workspace=Workspace((), (spaces[number] + kernel,)),
                flops=sum(one.flops for one in run),
                moved_bytes=sum(one.moved_bytes for one in run),
                seconds=sum(one.seconds for one in run),
                launch_seconds=count * sum(one.launch_seconds for one in run),
            )
        elif number in gone:
            yield replace(
                op,
                workspace=NO_WORKSPACE,
                flops=0,
                moved_bytes=0,
                seconds=0.0,
                launch_seconds=0.0,
            )
        else:
            yield op


def _forward_bytes(found: HeadOps, tiles: Tiles) -> int:
    """Most bytes of the pass over tokens, without what it leaves."""
    cuts = tiles.of_tokens(found.tokens)
    most: int = max(one.stop - one.start for one in cuts)
    cast = _LOG_BYTES if found.item_bytes != _LOG_BYTES else 0
    logits = found.item_bytes + cast + 2 * _LOG_BYTES  # log-probabilities, gradients
    ignored = found.tokens  # whether each row is
    shifted = 0
    if found.is_shifted:  # targets padded in front, then behind
        shifted = _INDEX_BYTES * (2 * found.tokens + found.sequences)
    values = _LOG_BYTES * (2 * most + found.tokens)
    return most * found.words * logits + values + ignored + shifted


def _backward_bytes(found: HeadOps, tiles: Tiles, has_bias: bool) -> int:
    """Most bytes of the pass over the vocabulary, without the gradients it makes."""
    cuts = tiles.of_vocabulary(found.words)
    most: int = max(one.stop - one.start for one in cuts)
    logits = most * found.item_bytes + 3 * _LOG_BYTES * (most + 1)
    places = (_INDEX_BYTES + 3) * found.tokens
    if has_bias:
        bias = _INDEX_BYTES * found.tokens + most * found.item_bytes
        places = max(places, bias)
    return found.tokens * (logits + _LOG_BYTES) + places


def _refused(graph: Graph, call: int, why: str) -> PlanError:
    return PlanError(
        f"cannot tile {graph.calls[call]}: {why}",
        needed="a linear layer whose logits only F.cross_entropy reads, cast to "
        "float32, viewed or shifted by one on the way",
        hint="leave this call out of the plan",
    )
