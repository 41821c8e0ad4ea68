"""Derive the step of one of N ranks from the step of one process.

Storages that a scheme divides get smaller. Its gathers, reductions and buffers are
inserted as ops. The result is an ordinary graph. Each rank has its own batch, of the
profiled size.

- ``ddp``: nothing is divided; buckets hold a second copy of the gradients. S. Li et
  al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
- ``fsdp2``: torch's ``fully_shard`` on every unit and on the model. Y. Zhao et al.,
  "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
- ``zero1``, ``zero2``, ``zero3``: optimizer state, then gradients, then parameters in
  flat partitions. S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory
  Optimizations Toward Training Trillion Parameter Models", 2020. Flat copies that an
  implementation makes beyond the paper are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ckplan.errors import GraphError
from ckplan.graph.graph import Graph
from ckplan.graph.patterns import fold_calls
from ckplan.graph.records import BEFORE_STEP, Op, Storage
from ckplan.graph.sharding.editing import Insert, LastHolders, insert
from ckplan.graph.sharding.gathering import (
    fully_sharded,
    gathered_flat,
    reduced_in_buckets,
)
from ckplan.graph.sharding.scheme import GATHERING, Sharding
from ckplan.graph.sharding.state import State, flat_shares, state_of
from ckplan.graph.sharding.traffic import communication, traffic_of
from ckplan.units import format_seconds

_SCALAR_BYTES = 8  # state of no more, a count of steps, is not divided
_Shares: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Bytes of some tensors -> of what one rank has of each."""


def shard(
    graph: Graph,
    scheme: str,
    world_size: int,
    *,
    units: str | Sequence[str] = (),
) -> Graph:
    """Make the step of one rank out of the step of one process.

    Args:
        graph: The step of one process, with the batch of one rank.
        scheme: ``ddp``, ``zero1``, ``zero2``, ``zero3`` or ``fsdp2``.
        world_size: How many ranks there are.
        units: Modules whose parameters ``fsdp2`` and ``zero3`` gather as one, beside
            the whole model: patterns like ``transformer.h.[0..11]``. By default those
            in numbered lists with others of their type.

    Returns:
        The step of rank 0, which no other rank exceeds in memory; the scheme is among
        its options and notes. Its seconds are without communication.

    Raises:
        CkplanError: An unknown scheme, no rank, or units where nothing is gathered.
        GraphError: The step is sharded already, or does not name its parameters.
        PlanError: A unit is no module of the model.
    """
    listed = (units,) if isinstance(units, str) else tuple(units)
    return sharded(graph, Sharding(scheme, world_size, listed))


def sharded(graph: Graph, sharding: Sharding, rate: int | None = None) -> Graph:
    """Do the same as ``shard``, with a checked ``Sharding``.

    Args:
        graph: The step of one process.
        sharding: How its state is divided.
        rate: Bytes per second from a rank to the others, if known, for the notes.
    """
    if "shard" in graph.options:
        raise GraphError(
            "cannot shard the trace: it is that of one rank under "
            f"{graph.options['shard']} already",
            needed="the trace of one process",
            hint="leave out --shard, or profile again without it",
        )
    state = state_of(graph, sharding.units)
    rank = _SHARD[sharding.scheme](graph, state, sharding)
    options: dict[str, Any] = {
        "shard": sharding.scheme,
        "world_size": sharding.world_size,
    }
    if sharding.units:
        options["unit"] = list(sharding.units)
    return replace(
        rank,
        storages=tuple(
            replace(one, bytes=state.allocated(one.bytes)) for one in rank.storages
        ),
        options={**graph.options, **options},
        notes=(*graph.notes, *_notes(sharding, state, _sending(graph, sharding, rate))),
    )


def _sending(graph: Graph, sharding: Sharding, rate: int | None) -> str:
    """What seconds are without; nothing if the rate is not known."""
    if rate is None:
        return ""
    sent = communication(graph, traffic_of(graph, sharding), rate)
    hidden = format_seconds(sent.seconds - sent.exposed_seconds)
    return (
        f": rings at {rate / 1e9:g} GB/s take {format_seconds(sent.seconds)} a step, "
        f"of which forward and backward hide {hidden}"
    )


