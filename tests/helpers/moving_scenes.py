"""What a model that moves tensors goes through, and what finds a line left out."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import Residual
from torch import nn

from ckplan.applying.hooks.attached import attached_to
from ckplan.applying.hooks.session import Session, StepHooks
from ckplan.applying.moving.mover import Mover
from ckplan.applying.moving.room import Room
from ckplan.errors import ApplyError
from ckplan.simulating.moving import IN_FLIGHT

TEXT = """
ckplan: 1
regions:
  - calls: "[0..2]"
    offload: [norm/native_layer_norm@0, up/addmm, drop/div_, drop/div_#1]
"""
ROWS = 64
WHEN = ("at once", "waited for", "late")
Scene = Callable[[nn.Sequential, torch.Tensor], list[torch.Tensor]]


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
    for place in (model[0].norm, model[2]):

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
    """Another process trains while tensors are away, with the same room to fill."""
    backward(model, model(x))
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            os.read(reader, 1)
            backward(model, model(x + 1))
        finally:
            os._exit(0)
    out = model(x)
    os.write(writer, b"1")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    return backward(model, out)


def inherited(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """A fork frees its parent's graph among its own; it may not run that backward."""
    out, other = model(x), model(x + 2)
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            first, _ = model(x), model(x)
            made = []
            with suppress(ApplyError):
                if mover_of(model) is not None:
                    made = backward(model, other)
            if not made:
                del out  # whose room in the file is not this process's
                second = model(x + 1)
                made = backward(model, first) + backward(model, second)
            os.write(writer, pickle.dumps(made))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pickle.loads(pipe.read())


def grown(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Steps without backward: the file must not grow."""
    sizes = set()
    for _ in range(4):
        model(x)
        backward(model, model(x))
        mover = mover_of(model)
        sizes.add(mover.file_bytes + mover.host_bytes if mover else 0)
    return [torch.tensor(len(sizes))]


def held(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Whether moved tensors stay in memory, while forward runs or after it."""
    mover, most = mover_of(model), [0]

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
    return [torch.tensor(len(found) and mover_of(model) is not None)]


def beside(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Backward goes on in another stream than it began."""
    mover = mover_of(model)
    streams: Any = getattr(mover and mover._store, "streams", SimpleNamespace())
    found: list[torch.Tensor] = []
    for _ in range(2):
        out = model[0](x)
        out.register_hook(lambda _: setattr(streams, "now", "side"))
        found += backward(model, model[2](model[1](out)))
        found.append(torch.tensor(mover is None or "side" in streams.recorded))
        streams.now = "main"
    return found


def abandoned(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Backwards that end while copies are on their way back, each before a step."""
    found: list[torch.Tensor] = []
    for place in (2, 1):
        out = model[place].register_full_backward_hook(_fail)
        with suppress(KeyboardInterrupt):
            backward(model, model(x))
        out.remove()
        gc.collect()
        found += backward(model, model(x))
    return found


def _fail(*_: object) -> None:
    raise KeyboardInterrupt


def two_sizes(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Steps of more rows and fewer, whose room has other places."""
    return [g for n in (64, 17, 64, 40) for g in backward(model, model(x[:n]))]


def mover_of(model: nn.Module) -> Mover | None:
    hooks = (one for one in attached_to(model) if isinstance(one, StepHooks))
    return next((one.session.mover for one in hooks), None)


SCENES = (steps, interrupted, parts, grown, held, overwritten)


@cache
def unplanned(scene: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    model, x = build()
    torch.manual_seed(1)
    return scene(model, x)


def goes_right(scene: Scene, model: nn.Sequential, x: torch.Tensor) -> bool:
    """Whether a scene of a planned model has the gradients of the unplanned one."""
    torch.manual_seed(1)
    try:
        found = scene(model, x)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    except UserWarning:
        return False  # a digest of the first forward tells
    expected = unplanned(scene)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def leave_out(
    patch: pytest.MonkeyPatch, owner: type, method: str, old: str, new: str
) -> None:
    """Replace a part of a method, which is there once."""
    function = inspect.unwrap(getattr(owner, method))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    lines = source.replace(old, new).splitlines()
    kept = [line for line in lines if not line.startswith("@")]
    found: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + "\n".join(kept)
    exec(code, function.__globals__, found)
    patch.setattr(owner, method, found[method])


MOVER_LINES: dict[str, tuple[type, str, str, str]] = {
    "free before the copy out ends": (Mover, "settle", "wait(moved.jobs)", "pass"),
    "use before the copy back ends": (Mover, "fetch", "    wait(jobs)", "    pass"),
    "hand over without waiting": (
        *(Mover, "encode", "self.settle(IN_FLIGHT - 1)", "pass"),
    ),
    "read what is not out yet": (Mover, "begin", "self.settle()", "pass"),
    "give one room to two tensors": (
        *(Room, "take", "self._holes.remove((offset, size))", "pass"),
    ),
    "free room that is in use": (
        *(Room, "take", "self.free(offset + needed,", "self.free(offset,"),
    ),
    "do not look for changes": (Mover, "settle", "raise changed_error(moved)", "pass"),
    "forget what was interrupted": (Mover, "forget", "if moved.num_bytes", "if False"),
    "hold the last one until backward": (
        *(Session, "end_step", "self.mover.settle()", "pass"),
    ),
}
"""Lines that wait or keep order on every way to move: name -> what is left out."""
