"""Offload to host memory, on streams that run copies when they like.

There is no GPU here, so tensors of the CPU stand for those of a GPU, and streams for
those of CUDA. A copy that did not wait for the ops before it copies zeros, as does one
whose tensor is gone; others happen at once, late, or not before they are waited for.
Lines that wait or keep order are left out, one at a time, and each omission is found.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from moving_scenes import (
    MOVER_LINES,
    SCENES,
    TEXT,
    WHEN,
    Scene,
    abandoned,
    backward,
    beside,
    build,
    goes_right,
    grown,
    held,
    leave_out,
    overwritten,
    parts,
    two_sizes,
)
from torch import nn

import ckplan
from ckplan.applying.moving import host_memory
from ckplan.applying.moving.host_memory import HostMemory, as_bytes
from ckplan.applying.moving.mover import Mover
from ckplan.errors import ApplyError
from ckplan.plan.file import loads
from ckplan.plan.plan import Plan, Prediction
from ckplan.simulating.moving import IN_FLIGHT, host_bytes_for


class Streams:
    """Streams of a GPU that is the CPU."""

    device_type = "cpu"

    def __init__(self, when: str) -> None:
        self._when = when
        self.now = "main"  # the stream that ops run on
        self._ticks = 0  # of ops
        self._waited: dict[str, int] = {}  # stream -> ticks that it waited for
        self._begun: dict[str, list[Callable[[], None]]] = {}
        self._done: dict[str, int] = {}
        self.recorded: list[str] = []
        self.pinned: list[int] = []

    def current(self, device: torch.device) -> str:
        self._ticks += 1
        return self.now

    def create(self, device: torch.device) -> str:
        name = f"copies {len(self._begun)}"
        self._begun[name], self._done[name] = [], 0
        return name

    def wait_stream(self, stream: str, other: str) -> None:
        assert other == self.now
        self._waited[stream] = self._ticks

    def wait_event(self, stream: str, event: tuple[str, int]) -> None:
        if stream == self.now:
            self._run(*event)

    def record_stream(self, tensor: torch.Tensor, stream: str) -> None:
        self.recorded.append(stream)

    def record(self, stream: str) -> tuple[str, int]:
        return stream, self._ticks

    def synchronize(self, event: tuple[str, int]) -> None:
        self._run(*event)

    def copy_out(
        self, stream: str, host: torch.Tensor, tensor: torch.Tensor, start: int = 0
    ) -> tuple[str, int]:
        return self._begin(stream, partial(_copy_out, host, ref(tensor)))

    def copy_back(
        self, stream: str, tensor: torch.Tensor, host: torch.Tensor, start: int = 0
    ) -> tuple[str, int]:
        return self._begin(stream, partial(_copy_back, ref(tensor), host))

    def pin(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        self.pinned.append(num_bytes)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory, lambda: self.pinned.remove(num_bytes)

    def _begin(self, stream: str, copy: Callable[[bool], None]) -> tuple[str, int]:
        waited = self._waited.get(stream) == self._ticks
        self._begun[stream].append(partial(copy, waited))
        event = stream, len(self._begun[stream])
        if self._when == "at once":
            self._run(*event)
        elif self._when == "late":
            self._run(stream, event[1] - IN_FLIGHT - 1)
        return event

    def _run(self, stream: str, stop: int) -> None:
        while self._done[stream] < stop:
            self._done[stream] += 1
            self._begun[stream][self._done[stream] - 1]()


def _copy_out(
    host: torch.Tensor, tensor: Callable[[], torch.Tensor | None], waited: bool
) -> None:
    found = tensor()
    with torch.no_grad():
        if found is None or not waited:
            host.zero_()
        else:
            host.copy_(as_bytes(found))


def _copy_back(
    tensor: Callable[[], torch.Tensor | None], host: torch.Tensor, waited: bool
) -> None:
    found = tensor()
    if found is None:
        raise AssertionError("a copy ended in memory that was given back")
    with torch.no_grad():
        if waited:
            as_bytes(found).copy_(host)
        else:
            as_bytes(found).zero_()


def planned(
    when: str, patch: pytest.MonkeyPatch, plan: Plan | None = None
) -> tuple[nn.Sequential, torch.Tensor, Streams]:
    streams = Streams(when)
    patch.setattr(host_memory, "CudaStreams", lambda: streams)
    model, x = build()
    ckplan.apply(model, plan or loads(TEXT, "plan"), spill="host")
    return model, x, streams


ALL = (*SCENES, beside, abandoned, two_sizes)


def is_right(scene: Scene, when: str, patch: pytest.MonkeyPatch) -> bool:
    model, x, _ = planned(when, patch)
    return goes_right(scene, model, x)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("scene", ALL)
def test_no_order_of_copies_changes_a_bit(
    scene: Scene, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(scene, when, monkeypatch)


OMISSIONS: dict[str, tuple[Scene, type, str, str, str]] = {
    "copy out before the op has run": (
        parts,
        *(HostMemory, "write", "streams.wait_stream(stream, owner)", "pass"),
    ),
    "copy to a block that is still used": (
        parts,
        *(HostMemory, "read", "streams.wait_stream(stream, owner)", "pass"),
    ),
    "wait on no stream": (
        parts,
        host_memory._Copy,
        *("exception", "self.streams.wait_event(self.owner, self.event)", "pass"),
    ),
    "use on a stream that did not wait": (
        beside,
        host_memory._Copy,
        *("exception", "self.streams.wait_event(current, self.event)", "pass"),
    ),
    "free a block that another stream uses": (
        beside,
        host_memory._Copy,
        *("exception", "self.streams.record_stream(self.tensor, current)", "pass"),
    ),
    "free before the copy out ends": (
        parts,
        *MOVER_LINES["free before the copy out ends"],
    ),
    "use before the copy back ends": (
        parts,
        *MOVER_LINES["use before the copy back ends"],
    ),
    "hand over without waiting": (held, *MOVER_LINES["hand over without waiting"]),
    "read what is not out yet": (parts, *MOVER_LINES["read what is not out yet"]),
    "give up a copy that nobody wants": (
        abandoned,
        Mover,
        "_bury",
        "job.exception()",
        "pass",
    ),
    "give one room to two tensors": (
        parts,
        *MOVER_LINES["give one room to two tensors"],
    ),
    "free room that is in use": (two_sizes, *MOVER_LINES["free room that is in use"]),
    "take the wrong pinned bytes": (
        two_sizes,
        HostMemory,
        "_bytes",
        "offset - at",
        "0",
    ),
    "do not look for changes": (overwritten, *MOVER_LINES["do not look for changes"]),
    "forget what was interrupted": (grown, *MOVER_LINES["forget what was interrupted"]),
    "hold the last one until backward": (
        held,
        *MOVER_LINES["hold the last one until backward"],
    ),
    "return from another place": (
        two_sizes,
        Mover,
        "_begin_return",
        "moved.offset)",
        "64)",
    ),
}
"""Name -> a scene that finds it, and what is left out."""


@pytest.mark.parametrize("name", OMISSIONS)
def test_every_omission_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, owner, method, old, new = OMISSIONS[name]
    leave_out(monkeypatch, owner, method, old, new)
    assert not is_right(scene, "late", monkeypatch)


def test_memory_is_pinned_once_by_the_size_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, _ = planned("late", monkeypatch)
    backward(model, model(x))
    moved_bytes = ckplan.status(model).host_bytes  # as tensors move, one by one
    plan = loads(TEXT, "plan")
    known = Prediction(1, "", 0.0, 1, moved_bytes=moved_bytes)
    plan = Plan(regions=plan.regions, predicted=known)
    model, x, streams = planned("late", monkeypatch, plan)
    for _ in range(3):
        backward(model, model(x))
    (pinned,) = streams.pinned
    assert moved_bytes <= pinned == ckplan.status(model).host_bytes
    assert pinned <= 1.02 * moved_bytes
    assert abs(pinned - host_bytes_for(moved_bytes)) < host_memory.BLOCK
    ckplan.remove(model)
    del model
    gc.collect()
    assert not streams.pinned


# -- bad input -----------------------------------------------------------------------


def test_a_host_without_room_is_an_error_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Prediction(1, "", 0.0, 1, moved_bytes=2**60)
    plan = Plan(regions=loads(TEXT, "plan").regions, predicted=known)
    with pytest.raises(
        ApplyError, match=r"1090519040\.00 GiB to host memory.*available"
    ):
        planned("late", monkeypatch, plan)


def test_without_a_gpu_there_is_no_host_to_move_to() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    model, _ = build()
    with pytest.raises(ApplyError, match="there is no GPU here"):
        ckplan.apply(model, loads(TEXT, "plan"), spill="host")
    with pytest.raises(ckplan.CkplanError, match="has no plan"):
        ckplan.status(model)


def test_a_device_without_pinned_memory_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuses = SimpleNamespace(cudaHostRegister=lambda *_: 801)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuses)
    with pytest.raises(ApplyError, match=r"cannot pin 1\.02 MiB .* \(CUDA's error 801"):
        HostMemory(2**20)


def test_a_tensor_that_is_on_the_host_already_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Streams, "device_type", "cuda")
    model, x, _ = planned("late", monkeypatch)
    with pytest.raises(ApplyError, match="cannot move a tensor of cpu to the host"):
        model(x)
