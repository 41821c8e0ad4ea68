"""Proves that solving is quick, and that its cost grows gently with the model.

"Chain" is the recurrence alone: random blocks, each with random options, solved for
every budget at once in exact bytes. A trace is read, solved for one budget (60 % of its
unplanned peak, or its floor) and solved for 24 budgets from one search. Seconds are CPU
seconds of one run, memory is the most this process had by then.

    python scripts/solving.py

Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import _measuring as measuring

from ckplan.graph.file import load
from ckplan.solving.chain import Link, solve_chain
from ckplan.solving.menu import Option
from ckplan.solving.planner import Planner
from ckplan.units import format_bytes, format_seconds

HEADERS = ("what", "size", "CPU", "limit", "memory")
CHAINS = ((100, 10, 0.135), (200, 10, None), (500, 10, None), (1000, 10, 5.0))
LIMITS = {"gpt2-xl": 1.0}  # seconds of one budget
MOST_BYTES = 500 * 2**20


@dataclass(frozen=True)
class Row:
    """One measurement."""

    what: str
    size: str
    seconds: float
    limit: float | None
    peak_bytes: int

    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            self.what,
            self.size,
            format_seconds(self.seconds),
            f"< {format_seconds(self.limit)}" if self.limit else "",
            format_bytes(self.peak_bytes),
        ]


def main() -> int:
    """Measure everything, print the table, write it."""
    args = measuring.make_parser(__doc__).parse_args()
    rows = [*chains(), *traces()]
    report = measuring.Report(
        "solving",
        "Speed of solving",
        __doc__,
        [measuring.make_table(HEADERS, [row.cells() for row in rows], texts=2)],
        list(broken(rows)),
    )
    return measuring.finish(report, args)


def chains() -> Iterator[Row]:
    """The recurrence alone."""
    for blocks, options, limit in CHAINS:
        links = [_link(Random(block), options) for block in range(blocks)]
        began = time.process_time()
        frontier = solve_chain(links, 10**9)
        assert frontier.least_bytes > 0
        seconds = time.process_time() - began
        yield Row("chain", f"{blocks} blocks x {options}", seconds, limit, _memory())


def _link(rng: Random, options: int) -> Link:
    found = [Option(None, 10**9 + rng.randint(0, 10**7), 0, 0.0)]
    for _ in range(options - 1):
        freed = rng.randint(1, 10**7)
        need = 10**9 + rng.randint(0, 10**7)
        found.append(Option(None, need, freed, freed * rng.uniform(0.5e-9, 1.5e-9)))
    return Link((0, None), sorted(found, key=lambda option: option.seconds), 10**9)


def traces() -> Iterator[Row]:
    """Real steps, from the file to the plan."""
    for name, path in measuring.recorded().items():
        gc.collect()
        gc.freeze()  # what others left is not looked at again, as in a new process
        began = time.process_time()
        graph = load(path)
        read = time.process_time()
        planner = Planner(graph)
        budget = round(0.6 * planner.unplanned.peak_bytes)
        planner.solve(max(budget, planner.floor.peak_bytes))
        solved = time.process_time()
        planner.frontier(24)
        done = time.process_time()
        size = f"{len(graph.ops)} ops, {len(graph.calls)} calls"
        yield Row(f"{name}: read", size, read - began, None, _memory())
        limit = LIMITS.get(name)
        yield Row(f"{name}: one budget", size, solved - read, limit, _memory())
        yield Row(f"{name}: 24 budgets", size, done - solved, None, _memory())


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def broken(rows: Sequence[Row]) -> Iterator[str]:
    """Where a limit is exceeded."""
    for row in rows:
        if row.limit is not None and row.seconds >= row.limit:
            yield f"{row.what}, {row.size}: {format_seconds(row.seconds)}"
        if row.peak_bytes > MOST_BYTES:
            yield f"{row.what}: {format_bytes(row.peak_bytes)}"


if __name__ == "__main__":
    measuring.run(main)
