"""Traits of an op that a recorder needs, looked up once."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ckplan.graph.records import BATCH_NORMS
from ckplan.training.randomness import may_draw
from ckplan.training.uninitialized import ignores_old_content, returns_uninitialized

RUNNING_STATISTICS = slice(3, 5)  # arguments of all three, as is the next
TRAINING = 5


class OpTraits(NamedTuple):
    """Facts of an op that no argument changes."""

    name: str
    makes_nothing: bool  # a view, others' bytes, or only asks, perhaps under a lock
    writes: tuple[tuple[int, str], ...]  # arguments changed in place
    in_place: bool  # the first of them is its input; others are filled, as noise is
    may_draw: bool
    batch_norm: bool
    dynamic: bool  # output shapes may depend on data
    ignores_old_content: bool  # overwrites without reading
    returns_uninitialized: bool  # for others to fill
    collective: bool  # its schema does not declare its writes


@cache
def traits_of(func: Any) -> OpTraits:
    """Look up the traits of an op."""
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = func.overloadpacket.__name__
    return OpTraits(
        name=name,
        makes_nothing=func.is_view or func.namespace == "prim" or name == "set_",
        writes=writes,
        in_place=name.endswith("_"),
        may_draw=may_draw(func),
        batch_norm=name in BATCH_NORMS,
        dynamic=torch.Tag.dynamic_output_shape in func.tags,
        ignores_old_content=ignores_old_content(func),
        returns_uninitialized=returns_uninitialized(func),
        collective=func.namespace == "c10d",
    )
