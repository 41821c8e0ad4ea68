"""Offload of a GPU's tensors to a file, on streams and threads that go as they like.

There is no GPU here: tensors of the CPU stand for those of one, and streams for those
of CUDA. A copy whose stream did not wait for the ops before it copies zeros; one that
nobody waits for does not happen. Parts are small, so that tensors have several. Lines
that wait or keep order are left out, one at a time, and each omission is found.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

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
    interrupted,
    leave_out,
    mover_of,
    overwritten,
    parts,
    steps,
    two_sizes,
)
from torch import nn

import ckplan
from ckplan.applying.moving import file_behind_host, spill_file, stores
from ckplan.applying.moving.file_behind_host import FileBehindHost
from ckplan.applying.moving.host_memory import as_bytes
from ckplan.applying.moving.mover import Mover
from ckplan.errors import ApplyError
from ckplan.plan.file import loads
from ckplan.plan.plan import Plan, Prediction
from ckplan.simulating.moving import IN_FLIGHT, STAGING_BYTES

THREADS = "threads"
PART_BYTES = 8192


class Streams:
    """Streams of a GPU that is the CPU; copies happen when they are waited for."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.now = "main"  # the stream that ops run on
        self.recorded: list[str] = []
        self.pinned: list[int] = []
        self.broken: list[str] = []  # what jobs asserted
        self.num_streams = 0
        self._waited = threading.local()

    def current(self, device: torch.device) -> str:
        return self.now

    def create(self, device: torch.device) -> str:
        self.num_streams += 1
        return f"copies {self.num_streams}"

    def wait_stream(self, stream: str, other: str) -> None:
        raise AssertionError("threads wait for what was recorded")

    def record(self, stream: str) -> str:
        assert threading.current_thread() is threading.main_thread()
        return stream

    def wait_event(self, stream: str, event: str) -> None:
        self._waited.stream = stream

    def record_stream(self, tensor: torch.Tensor, stream: str) -> None:
        self.recorded.append(stream)

    def synchronize(self, event: Callable[[], None]) -> None:
        event()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.001)  # another thread may go on

    def copy_out(
        self, stream: str, host: torch.Tensor, tensor: torch.Tensor, start: int = 0
    ) -> Callable[[], None]:
        return self._copy(stream, host, as_bytes(tensor)[start : start + len(host)])

    def copy_back(
        self, stream: str, tensor: torch.Tensor, host: torch.Tensor, start: int = 0
    ) -> Callable[[], None]:
        return self._copy(stream, as_bytes(tensor)[start : start + len(host)], host)

    def pin(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        self.pinned.append(num_bytes)
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        return memory, lambda: self.pinned.remove(num_bytes)

    def _copy(
        self, stream: str, target: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], None]:
        waited = getattr(self._waited, "stream", None) == stream
        self._waited.stream = None
        return partial(target.copy_, source if waited else torch.zeros_like(source))


class Job:
    """A job that runs when it is told to, at the latest when it is waited for."""

    def __init__(self, run: Callable[[], None], broken: list[str]) -> None:
        self._run: Callable[[], None] | None = run
        self._broken = broken
        self._error: BaseException | None = None

    def exception(self) -> BaseException | None:
        run, self._run = self._run, None
        try:
            if run is not None:
                run()
        except OSError as error:
            self._error = error
        except AssertionError as error:
            self._broken.append(str(error))
        return self._error


class Pool:
    """Runs jobs at once or when they are waited for, or writes some writes later."""

    def __init__(self, when: str, broken: list[str], *_: object, **__: object) -> None:
        self._when, self._broken = when, broken
        self._late: list[Job] = []

    def submit(self, run: Any, *args: Any) -> Job:
        job = Job(partial(run, *args), self._broken)
        if self._when == "late" and run.__name__ == "_write":
            self._late.append(job)
            if len(self._late) > 2 * (IN_FLIGHT + 1):  # tensors have two parts
                self._late.pop(0).exception()
        elif self._when != "waited for":
            job.exception()
        return job

    def shutdown(self, **_: object) -> None:
        """Forget what nobody waited for."""


def planned(
    when: str, folder: Path, patch: pytest.MonkeyPatch, plan: Plan | None = None
) -> tuple[nn.Sequential, torch.Tensor, Streams]:
    streams = Streams()
    pool: Any = partial(Pool, when, streams.broken)
    if when == THREADS:
        pool = ThreadPoolExecutor
    patch.setattr(spill_file, "ThreadPoolExecutor", pool)
    patch.setattr(file_behind_host, "PART_BYTES", PART_BYTES)
    patch.setattr(file_behind_host, "STAGING_BYTES", PART_BYTES * spill_file.THREADS)
    patch.setattr(stores, "SpillFile", partial(FileBehindHost, streams=streams))
    model, x = build()
    ckplan.apply(model, plan or loads(TEXT, "plan"), spill=folder)
    return model, x, streams


def is_right(scene: Scene, when: str, folder: Path, patch: pytest.MonkeyPatch) -> bool:
    model, x, streams = planned(when, folder, patch)
    right = goes_right(scene, model, x) and not streams.broken
    return right and not [*folder.iterdir()]


