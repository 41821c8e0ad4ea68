"""Workspaces of cuBLAS, which torch takes from its caching allocator.

Until torch 2.14, every thread keeps its workspace after its first multiplication: one
for forward, one for backward. Before 2.12, ops that add a bias keep another one for
cuBLASLt. If backward's thread needs a workspace only to recompute forward's ops, it
depends on the plan: see ``Graph.unused_workspaces``. Since 2.15 every multiplication
allocates its own workspace and frees it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ckplan.graph.records import MULTIPLIES
from ckplan.tracing.cuda.translation import Capability
from ckplan.tracing.recording.recording import TensorMeta

WORKSPACE_BYTES = (2 * 4096 + 8 * 16) << 10
"""Torch's default, ``:4096:2:16:8``."""
WORKSPACE_BYTES_SINCE_HOPPER = (8 * 4096) << 10
LT_WORKSPACE_BYTES = 1 << 20
WORKSPACE_PERSISTS = torch.__version__ < (2, 15)
_LT_IS_APART = torch.__version__ < (2, 12)
_LOW = (torch.float16, torch.bfloat16)


def workspace_bytes(capability: Capability) -> int:
    """Bytes of cuBLAS's workspace on a GPU of this capability."""
    since_hopper = capability >= (9, 0)
    return WORKSPACE_BYTES_SINCE_HOPPER if since_hopper else WORKSPACE_BYTES


def kept_bytes(capability: Capability, names: Collection[str]) -> list[int]:
    """Bytes of each workspace that a thread keeps after its first multiplication.

    Args:
        capability: Compute capability of the GPU.
        names: Names of the ops that the thread runs.
    """
    found: list[int] = []
    if WORKSPACE_PERSISTS and MULTIPLIES & {*names}:
        found.append(workspace_bytes(capability))
    if _LT_IS_APART and "addmm" in names:
        found.append(LT_WORKSPACE_BYTES)
    return found


def temporary_blocks(
    name: str, tensors: Collection[TensorMeta], capability: Capability
) -> tuple[int, ...]:
    """Blocks that one multiplication allocates while it runs."""
    if WORKSPACE_PERSISTS:
        return ()
    added = next(iter(tensors))
    wide = all(tensor.shape[-1:] != (1,) for tensor in tensors)
    of_lt = name == "addmm" and wide and (len(added.shape) == 1 or added.dtype in _LOW)
    return (LT_WORKSPACE_BYTES if of_lt else workspace_bytes(capability),)
