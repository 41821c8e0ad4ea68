"""The same step with other sizes and costs, without the checks of its structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ckplan.graph.consistency import MOST_SECONDS
from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Op, Storage
from ckplan.units import MOST_BYTES

_MOST_FLOPS = 1 << 62
_FIELDS = tuple(field.name for field in fields(Graph))
_OF_STRUCTURE = (
    *("children", "creates", "lifetimes", "saved_of", "unused_workspaces", "_writers"),
)
"""Derived values that no size and no cost is part of."""


def redrawn(
    graph: Graph,
    *,
    fingerprint: Mapping[str, Any],
    ops: tuple[Op, ...],
    storages: tuple[Storage, ...],
    encodings: tuple[Encoding, ...],
) -> Graph:
    """A step whose ops, storages and encodings differ in sizes and costs alone.

    What a consistent graph derives from its structure is shared with the new one. Sizes
    and costs that are out of range are refused, as in any graph.

    Raises:
        GraphError: They are.
    """
    sizes = sum(one.bytes for one in storages) + max(
        (op.workspace.bytes for op in ops), default=0
    )
    flops = max((op.flops for op in ops), default=0)
    seconds = max((op.seconds + op.launch_seconds for op in ops), default=0.0)
    new: dict[str, Any] = {
        "fingerprint": fingerprint,
        "ops": ops,
        "storages": storages,
        "encodings": encodings,
        "tiled": (),  # tests belong to a batch
    }
    if sizes > MOST_BYTES or flops > _MOST_FLOPS or seconds > MOST_SECONDS:
        return replace(graph, **new)
    made = object.__new__(Graph)
    known = {name: getattr(graph, name) for name in (*_FIELDS, *_OF_STRUCTURE)}
    vars(made).update(known | new)
    return made


def costs_of(op: Op) -> tuple[Any, ...]:
    """What of an op is no part of the structure of its step."""
    work = op.workspace, op.flops, op.moved_bytes
    return *work, op.seconds, op.launch_seconds


def with_costs_of(op: Op, other: Op) -> Op:
    """An op with the costs of another; ``replace`` takes several times as long."""
    return Op(
        *(op.name, op.call, op.reads, op.writes, op.outputs),
        *(other.workspace, other.flops, other.moved_bytes, other.seconds),
        *(op.random, other.launch_seconds, op.line, op.is_inside),
    )
