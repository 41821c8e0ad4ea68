"""Free memory of this machine, and limits on its use."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckplan.available import available_bytes

_STATUS = Path("/proc/self/status")


def free_bytes(device: torch.device) -> int:
    """Bytes free for tensors on a device, with the cache of its allocator."""
    if device.type != "cuda":
        return available_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextmanager
def empty_cache_after(device: torch.device) -> Iterator[None]:
    """Free the unused cache of a GPU's allocator afterwards.

    Other processes, such as those that verify a plan, cannot use cached memory.
    """
    try:
        yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Make allocations fail beyond ``num_bytes`` more bytes, on Linux only.

    Without a limit, the system may kill this process or another when memory runs out.
    """
    now = _data_bytes()
    if now is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([now + num_bytes, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    """Bytes that count against the limit now; None if unknown."""
    if not _STATUS.exists():
        return None
    found = re.search(r"VmData:\s*(\d+) kB", _STATUS.read_text())
    return int(found.group(1)) << 10 if found else None
