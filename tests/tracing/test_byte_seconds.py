"""Seconds to move a byte, measured once per machine and number of threads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ckplan.tracing.costs import byte_seconds as measuring
from ckplan.tracing.costs.byte_seconds import KEY, byte_seconds
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE, cost_cache


def test_they_are_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    found = byte_seconds()
    assert 1e-13 < found < 1e-8  # 0.1 GB/s to 10 TB/s
    kept = cost_cache(torch.device("cpu")).known_runs(KEY)
    assert min(kept) <= found <= max(kept)
    monkeypatch.setattr(measuring, "_measured", lambda: pytest.fail("again"))
    assert byte_seconds() == found


def test_numbers_of_threads_have_seconds_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            monkeypatch.setattr(measuring, "_measured", partial(tuple, [1.0 / threads]))
            found.append(byte_seconds())
    finally:
        torch.set_num_threads(before)
    assert found == [1.0, 0.5]
