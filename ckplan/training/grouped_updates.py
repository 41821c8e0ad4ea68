"""The update of an optimizer in groups of parameters, so that temporaries stay small.

The ``foreach`` kernels of ``torch.optim`` update all parameters at once and make lists
of temporaries as large as the parameters, once or twice. In groups, these lists are as
large as a group. Every parameter is updated by the same ops on the same numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from ckplan import units
from ckplan.errors import ApplyError

_GROUP_BYTES = "_ckplan_group_bytes"


def update_in_groups(
    optimizer: torch.optim.Optimizer, size: str | int | None
) -> torch.optim.Optimizer:
    """Let an optimizer of ``torch.optim`` take its step in groups of parameters.

    Parameter groups, state and ``state_dict`` stay as they are. A copy of the optimizer
    takes its steps whole.

    Args:
        optimizer: One that has ``foreach`` kernels; with others, nothing is saved.
        size: Most bytes of the parameters of a group, such as ``"64MiB"``; a larger
            parameter is a group of its own. None: the whole step again.

    Returns:
        The same optimizer.

    Raises:
        ApplyError: It is no optimizer of ``torch.optim`` with ``foreach`` kernels (it
            is not known to update parameters apart), or the size is not above 0.
        UnitError: The size cannot be read.
    """
    _check(optimizer)
    group_bytes = None if size is None else units.parse_bytes(size)
    if group_bytes is not None and group_bytes <= 0:
        raise ApplyError(
            f"cannot update groups of {size}: no parameter fits",
            needed="the bytes of the parameters of a group, more than 0",
            hint="ckplan.update_in_groups(optimizer, '64MiB')",
        )
    known = vars(optimizer)
    if _GROUP_BYTES not in known:
        optimizer.step = MethodType(_in_groups(optimizer.step), optimizer)
    known[_GROUP_BYTES] = group_bytes
    return optimizer


def _in_groups(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that finds the groups of parameters divided."""

    @functools.wraps(step)  # schedulers mark the step that they have seen
    def in_groups(
        self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        groups, most = self.param_groups, vars(self)[_GROUP_BYTES]
        if most is not None:
            self.param_groups = [*_split(groups, most)]
        try:
            return step() if closure is None else step(closure)
        finally:
            self.param_groups = groups

    return in_groups


def _split(groups: list[dict[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    """The groups with at most so many bytes of parameters each, in order."""
    for group in groups:
        part: list[torch.Tensor] = []
        held = 0
        for parameter in group["params"]:
            if part and held + parameter.nbytes > most:
                yield {**group, "params": part}
                part, held = [], 0
            part.append(parameter)
            held += parameter.nbytes
        yield {**group, "params": part}


def _check(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    is_known = isinstance(optimizer, torch.optim.Optimizer)
    is_known = is_known and f"{kind.__module__}.".startswith("torch.optim.")
    if is_known and "foreach" in inspect.signature(kind).parameters:
        return
    raise ApplyError(
        f"cannot update {kind.__name__} in groups: it has no foreach kernels of torch",
        needed="an optimizer of torch.optim with foreach, such as AdamW",
        hint="torch.optim.AdamW(model.parameters(), foreach=True)",
    )
