"""Tensors that a plan moves off a GPU that computes nothing, whose copies are real.

python tests/helpers/moving_on_dummy_gpu.py there_and_back
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

import ckplan
from ckplan.applying.moving.mover import FILE, HOST, Group, Moved, Mover
from ckplan.errors import ApplyError
from ckplan.plan.file import loads
from ckplan.simulating.moving import IN_FLIGHT

CUDA = torch.device("cuda", 0)
TEXT = "ckplan: 1\nregions: [{calls: ., offload: [0/addmm]}]"


def counted(what: str) -> int:
    """What the dummy GPU counted of registered host memory."""
    function = getattr(ctypes.CDLL(None), f"dummy_gpu_{what}")
    function.restype = ctypes.c_size_t
    found: int = function()
    return found


def there_and_back() -> None:
    """What leaves the device comes back with its bits, and the device has room."""
    mover = Mover(HOST)
    values = [torch.randn(1 << 18) for _ in range(4)]
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
    size = sum(value.nbytes for value in values)
    assert counted("bytes_out") == counted("bytes_back") == size
    assert counted("registered_bytes") == mover.host_bytes >= size
    del mover, group, moved, one, found
    assert counted("registered_bytes") == 0


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
    tests = (there_and_back, nothing_pinned)
    {test.__name__: test for test in tests}[sys.argv[1]]()
    os._exit(0)  # such a GPU is no good at shutting down
