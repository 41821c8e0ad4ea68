"""Whether other programs run while something is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckplan.tracing.costs import spread
from ckplan.tracing.costs.spread import OtherPrograms


@pytest.mark.parametrize(
    ("wall", "everything", "own", "busy"),
    [
        (10.0, 13.0, 10.0, False),  # of four cores, less than a tenth
        (10.0, 15.0, 10.0, True),
        (10.0, 40.0, 40.0, False),  # this process alone
        (0.2, 0.8, 0.2, False),  # too short to tell
    ],
)
def test_a_tenth_of_all_cores_is_busy(
    monkeypatch: pytest.MonkeyPatch,
    wall: float,
    everything: float,
    own: float,
    busy: bool,
) -> None:
    clocks = iter([(7.0, 900.0, 50.0), (7.0 + wall, 900.0 + everything, 50.0 + own)])
    monkeypatch.setattr(spread, "_clocks", lambda: spread._Clocks(*next(clocks)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert OtherPrograms().are_busy() is busy


def test_time_in_which_cores_were_busy_is_that_of_linux(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(spread, "_STAT", stat)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    stat.write_text("cpu  100 20 30 5000 6000 4 5 41 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    found = spread._clocks()
    assert found is not None
    assert found.all_programs == 2.0  # not what was idle, or waited for a disk


@pytest.mark.parametrize("content", [None, "", "cpu 1 2\n", "cpu a b c d e f g h\n"])
def test_nobody_is_busy_where_the_system_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    monkeypatch.setattr(spread, "_STAT", tmp_path / "stat")
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert not OtherPrograms().are_busy()


@pytest.mark.skipif(not spread._STAT.exists(), reason="only Linux says")
def test_a_program_beside_this_one_is_seen() -> None:
    count = os.cpu_count() or 1
    code = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        time.sleep(0.2)
        seen = OtherPrograms()
        time.sleep(1.0)
        assert seen.are_busy()
    finally:
        for one in others:
            one.kill()
            one.wait()
