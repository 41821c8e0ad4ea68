"""Rows of a trace file that are not the fields of a record one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckplan.graph.records import (
    NO_WORKSPACE,
    GeneratedCode,
    Op,
    Saved,
    SavingRegion,
    Workspace,
)

_SAVED_ONCE = 6  # fields of a tensor that one backward takes


def of_saved(one: Saved) -> list[Any]:
    """The row of a saved tensor."""
    row = [one.storage, one.call, one.packed_at]
    row += [one.unpacked_at, one.last_held, one.last_used]
    return [*row, one.uses] if one.uses else row


def saved(row: list[Any]) -> Saved:
    """Read the row of a saved tensor."""
    found = Saved(*row[:_SAVED_ONCE])
    if len(row) == _SAVED_ONCE:
        return found
    (uses,) = row[_SAVED_ONCE:]
    return replace(found, uses=tuple((begin, end) for begin, end in uses))


def op(
    names: dict[int, str],
    line: str,
    name: int,
    call: int,
    reads: list[int],
    writes: list[int],
    outputs: list[int],
    workspace: tuple[list[int], list[int]],
    flops: int,
    moved_bytes: int,
    seconds: float,
    random: int,
    launch_seconds: float,
) -> Op:
    """Read the row of an op."""
    before, after = workspace
    return Op(
        names[name],
        call,
        tuple(reads),
        tuple(writes),
        tuple(outputs),
        Workspace(tuple(before), tuple(after)) if before or after else NO_WORKSPACE,
        flops,
        moved_bytes,
        seconds,
        bool(random),
        launch_seconds,
        line,
    )


def code(
    regions: list[tuple[int, int | None, list[tuple[int, int]]]], *rest: Any
) -> GeneratedCode:
    """Read the row of generated code."""
    saving = tuple(
        SavingRegion(call, last, tuple((op, output) for op, output in save))
        for call, last, save in regions
    )
    return GeneratedCode(saving, *rest)
