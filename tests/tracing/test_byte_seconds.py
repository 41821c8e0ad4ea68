"""Seconds to move a byte: how much faster threads are is measured once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from ckplan.tracing.costs import byte_seconds as measuring
from ckplan.tracing.costs.byte_seconds import KEY, byte_seconds
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE, cost_cache


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_what_threads_gain_is_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    torch.set_num_threads(1)
    of_one = byte_seconds()
    torch.set_num_threads(2)
    found = byte_seconds()
    assert 0.1 * of_one < found <= of_one  # two are at most twice as fast, and noise
    assert torch.get_num_threads() == 2
    kept = cost_cache(torch.device("cpu")).known_runs(KEY)
    assert min(kept) <= found / of_one <= max(kept)
    monkeypatch.setattr(measuring, "_measured", lambda: pytest.fail("again"))
    assert byte_seconds() == found


def test_numbers_of_threads_have_seconds_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    found = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        monkeypatch.setattr(measuring, "_measured", partial(tuple, [1.0 / threads]))
        found[threads] = byte_seconds()
    assert found[2] == pytest.approx(found[1] / 2)
    assert found[3] == pytest.approx(found[1] / 3)
