"""Draws the README's picture: live bytes over one step, with a plan and without.

    python scripts/picture.py

The trace is traces/gpt2.json.gz, the budget 55 % of its unplanned peak. Prints both
peaks and the overhead; all figures are predicted.
"""

from __future__ import annotations

from pathlib import Path

import _measuring as measuring
from matplotlib.figure import Figure

from ckplan.graph.file import load
from ckplan.report.plots import save_figure
from ckplan.simulating.curve import PHASES, predicted_curve
from ckplan.solving.planner import Planner
from ckplan.units import GIB, format_bytes, format_percent

TRACE = measuring.ROOT / "traces" / "gpt2.json.gz"
SHARE = 0.55
OUTPUT = measuring.RESULTS / "picture_gpt2_202611.png"


def main() -> int:
    """Draw it."""
    parser = measuring.make_parser(__doc__, output=False)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    planner = Planner(load(TRACE))
    budget = int(SHARE * planner.unplanned.peak_bytes)
    solution = planner.solve(budget)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    overhead = format_percent(solution.timeline.overhead, sign=True)
    steps = (
        ("without a plan", planner.unplanned, "#888888"),
        (f"with a plan, {overhead} time", solution.timeline, "#1f77b4"),
    )
    for name, timeline, color in steps:
        places, levels = zip(*predicted_curve(timeline).placed(), strict=True)
        heights = [level / GIB for level in levels]
        axes.fill_between(places, heights, step="post", color=color, alpha=0.25)
        axes.plot(places, heights, color=color, drawstyle="steps-post", label=name)
        peak = timeline.peak_bytes
        place = places[levels.index(max(levels))]
        axes.annotate(f"peak {format_bytes(peak)}", (place + 0.08, peak / GIB + 0.03))
        measuring.say(f"{name}: {format_bytes(peak)}")
    axes.axhline(budget / GIB, color="#d62728", linestyle="--", linewidth=1)
    axes.text(0.02, budget / GIB + 0.03, f"budget {format_bytes(budget)}")
    axes.set_xticks([0.5, 1.5, 2.5], PHASES)
    axes.set_xlim(0, len(PHASES))
    axes.set_ylim(0, 1.15 * planner.unplanned.peak_bytes / GIB)
    axes.set_ylabel("live bytes (GiB)")
    axes.set_title("One training step of GPT-2, 12 layers, 8 x 256 tokens, CPU")
    axes.legend(loc="upper right")
    save_figure(args.output, figure, force=True)
    measuring.say(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    measuring.run(main)
