"""Copies that end early, late or not before they are waited for: never other bits.

Lines of the engine that wait or keep order are left out, one at a time. Each such
omission is found, and none is there in the engine as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from moving_scenes import (
    MOVER_LINES,
    SCENES,
    TEXT,
    WHEN,
    Scene,
    build,
    forked,
    goes_right,
    grown,
    held,
    inherited,
    interrupted,
    leave_out,
    overwritten,
    parts,
    steps,
)

import ckplan
from ckplan.applying.moving import spill_file
from ckplan.applying.moving.mover import Mover
from ckplan.applying.moving.spill_file import SpillFile
from ckplan.plan.file import loads
from ckplan.simulating.moving import IN_FLIGHT


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


def is_right(scene: Scene, when: str, folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Whether a scene with a plan has the gradients of the one without."""
    patch.setattr(spill_file, "ThreadPoolExecutor", partial(Pool, when))
    model, x = build()
    ckplan.apply(model, loads(TEXT, "plan"), spill=folder)
    return goes_right(scene, model, x)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("scene", (*SCENES, forked, inherited))
def test_no_order_of_copies_changes_a_bit(
    scene: Scene,
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_right(scene, when, tmp_path, monkeypatch)


OMISSIONS: dict[str, tuple[Scene, type, str, str, str]] = {
    "free before the copy out ends": (
        steps,
        *MOVER_LINES["free before the copy out ends"],
    ),
    "use before the copy back ends": (
        steps,
        *MOVER_LINES["use before the copy back ends"],
    ),
    "hand over without waiting": (held, *MOVER_LINES["hand over without waiting"]),
    "read what is not out yet": (parts, *MOVER_LINES["read what is not out yet"]),
    "reuse room that is still written": (
        interrupted,
        *(Mover, "_bury", "job.exception()", "pass"),
    ),
    "give one room to two tensors": (
        steps,
        *MOVER_LINES["give one room to two tensors"],
    ),
    "free room that is in use": (steps, *MOVER_LINES["free room that is in use"]),
    "copy all but the end": (
        steps,
        SpillFile,
        "_copy",
        "for at in parts",
        "for at in parts[:-1]",
    ),
    "do not look for changes": (overwritten, *MOVER_LINES["do not look for changes"]),
    "write to the file of a parent": (
        forked,
        *(Mover, "_own_store", "or self._process != os.getpid()", ""),
    ),
    "free the room of a parent": (
        inherited,
        *(Mover, "forget", "and moved.process == os.getpid()", ""),
    ),
    "return what a parent moved": (
        inherited,
        *(Mover, "fetch", "if moved.process != os.getpid():", "if False:"),
    ),
    "forget what was interrupted": (grown, *MOVER_LINES["forget what was interrupted"]),
    "hold the last one until backward": (
        held,
        *MOVER_LINES["hold the last one until backward"],
    ),
    "return from another place": (
        steps,
        *(Mover, "_begin_return", "moved.offset)", "0)"),
    ),
}
"""Name -> a scene that finds it, and what is left out."""


@pytest.mark.parametrize("name", OMISSIONS)
def test_every_omission_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, *what = OMISSIONS[name]
    leave_out(monkeypatch, *what)
    assert not is_right(scene, "late", tmp_path, monkeypatch)
