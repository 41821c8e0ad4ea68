"""Rows of long measurements, kept as soon as they are known: a later run goes on."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import _measuring as measuring

from ckplan import files

_Row = TypeVar("_Row")


class KeptRows(Generic[_Row]):
    """The rows of one table, by what they were measured of, in a file of JSON lines."""

    def __init__(
        self, name: str, kind: Callable[..., _Row], args: argparse.Namespace
    ) -> None:
        """Read what earlier runs kept.

        Args:
            name: Of the page of results.
            kind: The record of a row; its field ``model`` says what it is of.
            args: With ``only``, ``fresh``, ``minutes`` and ``output``.
        """
        output: Path | None = args.output
        usual = measuring.results_path(name, ".jsonl")
        self._path = usual if output is None else output.with_suffix(f".{name}.jsonl")
        self._args, self.rows = args, dict[str, list[_Row]]()
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            row: Any = kind(**json.loads(line))
            self.rows.setdefault(row.model, []).append(row)

    def fill(
        self,
        models: Mapping[str, Any] | Sequence[str],
        measure: Callable[[str], Iterable[_Row]],
    ) -> list[_Row]:
        """Measure what is missing, for ``minutes``; all rows, in the models' order."""
        args, began = self._args, time.monotonic()
        for model in measuring.chosen(models, args.only):
            if model in self.rows and not (args.only or args.fresh):
                continue
            if time.monotonic() - began > 60 * args.minutes:
                break
            measuring.say(model)
            self.rows[model] = list(measure(model))
            kept = [row for rows in self.rows.values() for row in rows]
            lines = [json.dumps(asdict(row)) for row in kept]  # type: ignore[call-overload]
            files.write_text(self._path, "\n".join(lines) + "\n", force=True)
        return [row for model in models for row in self.rows.get(model, [])]
