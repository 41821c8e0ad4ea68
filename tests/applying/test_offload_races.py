"""Copies that end early, late or not before they are waited for: never other bits.

Lines of the engine that wait or keep order are left out, one at a time. Each such
omission is found, and none is there in the engine as it is.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Residual
from torch import nn

import ckplan
from ckplan.applying.hooks.session import Session
from ckplan.applying.moving import spill_file
from ckplan.applying.moving.mover import Mover
from ckplan.applying.moving.spill_file import SpillFile
from ckplan.errors import ApplyError
from ckplan.plan.file import loads
from ckplan.simulating.moving import IN_FLIGHT

TEXT = """
ckplan: 1
regions:
  - calls: "[0..2]"
    offload: [norm/native_layer_norm@0, up/addmm, drop/div_, drop/div_#1]
"""
ROWS = 64
WHEN = ("at once", "waited for", "late")


class Job:
    """A copy that runs when it is told to, at the latest when it is waited for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def exception(self) -> OSError | None:
        run, self._run = self._run, None
        try:
            return run() if run is not None else None
        except OSError as error:
            return error


class Pool:
    """Runs copies at once, when they are waited for, or some copies later."""

    def __init__(self, when: str, *_: object, **__: object) -> None:
        self._when = when
        self._late: list[Job] = []

    def submit(self, run: Any, address: int, num_bytes: int, offset: int) -> Job:
        if self._when == "late" and run.__name__ == "_write":
            data = ctypes.create_string_buffer(num_bytes)  # the file is late, alone
            ctypes.memmove(data, address, num_bytes)
            job = Job(lambda: run(ctypes.addressof(data), num_bytes, offset))
            self._late.append(job)
            if len(self._late) > IN_FLIGHT + 1:
                self._late.pop(0).exception()
            return job
        job = Job(partial(run, address, num_bytes, offset))
        if self._when == "at once":
            job.exception()
        return job

    def shutdown(self, **_: object) -> None:
        """Forget what nobody waited for."""


def build() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(3))), torch.randn(ROWS, 64)


def backward(model: nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out.square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# -- what a model goes through; each returns gradients -------------------------------


def steps(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Three steps."""
    return [g for n in (1, 2, 3) for g in backward(model, model(x * n))]


def interrupted(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Forwards that end early, each before a step."""
    found = []
    for place in (model[0].norm, model[1], model[2]):

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        handle = place.register_forward_hook(fail)  # type: ignore[operator,union-attr]
        with suppress(KeyboardInterrupt):
            model(x * 3)
        handle.remove()
        gc.collect(1)  # what is young
        torch.manual_seed(1)
        found += backward(model, model(x))
        model(x * 2)  # without backward
    return found


def parts(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Blocks called on their own, and backwards between forwards."""
    first = model[0](x)
    second = model[1](x)
    found = backward(model, second)
    third = model[2](x)
    return found + backward(model, first) + backward(model, third)


def forked(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Another process trains while tensors are away."""
    out = model(x)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            del out  # whose room is free here, and not there
            backward(model, model(x + 1))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return backward(model, out)


def grown(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Steps without backward: the file must not grow."""
    sizes = set()
    for _ in range(4):
        model(x)
        backward(model, model(x))
        sizes.add(_mover(model).file_bytes if _mover(model) else 0)
    return [torch.tensor(len(sizes))]


def held(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Whether moved tensors stay in memory, while forward runs or after it."""
    mover, most = _mover(model), [0]

    def look(*_: object) -> None:
        most.append(len(mover._leaving) if mover else 0)

    handles = [one.register_forward_hook(look) for one in model]
    backward(model, model(x))
    out = model(x)
    look()
    backward(model, out)
    for handle in handles:
        handle.remove()
    return [torch.tensor(max(most) > IN_FLIGHT), torch.tensor(most[-1])]


def overwritten(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """A hook overwrites what moves: an error, or the bits of an unplanned step."""

    def overwrite(module: nn.Module, args: object, out: torch.Tensor) -> None:
        with torch.no_grad():
            out.mul_(2.0)

    handle = model[1].up.register_forward_hook(overwrite)  # type: ignore[union-attr]
    try:
        found = backward(model, model(x))
    except ApplyError:
        found = []
    handle.remove()
    return [torch.tensor(len(found) and _mover(model) is not None)]


def _mover(model: nn.Module) -> Mover | None:
    owners = (
        getattr(one, "__self__", None) for one in model._forward_pre_hooks.values()
    )
    return next((one.mover for one in owners if isinstance(one, Session)), None)


SCENES = (steps, interrupted, parts, forked, grown, held, overwritten)


@cache
def unplanned(scene: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    model, x = build()
    torch.manual_seed(1)
    return scene(model, x)


def is_right(
    scene: Callable[..., list[torch.Tensor]],
    when: str,
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> bool:
    """Whether a scene with a plan has the gradients of the one without."""
    patch.setattr(spill_file, "ThreadPoolExecutor", partial(Pool, when))
    model, x = build()
    ckplan.apply(model, loads(TEXT, "plan"), spill=folder)
    torch.manual_seed(1)
    try:
        found = scene(model, x)
    except (AssertionError, IndexError, TypeError, ValueError, UserWarning):
        return False  # a digest of the first forward may tell, too
    expected = unplanned(scene)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("scene", SCENES)
def test_no_order_of_copies_changes_a_bit(
    scene: Callable[..., list[torch.Tensor]],
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_right(scene, when, tmp_path, monkeypatch)


OMISSIONS: dict[str, tuple[type, str, str, str]] = {
    "free before the copy out ends": (Mover, "settle", "wait(moved.jobs)", "pass"),
    "use before the copy back ends": (Mover, "fetch", "    wait(jobs)", "    pass"),
    "hand over without waiting": (
        Mover,
        "encode",
        "self.settle(IN_FLIGHT - 1)",
        "pass",
    ),
    "read what is not out yet": (Mover, "begin", "self.settle()", "pass"),
    "reuse room that is still written": (*(Mover, "_bury", "job.exception()", "pass"),),
    "give one room to two tensors": (
        *(SpillFile, "allocate", "self._holes.remove((offset, size))", "pass"),
    ),
    "free room that is in use": (
        *(SpillFile, "allocate", "self.free(offset + needed,", "self.free(offset,"),
    ),
    "copy all but the end": (
        SpillFile,
        "_copy",
        "for at in parts",
        "for at in parts[:-1]",
    ),
    "do not look for changes": (Mover, "settle", "raise _changed(moved)", "pass"),
    "write to the file of a parent": (
        *(Mover, "_own_file", "or self._process != os.getpid()", ""),
    ),
    "forget what was interrupted": (Mover, "forget", "moved.num_bytes:", "False:"),
    "hold the last one until backward": (
        *(Session, "end_step", "self.mover.settle()", "pass"),
    ),
    "return from another place": (*(Mover, "_begin_return", "moved.offset)", "0)"),),
}


@pytest.mark.parametrize("name", OMISSIONS)
def test_every_omission_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, old, new = OMISSIONS[name]
    function = inspect.unwrap(getattr(owner, method))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    lines = source.replace(old, new).splitlines()
    kept = [line for line in lines if not line.startswith("@")]
    found: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + "\n".join(kept),
        function.__globals__,
        found,
    )
    monkeypatch.setattr(owner, method, found[method])
    scenes = ((scene, when) for scene in SCENES for when in WHEN)
    assert not all(is_right(*one, tmp_path, monkeypatch) for one in scenes)
