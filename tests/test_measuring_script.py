"""Where the scripts keep their tables."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The scripts' own module, with an empty folder of results."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")
    module = importlib.import_module("_measuring")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_a_page_is_of_its_month(measuring: ModuleType) -> None:
    path = measuring.results_path("promise")
    assert re.fullmatch(r"promise_cpu_20\d{4}\.md", path.name)


def test_kept_rows_go_on_in_a_later_month(
    measuring: ModuleType, tmp_path: Path
) -> None:
    kept = tmp_path / "cost_cpu_202001.jsonl"
    kept.touch()
    (tmp_path / "compiled_cost_cpu_202002.jsonl").touch()
    (tmp_path / "cost_gpu_202002.jsonl").touch()
    assert measuring.results_path("cost", ".jsonl") == kept
    assert measuring.results_path("cost") == kept.with_suffix(".md")