def failing(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """The disk fails once: an error, then steps as ever."""
    out = model(x)
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        patch.setattr(os, "preadv", fail)
        try:
            backward(model, out)
        except ApplyError as error:
            assert "Input/output error" in error.what
            failed = True
        else:
            failed = mover_of(model) is None
    del out
    return [torch.tensor(failed), *backward(model, model(x))]


ALL = (*SCENES, beside, abandoned, two_sizes, failing)


@pytest.mark.parametrize("when", (*WHEN, THREADS))
@pytest.mark.parametrize("scene", ALL)
def test_no_order_of_copies_changes_a_bit(
    scene: Scene, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(scene, when, tmp_path, monkeypatch)


_COPY = file_behind_host._Copy
OMISSIONS: dict[str, tuple[Scene, str, type, str, str, str]] = {
    "copy out before the op has run": (
        *(steps, "late", FileBehindHost, "_write"),
        *("streams.wait_event(way.stream, way.ready)", "pass"),
    ),
    "copy to a block that is still used": (
        *(steps, "late", FileBehindHost, "_read"),
        *("streams.wait_event(way.stream, way.ready)", "pass"),
    ),
    "write what is not out of the device yet": (
        *(steps, "late", FileBehindHost, "_write"),
        *("streams.synchronize(streams.copy_out", "(streams.copy_out"),
    ),
    "end before the device has it back": (
        *(steps, "late", FileBehindHost, "_read"),
        *("streams.synchronize(streams.copy_back", "(streams.copy_back"),
    ),
    "free a block that another stream uses": (
        *(beside, "late", _COPY, "exception"),
        *("self.streams.record_stream(self.tensor, current)", "pass"),
    ),
    "wait for no thread": (
        *(steps, "late", _COPY, "exception"),
        *("[part.exception() for part in self.parts]", "[]"),
    ),
    "wait for the first part alone": (
        *(steps, "late", _COPY, "exception"),
        *("in self.parts]", "in self.parts[:1]]"),
    ),
    "tell no error": (
        *(failing, "late", _COPY, "exception"),
        *("if error is not None", "if False"),
    ),
    "give one buffer to both threads": (
        *(steps, THREADS, FileBehindHost, "__init__"),
        *("self._memory[start : start + PART_BYTES]", "self._memory[:PART_BYTES]"),
    ),
    "write all parts to one place": (
        *(steps, "late", FileBehindHost, "write", "offset + start)", "offset)"),
    ),
    "copy the first part to all": (
        *(steps, "late", FileBehindHost, "_read", "part, start)", "part)"),
    ),
    "free before the copy out ends": (
        *(steps, "late", *MOVER_LINES["free before the copy out ends"]),
    ),
    "use before the copy back ends": (
        *(steps, "waited for", *MOVER_LINES["use before the copy back ends"]),
    ),
    "hand over without waiting": (
        *(held, "late", *MOVER_LINES["hand over without waiting"]),
    ),
    "read what is not out yet": (
        *(parts, "late", *MOVER_LINES["read what is not out yet"]),
    ),
    "reuse room that is still written": (
        *(interrupted, "late", Mover, "_bury", "job.exception()", "pass"),
    ),
    "do not look for changes": (
        *(overwritten, "late", *MOVER_LINES["do not look for changes"]),
    ),
    "forget what was interrupted": (
        *(grown, "late", *MOVER_LINES["forget what was interrupted"]),
    ),
}
"""Name -> a scene that finds it, when copies happen, and what is left out."""


@pytest.mark.parametrize("name", OMISSIONS)
def test_every_omission_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, when, owner, method, old, new = OMISSIONS[name]
    leave_out(monkeypatch, owner, method, old, new)
    assert not is_right(scene, when, tmp_path, monkeypatch)


def test_host_memory_is_the_same_for_every_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, streams = planned(THREADS, tmp_path, monkeypatch)
    assert streams.pinned == [2 * PART_BYTES]  # before the first step
    for _ in range(3):
        backward(model, model(x))
    status = ckplan.status(model)
    assert streams.pinned == [status.host_bytes]
    assert status.spilled_bytes > 10 * status.host_bytes
    assert streams.num_streams == 2
    ckplan.remove(model)
    del model
    gc.collect()
    assert not streams.pinned


def test_a_thread_has_a_buffer_of_whole_blocks() -> None:
    assert STAGING_BYTES == spill_file.THREADS * file_behind_host.PART_BYTES
    assert file_behind_host.PART_BYTES % spill_file.BLOCK == 0


# -- bad input -----------------------------------------------------------------------


def test_a_full_disk_is_an_error_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    known = Prediction(1, "", 0.0, 1, moved_bytes=2**30)
    plan = Plan(regions=loads(TEXT, "plan").regions, predicted=known)
    with pytest.raises(ApplyError, match=r"cannot spill 1\.00 GiB .* No space left"):
        planned("late", tmp_path, monkeypatch, plan)
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_is_full_later_damages_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, _ = planned(THREADS, tmp_path, monkeypatch)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ApplyError, match="No space left"):
            model(x)
    assert goes_right(steps, model, x)


def test_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ApplyError, match=r"cannot spill to .*No such file"):
        planned("late", tmp_path / "none", monkeypatch)


def test_a_device_without_pinned_memory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Streams, num_bytes: int) -> None:
        raise ApplyError("cannot pin", needed="a device", hint="another")

    monkeypatch.setattr(Streams, "pin", refuse)
    with pytest.raises(ApplyError, match="cannot pin"):
        planned("late", tmp_path, monkeypatch)
    assert not [*tmp_path.iterdir()]


def test_a_plan_made_for_a_file_goes_to_no_host_by_itself() -> None:
    known = Prediction(1, "", 0.0, 1, moved_bytes=2**30, host_bytes=STAGING_BYTES)
    plan = Plan(
        fingerprint={"device": "cuda"},
        regions=loads(TEXT, "plan").regions,
        predicted=known,
    )
    with pytest.raises(ApplyError, match="to a file, and no folder is given"):
        ckplan.apply(build()[0], plan)
