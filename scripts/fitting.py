"""How long ``fit`` takes over all cards, for a model that is profiled already.

Every workload is profiled at batches of 8 and 4 rows for an RTX 4090. From the two
traces, ``fit`` says for each card of ``ckplan gpus`` whether batch 8 fits, as it is or
with a plan, and the largest batch each way. Seconds are CPU seconds of one run, from
the files to the answer.

    python scripts/fitting.py
    python scripts/fitting.py --only gpt2

Exit code 1 if a model takes 3 s or more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import _measuring as measuring

from ckplan.cli.terminal import fewer_collections
from ckplan.fitting.fit import Fit, fit
from ckplan.units import format_seconds

CARD, ROWS = "RTX 4090", (8, 4)
MOST_SECONDS = 3.0
HEADERS = ("model", "ops", "CPU", "cards it fits", "largest batch there", "with a plan")


@dataclass(frozen=True)
class Row:
    """One model."""

    name: str
    seconds: float
    found: Fit

    def cells(self) -> list[str]:
        """A row of the table."""
        cards = self.found.cards
        there = next(card for card in cards if card.name == CARD)
        fitting = sum(card.fits for card in cards)
        return [
            self.name,
            str(len(self.found.graph.ops)),
            format_seconds(self.seconds),
            f"{fitting} of {len(cards)}",
            f"{CARD}: {there.largest_unplanned}",
            str(there.largest_planned),
        ]


def main() -> int:
    """Measure every model, print the table, write it."""
    args = measuring.make_parser(__doc__, only=True).parse_args()
    rows = [row_of(name) for name in measuring.workloads(args.only)]
    report = measuring.Report(
        "fitting",
        "Speed of fit over all cards",
        __doc__,
        [measuring.make_table(HEADERS, [row.cells() for row in rows])],
        list(broken(rows)),
    )
    return measuring.finish(report, args)


def row_of(name: str) -> Row:
    """Profile a model twice, and time what follows."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{rows}.json.gz" for rows in ROWS]
        for path, rows in zip(paths, ROWS, strict=True):
            argv = ("--gpu", CARD, "--micro-batch", str(rows), "-o", str(path))
            measuring.run_ckplan("profile", measuring.workload_path(name), *argv)
        gc.collect()
        began = time.process_time()
        with fewer_collections():
            found = fit(*paths)
        return Row(name, time.process_time() - began, found)


def broken(rows: Sequence[Row]) -> Iterator[str]:
    """Where the limit is exceeded."""
    for row in rows:
        if row.seconds >= MOST_SECONDS:
            yield f"{row.name}: {format_seconds(row.seconds)}"


if __name__ == "__main__":
    measuring.run(main)
