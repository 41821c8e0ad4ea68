"""Tensors that a plan moves off a GPU that computes nothing, whose copies are real.

python tests/helpers/moving_on_dummy_gpu.py to_the_host
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import torch

import ckplan
from ckplan.applying.moving.moved import FILE, Group, Moved
from ckplan.applying.moving.mover import Mover
from ckplan.applying.moving.stores import HOST
from ckplan.errors import ApplyError
from ckplan.plan.file import loads
from ckplan.simulating.moving import IN_FLIGHT, STAGING_BYTES

CUDA = torch.device("cuda", 0)
TEXT = "ckplan: 1\nregions: [{calls: ., offload: [0/addmm]}]"


def counted(what: str) -> int:
    """What the dummy GPU counted of registered host memory."""
    function = getattr(ctypes.CDLL(None), f"dummy_gpu_{what}")
    function.restype = ctypes.c_size_t
    found: int = function()
    return found


def to_the_host() -> None:
    """To pinned memory of the size of what moves."""
    mover = Mover(HOST)
    size = there_and_back(mover)
    assert counted("registered_bytes") == mover.host_bytes >= size
    del mover
    assert counted("registered_bytes") == 0


def behind_the_host() -> None:
    """To a file, through pinned memory of one size."""
    with tempfile.TemporaryDirectory() as folder:
        mover = Mover(Path(folder), device_type="cuda")
        size = there_and_back(mover)
        assert counted("registered_bytes") == mover.host_bytes == STAGING_BYTES
        assert mover.file_bytes >= size > 2 * STAGING_BYTES
        assert not [*Path(folder).iterdir()]
        del mover
        assert counted("registered_bytes") == 0


def there_and_back(mover: Mover) -> int:
    """What leaves the device comes back with its bits, and the device has room."""
    values = [torch.randn(1 << 20) for _ in range(5)]
    live, moved = torch.cuda.memory_allocated(CUDA), list[Moved]()
    for value in values:
        found = mover.encode(FILE, value.to(CUDA))
        assert isinstance(found, Moved)
        moved.append(found)
    aside = torch.cuda.memory_allocated(CUDA) - live
    assert aside == IN_FLIGHT * values[0].nbytes, aside
    group = Group(moved)
    mover.settle()
    assert torch.cuda.memory_allocated(CUDA) == live
    group.ask()
    for one, value in reversed(list(zip(moved, values, strict=True))):
        assert torch.equal(one.decode().cpu(), value)
    size: int = sum(value.nbytes for value in values)
    assert counted("bytes_out") == counted("bytes_back") == size
    return size


def nothing_pinned() -> None:
    """A host that pins nothing is an error before a step."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()).to(CUDA)
    plan = loads(TEXT, "plan")
    ckplan.apply(model, plan, spill=HOST)
    try:
        model(torch.randn(64, 64, device=CUDA))
    except ApplyError as error:
        assert "cannot pin" in error.what, error
    else:
        raise AssertionError("it was pinned")


if __name__ == "__main__":
    tests = (to_the_host, behind_the_host, nothing_pinned)
    {test.__name__: test for test in tests}[sys.argv[1]]()
    os._exit(0)  # such a GPU is no good at shutting down
