"""What a recorder must know of an op, looked up once."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ckplan.graph.records import BATCH_NORMS
from ckplan.training.randomness import may_draw
from ckplan.training.uninitialized import fills, makes_empty

RUNNING_STATISTICS = slice(3, 5)  # arguments of all three, as is the next
TRAINING = 5


class Facts(NamedTuple):
    """Facts of an op that no argument changes."""

    name: str
    makes_nothing: bool  # a view, or only asks, perhaps while torch holds a lock
    writes: tuple[tuple[int, str], ...]  # arguments changed in place
    may_draw: bool
    batch_norm: bool
    dynamic: bool  # values may decide how much it returns
    fills: bool  # where it writes, what was there does not matter
    makes_empty: bool  # for others to fill
    collective: bool  # its schema is silent on what it changes


@cache
def facts_of(func: Any) -> Facts:
    """Look them up."""
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = func.overloadpacket.__name__
    return Facts(
        name=name,
        makes_nothing=func.is_view or func.namespace == "prim",
        writes=writes,
        may_draw=may_draw(func),
        batch_norm=name in BATCH_NORMS,
        dynamic=torch.Tag.dynamic_output_shape in func.tags,
        fills=fills(func),
        makes_empty=makes_empty(func),
        collective=func.namespace == "c10d",
    )
