"""An op that a region ran."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ckplan.applying.tensors.retained import Ref


class Step(NamedTuple):
    """An op that ran."""

    func: Any  # an OpOverload
    args: list[Any]  # tensors as Ref, also inside lists
    kwargs: dict[str, Any]
    generator: torch.Generator | None
    device: torch.device
    in_grad_mode: bool  # some kernels ask: LSTMs keep a workspace
    default_dtype: torch.dtype  # of what is made without a type, or of whole numbers
    returned: tuple[Ref, ...]  # the tensors that it returned
    depth: int  # of these in what it returned: 0 itself, 1 all items, 2 deeper


def depth_of(returned: Any) -> int:
    """Where the tensors lie in what an op returned, as ``Step.depth`` has it."""
    if isinstance(returned, torch.Tensor):
        return 0
    flat = isinstance(returned, (list, tuple))
    return 1 if flat and all(isinstance(x, torch.Tensor) for x in returned) else 2
