"""Seconds of random numbers and masks in generated code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckplan.tracing.costs import mask_seconds as prices
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE, cost_cache
from ckplan.tracing.costs.mask_seconds import ESTIMATED, KEYS, MaskSeconds

TOLD = "a warning\n[1e-09, 2e-09, 3e-09, 4e-09, 5e-09]\n"
REST = ", 4e-09, 5e-09]\n"


class Child:
    """Takes the place of the process that measures."""

    def __init__(self, told: str | None) -> None:
        self.told = told
        self.code: list[str] = []
        self.env: dict[str, str] = {}

    def __call__(
        self, words: list[str], env: dict[str, str], **_: Any
    ) -> subprocess.CompletedProcess[str]:
        self.code.append(words[-1])
        self.env = env
        if self.told is None:
            raise subprocess.CalledProcessError(1, words)
        return subprocess.CompletedProcess(words, 0, stdout=self.told)


def child(monkeypatch: pytest.MonkeyPatch, folder: Path, told: str | None) -> Child:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    monkeypatch.setattr(prices, "_found", {})
    found = Child(told)
    monkeypatch.setattr(subprocess, "run", found)
    return found


def test_differences_of_what_runs_by_turns_are_the_seconds_of_one_number() -> None:
    # keeps, keeps bits, drops, plain; reads, draws again, reads bits
    usual = (30.0, 20.0, 18.0, 8.0, 5.0, 12.0, 4.0)
    found = prices.prices_of([usual, [2 * one for one in usual], usual], 0.5)
    assert found == MaskSeconds(draw=5.0, write=6.0, read=1.5, pack=1.0, unpack=1.0)
    noise = (7.0, 7.0, 8.0, 9.0, 1.0, 0.5, 1.0)  # no price is below zero
    assert prices.prices_of([noise], 1.0) == MaskSeconds(0.0, 0.0, 0.0, 0.0, 0.0)


def test_they_are_measured_in_another_process_on_three_occasions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measuring = child(monkeypatch, tmp_path, TOLD)
    usual = MaskSeconds(1e-9, 2e-9, 3e-9, 4e-9, 5e-9)
    assert prices.mask_seconds() == prices.mask_seconds() == usual
    (code,) = measuring.code
    assert f"main({torch.get_num_threads()})" in code
    assert measuring.env == {**os.environ, **prices._KEEP_MEMORY}
    assert measuring.env["MALLOC_MMAP_MAX_"] == "0"  # the C library keeps its memory
    found: list[MaskSeconds] = []
    for told in (f"[3e-09, 2e-09, 2e-09{REST}", f"[2e-09, 2e-09, 1e-09{REST}", TOLD):
        monkeypatch.setattr(prices, "_found", {})  # as in another process
        measuring.told = told
        found.append(prices.mask_seconds())
    assert [one.draw for one in found] == [1e-9, 1e-9, 1e-9]  # the least of all
    assert [one.read for one in found] == [2e-9, 1e-9, 1e-9]
    cpu = cost_cache(torch.device("cpu"))
    assert cpu.known_runs(KEYS[0]) == (1e-9, 3e-9, 2e-9)
    assert len(measuring.code) == 3


@pytest.mark.parametrize("told", [None, "", "[1e-09]\n", "nothing\n"])
def test_estimates_are_taken_where_nothing_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None
) -> None:
    measuring = child(monkeypatch, tmp_path, told)
    assert prices.mask_seconds() == prices.mask_seconds() == ESTIMATED
    assert len(measuring.code) == 1  # tried once
    assert not any(map(cost_cache(torch.device("cpu")).known_runs, KEYS))


def test_what_is_measured_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = prices.measure(1, lambda function: function)
    assert found.draw > 0
    assert 0 <= found.read < 1e-6
    assert not capsys.readouterr().out
