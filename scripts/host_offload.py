"""What offload to the host is predicted to be worth on a card that is not here.

Llama-3 8B (32 layers, 4096 wide, 32 heads, 8 groups, 14336 inner, 128256 words) in
bfloat16, one sequence of 8192 tokens, on an H100 with PCIe 5: the overhead of plans
that free 10, 20 and 33 % of the unplanned peak, by recomputation alone and with moves.
No figure is measured. Bytes are those of the trace. Seconds are a roofline at the peak
rates of ``configs/gpus.yaml``. Copies run at its ``link`` each way, beside the device,
in the order that the engine keeps; a late copy stalls the device, and the overhead has
the stalls. With AdamW, parameters, gradients and optimizer state alone are more than
67 % of the peak, so no plan frees 33 %; with SGD they are not.

    python scripts/host_offload.py

Exit code 1 if a plan that frees 10, 20 or 33 % costs more than 1, 7 or 23 %.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring

from ckplan import gpus
from ckplan.errors import InfeasibleError
from ckplan.graph.file import load
from ckplan.graph.graph import Graph
from ckplan.simulating.allocations import reserved_bytes
from ckplan.simulating.moving import Link
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner
from ckplan.solving.planner import Planner
from ckplan.units import format_bytes, format_percent, format_seconds

CARD = "H100"
MOST = {0.10: 0.01, 0.20: 0.07, 0.33: 0.23}  # freed -> overhead
HEADERS = (
    *("optimizer", "step", "freed", "budget", "recomputation alone", "with moves"),
    *("stalls", "moved", "pinned", "reserved", "bound"),
)


@dataclass(frozen=True)
class Row:
    """A budget, without moves and with them."""

    optimizer: str
    freed: float
    overhead: float | None  # with moves; None if no plan fits
    cells: list[str]


def main() -> int:
    """Profile the step with two optimizers, solve, print the table, write it."""
    args = measuring.make_parser(__doc__).parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in ("adamw", "sgd"):
            measuring.say(optimizer)
            graph = traced(optimizer, Path(folder) / f"{optimizer}.json.gz")
            rows += solve_all(optimizer, graph)
    card = gpus.find(CARD)
    link = f"Link: {card.link / 1e9:g} GB/s each way ({card.sources['link']})."
    report = measuring.Report(
        "host_offload",
        "Offload to the host, predicted for an H100",
        __doc__,
        [measuring.make_table(HEADERS, [row.cells for row in rows]), link],
        list(broken(rows)),
    )
    return measuring.finish(report, args)


def traced(optimizer: str, path: Path) -> Graph:
    """The step as a trace, without a card."""
    measuring.run_ckplan(
        *("profile", measuring.workload_path("llama")),
        *measuring.with_settings(measuring.LLAMA_3_8B),
        *("--device", "cuda", "--gpu", CARD, "--optimizer", optimizer),
        *("-o", str(path), "--json"),
    )
    return load(path)


def solve_all(optimizer: str, graph: Graph) -> Iterator[Row]:
    """A row for each share of the peak to free."""
    planner, link = Planner(graph), Link.of(graph, gpus.find(CARD).link)
    moving = MovingPlanner(planner, link)
    peak_bytes, step = planner.unplanned.peak_bytes, graph.step_seconds
    for freed in MOST:
        limit = MemoryLimit(round((1 - freed) * peak_bytes))
        cells = [optimizer, format_seconds(step), format_percent(freed)]
        cells.append(format_bytes(limit.bytes))
        try:
            alone = planner.solve(limit.bytes)
            found = moving.solve(limit)
        except InfeasibleError:
            floor = format_bytes(planner.floor.peak_bytes)
            yield Row(optimizer, freed, None, [*cells, f"floor {floor}", *[""] * 6])
            continue
        timeline = found.timeline
        cells += map(
            measuring.format_overhead,
            (alone.timeline.overhead, timeline.overhead),
        )
        cells += [
            format_percent(timeline.stall_seconds / step),
            format_bytes(timeline.moves.moved_bytes),
            format_bytes(timeline.moves.host_bytes),
            format_bytes(reserved_bytes(timeline)),
            measuring.format_overhead(found.bound_overhead),
        ]
        yield Row(optimizer, freed, timeline.overhead, cells)


def broken(rows: list[Row]) -> Iterator[str]:
    """Where the claim does not hold."""
    for freed, most in MOST.items():
        of_it = [one.overhead for one in rows if one.freed == freed]
        known = [overhead for overhead in of_it if overhead is not None]
        if not known:
            yield f"no plan frees {format_percent(freed)}"
        if any(overhead > most for overhead in known):
            yield f"{format_percent(freed)} freed cost more than {format_percent(most)}"


if __name__ == "__main__":
    measuring.run(main)