def _notes(sharding: Sharding, state: State, sending: str) -> list[str]:
    ranks = f"{sharding.world_size} ranks under {sharding.scheme}"
    found = [f"memory of one of {ranks}; seconds are without communication{sending}"]
    if sharding.scheme in GATHERING:
        calls = [(unit.fqn, 0) for unit in state.units[:-1]]
        units = ", ".join((*fold_calls(calls, calls), "the rest of the model"))
        found.append(f"parameters are gathered by {units}")
    return found


# -- the schemes -------------------------------------------------------------------


def _ddp(graph: Graph, state: State, sharding: Sharding) -> Graph:
    """Buckets exist from the start, as large as all gradients."""
    del sharding
    sizes = sum(graph.storages[gradient].bytes for gradient in state.gradients)
    buckets = Storage(sizes, "gradient", BEFORE_STEP, len(graph.ops))
    return replace(graph, storages=(*graph.storages, buckets))


def _zero(graph: Graph, state: State, sharding: Sharding) -> Graph:
    """Flat partitions: stage 1 of the optimizer, 2 of gradients, 3 of parameters."""
    stage, num_ranks = int(sharding.scheme[-1]), sharding.world_size

    def shares(sizes: Sequence[int]) -> list[int]:
        return flat_shares(sizes, num_ranks)

    kinds = ("optimizer", "gradient", "parameter")[:stage]
    inserts: list[Insert] = []
    lasts: LastHolders = {}
    if stage > 1:
        inserts += reduced_in_buckets(graph, state, num_ranks, lasts)
    if stage > 2:
        inserts += gathered_flat(graph, state, num_ranks)
    rank = _gradients_as_temporary(insert(graph, inserts, lasts), lasts)
    return _divide_storages(rank, kinds, shares, num_ranks)


def _fsdp2(graph: Graph, state: State, sharding: Sharding) -> Graph:
    """Every parameter, its gradient and optimizer state, along dimension 0."""
    num_ranks = sharding.world_size
    share = state.row_shares(num_ranks)

    def shares(sizes: Sequence[int]) -> list[int]:
        return [share(size) for size in sizes]

    lasts: LastHolders = {}
    inserts = fully_sharded(graph, state, num_ranks, lasts)
    kinds = ("optimizer", "gradient", "parameter")
    rank = _gradients_as_temporary(insert(graph, inserts, lasts), lasts)
    return _divide_storages(rank, kinds, shares, num_ranks)


_SHARD: dict[str, Callable[[Graph, State, Sharding], Graph]] = {
    "ddp": _ddp,
    "zero1": _zero,
    "zero2": _zero,
    "zero3": _zero,
    "fsdp2": _fsdp2,
}


def _gradients_as_temporary(graph: Graph, lasts: LastHolders) -> Graph:
    """Mark whole gradients as temporary: a rank keeps only its part."""
    storages = list(graph.storages)
    for gradient in lasts:
        storages[gradient] = replace(storages[gradient], kind="temporary")
    return replace(graph, storages=tuple(storages))


def _divide_storages(
    graph: Graph, kinds: Sequence[str], shares: _Shares, num_ranks: int
) -> Graph:
    """Divide the storages before the step, and those that the optimizer makes."""
    storages = list(graph.storages)

    def divide(chosen: Sequence[int]) -> None:
        sizes = shares([storages[number].bytes for number in chosen])
        for number, size in zip(chosen, sizes, strict=True):
            if size != storages[number].bytes:  # of another shape, too
                storages[number] = replace(storages[number], bytes=size, tensor=None)

    for kind in kinds:
        divide(
            [
                number
                for number, storage in enumerate(graph.storages)
                if storage.kind == kind
                and storage.maker == BEFORE_STEP
                and storage.bytes > (kind == "optimizer") * _SCALAR_BYTES
            ]
        )
    update = range(graph.backward_stop, len(graph.ops))
    for op in update:
        made = graph.ops[op].creates
        divide([s for s in made if storages[s].bytes > _SCALAR_BYTES])
    ops = [
        _share_of(op, num_ranks) if number in update else op
        for number, op in enumerate(graph.ops)
    ]
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


def _share_of(op: Op, num_ranks: int) -> Op:
    """An op on a rank's part of its tensors."""
    return replace(
        op,
        workspace=op.workspace.map(lambda size: -(-size // num_ranks)),
        flops=-(-op.flops // num_ranks),
        moved_bytes=-(-op.moved_bytes // num_ranks),
        seconds=op.seconds / num_ranks,
    )
