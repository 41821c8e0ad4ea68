"""What programs that measure compiled steps share: workloads, and kept rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

from _measuring import ROOT, results_path, workload_path

from ckplan import files
from ckplan.training.loading import WorkloadSpec, parse_options

Row = dict[str, Any]


def target_of(workload: str) -> str:
    """A workload's file, and its factory if it is not the only one."""
    name, _, factory = workload.partition(":")
    return workload_path(name) + (f":{factory}" if factory else "")


def spec_of(workload: str, settings: Iterable[str]) -> WorkloadSpec:
    """A workload with some settings."""
    return WorkloadSpec(str(ROOT / target_of(workload)), parse_options([*settings]))


def kept_rows(name: str, order: Callable[[Row], Any]) -> list[Row]:
    """All rows that a program has measured so far.

    Args:
        name: Of the program's page, beside which they lie as JSON.
        order: The key that they are sorted by.
    """
    path = results_path(name, ".jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(map(json.loads, lines), key=order)


def keep(name: str, rows: Iterable[Row], same: tuple[str, ...]) -> None:
    """Put rows, with the date of today, in the place of earlier ones.

    Args:
        name: Of the program's page.
        rows: What was measured.
        same: Keys; earlier rows with the same values there are replaced.
    """
    new = [{"date": date.today().isoformat(), **row} for row in rows]
    replaced = {tuple(row[key] for key in same) for row in new}
    rest = [
        row
        for row in kept_rows(name, order=lambda _: 0)
        if tuple(row[key] for key in same) not in replaced
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*rest, *new])
    files.write_text(results_path(name, ".jsonl"), text, force=True)
