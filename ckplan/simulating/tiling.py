"""A step whose head and loss run in tiles, as another graph.

Ops, storages and calls keep their numbers, so regions on other calls stay valid. What
is never whole has no bytes: logits, log-probabilities, their gradients. Two ops stand
for the tiles: ``_log_softmax`` for the pass over tokens, its backward for the pass over
the vocabulary. Their workspaces are the buffers of the passes, as in
``applying/tiling/passes.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ckplan import gpus
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    NO_WORKSPACE,
    OUTSIDE_CALLS,
    RUNS_WHOLE,
    Hazard,
    Op,
    Storage,
    TiledBits,
    Workspace,
)
from ckplan.plan.region import Region
from ckplan.plan.tiles import CLOSE_BITS, SAME_BITS, RowTiles, Tiles
from ckplan.simulating.heads import CAP, HeadOps, find_head, hidden_of, refuse
from ckplan.simulating.moving import is_on_gpu
from ckplan.simulating.reductions import (
    Processors,
    Reduction,
    partial_result_blocks,
)
from ckplan.simulating.tile_buffers import (
    INDEX_BYTES,
    Scratch,
    backward_bytes,
    forward_bytes,
    row_bytes,
)

_SUM = 4  # bytes of a thread's sum: float32


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
            raise refuse(graph, call, f"its loss is in the region of {first}")


def tile_graph(graph: Graph, call: int, tiles: Tiles) -> Graph:
    """The step with the head of a call, and its loss, in tiles.

    Args:
        graph: The step.
        call: The call of the head.
        tiles: Numbers of tiles.

    Raises:
        PlanError: The head cannot run in tiles, or not with these bits.
    """
    found = find_head(graph, call)
    if found.is_close and tiles.bits == SAME_BITS:
        raise PlanError(
            f"cannot tile {graph.calls[call]} with the same bits: its logits have 16 "
            "bits and are not cast to float32",
            needed=f"bits: {CLOSE_BITS}, or logits.float() before F.cross_entropy",
            hint=f"bits: {CLOSE_BITS}",
        )
    refuse_other_bits(graph, call, tiles)
    ops, storages = list(graph.ops), list(graph.storages)
    forget_logits(graph, found, storages)
    move_gradients(found, ops, storages, weights_in=found.backward)
    # By row: statistics and expected gradients; and the class, which the loss
    # holds. Lazy logits hold the hidden state as long as the model's output lives.
    losses = [*ops[found.last].outputs, *ops[graph.num_forward - 1].outputs]
    held = max([found.backward, *(storages[one].last for one in losses)])
    made = len(storages)
    for size, last in ((row_bytes(found), found.backward), (INDEX_BYTES, held)):
        bytes_ = found.tokens * size
        storages.append(Storage(bytes_, "activation", found.log_softmax, last))
    ops[found.log_softmax] = replace(
        ops[found.log_softmax],
        outputs=(*ops[found.log_softmax].outputs, made, made + 1),
    )
    hidden = hidden_of(graph, graph.ops[found.product])
    logits = (graph.ops[n].outputs for n in range(found.product, found.log_softmax))
    lazy = found.never_whole.intersection(chain.from_iterable(logits))
    until = max(storages[one].last for one in (hidden, *lazy))
    storages[hidden] = replace(storages[hidden], last=until)
    for storage in graph.ops[found.loss].reads[2:]:  # weights of classes
        until = max(storages[storage].last, found.backward)
        storages[storage] = replace(storages[storage], last=until)
    skipped = {found.product, found.log_softmax}
    values = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    values.update(
        ops=tuple(_in_passes(graph, found, tiles, ops, share_of(graph, call, tiles))),
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


def tested(graph: Graph, call: int, tiles: Tiles | RowTiles) -> TiledBits | None:
    """The test of a call in such tiles; None if there was none."""
    for one in graph.tiled:
        if (one.call, one.rows, one.columns) == (call, *tiles.counts):
            return one
    return None


def share_of(graph: Graph, call: int, tiles: Tiles | RowTiles) -> float:
    """Measured seconds of a call in tiles, of those whole; 0 if there are none."""
    test = tested(graph, call, tiles)
    return 0.0 if test is None else test.share


def runs_whole(graph: Graph, call: int) -> bool:
    """Whether a test found that the code of a call does not run in tiles."""
    return any(one.call == call and one.difference == RUNS_WHOLE for one in graph.tiled)


def refuse_other_bits(graph: Graph, call: int, tiles: Tiles | RowTiles) -> None:
    """Check that tiles have the same bits, if that is what they promise.

    Raises:
        PlanError: A test found others.
    """
    if runs_whole(graph, call):
        raise PlanError(
            f"cannot tile {graph.calls[call]}: profile found that it would run whole",
            needed="code that tiles follow; a note of the trace says what is not",
            hint="leave this call out of the plan",
        )
    test = tested(graph, call, tiles)
    if test is not None and test.difference and tiles.bits == SAME_BITS:
        raise PlanError(
            f"cannot tile {graph.calls[call]} with the same bits: profile found a "
            f"difference up to {test.difference:.1e} (threads: {test.threads})",
            needed=f"bits: {CLOSE_BITS}, or another number of tiles",
            hint=f"bits: {CLOSE_BITS}",
        )


def _hazards(graph: Graph, call: int, found: HeadOps) -> Iterator[Hazard]:
    """Those of the step; no region can rebuild the head or its loss."""
    yield from graph.hazards
    for one in {call, graph.ops[found.log_softmax].call} - {OUTSIDE_CALLS}:
        yield Hazard(one, "unseen", "runs in tiles", ())


def forget_logits(graph: Graph, found: HeadOps, storages: list[Storage]) -> None:
    """Let what is never whole have no bytes, with what its kernels keep beside it."""
    makers = {*range(found.product, found.log_softmax), *found.elementwise}
    for number in (*found.never_whole, *kept_by_kernels(graph, makers)):
        storages[number] = replace(storages[number], bytes=0, tensor=None)


def move_gradients(
    found: HeadOps, ops: list[Op], storages: list[Storage], weights_in: int
) -> None:
    """Let passes make the gradients that other ops made: of weights in a given op."""
    moves = [(number, weights_in) for number in found.weight_gradients]
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


def _in_passes(
    graph: Graph, found: HeadOps, tiles: Tiles, ops: list[Op], share: float
) -> Iterator[Op]:
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
    scratch = _scratch(graph, found, tiles)
    spaces = {
        found.log_softmax: forward_bytes(found, tiles, scratch),
        found.backward: backward_bytes(found, tiles, scratch),
    }
    gone = {*number_of, *ahead, *found.weight_gradients}
    total = share * sum(graph.ops[number].seconds for number in gone)
    yield from costed(graph.ops, enumerate(ops), passes, spaces, gone, total)


def costed(
    whole: Mapping[int, Op] | tuple[Op, ...],
    ops: Iterable[tuple[int, Op]],
    passes: Mapping[int, tuple[Sequence[int], int]],
    spaces: Mapping[int, int],
    gone: Container[int],
    total: float = 0.0,
) -> Iterator[Op]:
    """Ops with the costs of others, which run in them.

    Args:
        whole: Ops as they are, by number.
        ops: Of the other step, with their numbers.
        passes: Op -> the ops that run in it, and how many launches each has.
        spaces: Op -> bytes of its workspace.
        gone: Ops that cost nothing of their own.
        total: Seconds of all passes, if they were measured.
    """
    seconds = {
        n: sum(whole[one].seconds for one in of) for n, (of, _) in passes.items()
    }
    factor = total / (sum(seconds.values()) or 1.0) if total else 1.0
    for number, op in ops:
        if number in passes:
            parts, count = passes[number]
            run = [whole[n] for n in parts]
            yield replace(
                op,
                workspace=Workspace((), (spaces[number],)),
                flops=sum(one.flops for one in run),
                moved_bytes=sum(one.moved_bytes for one in run),
                seconds=factor * seconds[number],
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


def kept_by_kernels(graph: Graph, makers: Container[int]) -> list[int]:
    """Storages that kernels of ops keep beyond their outputs, such as scalars."""
    return [
        number
        for number, one in enumerate(graph.storages)
        if one.kind == "temporary"
        and one.maker in makers
        and number not in graph.ops[one.maker].outputs
    ]


def _scratch(graph: Graph, found: HeadOps, tiles: Tiles) -> Scratch:
    """Scratch memory of the head's own kernels in the whole step."""

    def most(*numbers: int | None) -> int:
        known = (graph.ops[n].workspace.bytes for n in numbers if n is not None)
        return max(known, default=0)

    weights = [n for n in found.weight_gradients if graph.ops[n].name == "mm"]
    biases = [n for n in found.weight_gradients if n not in weights]
    between = range(found.product + 1, found.log_softmax)
    caps = [n for n in (*between, *found.elementwise) if graph.ops[n].name in CAP]
    return Scratch(
        most(found.product),
        most(found.log_softmax),
        most(found.backward),
        most(found.hidden_gradient),
        most(*weights),
        _bias_bytes(graph, found, tiles, most(*biases)),
        most(*caps) if found.is_capped else 0,
    )


def _bias_bytes(graph: Graph, found: HeadOps, tiles: Tiles, whole: int) -> int:
    """Scratch memory of the gradient of the bias.

    On a card, fewer columns are summed up by more blocks of threads for each, so a tile
    can take memory where the whole sum takes none.
    """
    name = graph.options.get("gpu")
    if name is None or not found.has_bias or not is_on_gpu(graph):
        return whole
    card = gpus.find(name)
    processors = Processors(card.multiprocessors, card.threads)
    widths = {one.stop - one.start for one in tiles.of_vocabulary(found.words)}
    item = found.item_bytes
    return max(
        sum(partial_result_blocks(Reduction(*sizes, {0}, item, _SUM, item), processors))
        for sizes in (((found.tokens, n), (n, 1)) for n in widths)
    )
