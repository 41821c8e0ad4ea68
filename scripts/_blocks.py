"""Blocks that ops ask PyTorch's allocator for on a GPU, and what is said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan import gpus
from ckplan.tracing.cuda.workspaces import workspace_of
from ckplan.tracing.recording.recording import RawOp, TensorMeta, describe, meta
from ckplan.units import in_blocks

CUDA = torch.device("cuda", 0)


class AttentionArgs(NamedTuple):
    """One op: sizes of its blocks when they are most, as is said and as it is."""

    said: Counter[int]
    found: Counter[int]
    works: bool  # in blocks beyond those that it returns
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it is given

    @property
    def apart_bytes(self) -> int:
        """How much more is said than was asked for."""
        return total(self.said) - total(self.found)


def total(sizes: Counter[int]) -> int:
    """Bytes of blocks."""
    return sum(size * count for size, count in sizes.items())


class AskedFor(TorchDispatchMode):
    """Looks at every op whose name has a part in common with this one.

    What is said takes an op's outputs as they are.
    """

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.found: dict[str, list[AttentionArgs]] = {}
        self.card = this_card()
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if self._name not in name:
            return func(*args, **(kwargs or {}))
        out, most, left = blocks(lambda: func(*args, **(kwargs or {})))
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        flat = tuple(map(meta, leaves))
        outs = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        returned = tuple(map(describe, outs))
        op = RawOp(func, 0, (), (), (), flat, spec, returned, 0, 0, False, False)
        said = left + Counter(chain(*workspace_of(op, self.card)))
        shapes = tuple(one.shape for one in flat if isinstance(one, TensorMeta))
        self.found.setdefault(name, []).append(
            AttentionArgs(said, most, most != left, shapes)
        )
        return out


def this_card() -> gpus.Gpu:
    """The card that torch takes the GPU for."""
    capability = torch.cuda.get_device_capability(CUDA)
    return next(one for one in gpus.load().values() if one.capability == capability)


def blocks(run: Callable[[], Any]) -> tuple[Any, Counter[int], Counter[int]]:
    """What a call returns; sizes of its blocks at their most, and when it returns."""
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None)
    out = run()
    there: dict[int, int] = {}
    most: dict[int, int] = {}
    for event in torch.cuda.memory._snapshot()["device_traces"][0]:
        if event["action"] == "alloc":
            there[event["addr"]] = in_blocks(event["size"])
        elif event["action"] == "free_completed":
            there.pop(event["addr"], None)
        if sum(there.values()) > sum(most.values()):
            most = dict(there)
    return out, Counter(most.values()), Counter(there.values())
