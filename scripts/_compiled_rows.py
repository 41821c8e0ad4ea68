"""What programs that measure compiled steps share: workloads, and kept rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

import torch
from _measuring import ROOT, SEED, results_path, workload_path

from ckplan import files
from ckplan.training.allocator import log_allocations
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.training.workload import Workload, tensors_of

Row = dict[str, Any]


def target_of(workload: str) -> str:
    """A workload's file, and its factory if it is not the only one."""
    name, _, factory = workload.partition(":")
    return workload_path(name) + (f":{factory}" if factory else "")


def spec_of(workload: str, settings: Iterable[str]) -> WorkloadSpec:
    """A workload with some settings."""
    return WorkloadSpec(str(ROOT / target_of(workload)), parse_options([*settings]))


def built(spec: WorkloadSpec) -> Workload:
    """A workload, from the seed of all measurements."""
    torch.manual_seed(SEED)
    return spec.build()


def peak_of(
    workload: Workload, take: Callable[[], object], held_bytes: int | None = None
) -> int:
    """Most bytes of a step: parameters, buffers, batch, and what it allocates.

    Args:
        workload: Gradients are set to None before the step.
        take: Takes the step.
        held_bytes: By parameters, buffers and batch, as far as they count; all of them
            by default.
    """
    model = workload.model
    model.zero_grad(set_to_none=True)
    with log_allocations() as log:
        take()
    if held_bytes is not None:
        return held_bytes + log.peak_bytes
    held = tensors_of([[*model.parameters(), *model.buffers()], workload.batch])
    storages = {one.untyped_storage().data_ptr(): one for one in held}
    bytes_of = (one.untyped_storage().nbytes() for one in storages.values())
    return sum(bytes_of) + log.peak_bytes


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
        same: Keys; earlier rows with the same values there, or none, are replaced.
    """
    new = [{"date": date.today().isoformat(), **row} for row in rows]
    replaced = {tuple(row.get(key) for key in same) for row in new}
    rest = [
        row
        for row in kept_rows(name, order=lambda _: 0)
        if tuple(row.get(key) for key in same) not in replaced
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*rest, *new])
    files.write_text(results_path(name, ".jsonl"), text, force=True)
