"""Proves that `ckplan tune` finds settings that are worth it, in five tables.

*Hand*: tuned settings beside those that people choose by hand, measured on the CPU.
*Cards*: whether tuned settings have room on cards, and leave none unused.
*Signs*: what every lever alone saves and costs, predicted and measured.
Rows of these three are kept in files of JSON lines as soon as they are known: the next
run goes on there. Each has a page of its own, where its beginning says how it is made.
*Batches*: the largest batch with a plan, over the largest one without, on a card; its
ratios are results, and no claim.
*Seconds*: how long a search takes.

    python scripts/tuned.py
    python scripts/tuned.py --part hand --minutes 30
    python scripts/tuned.py --part hand --only gpt2 --rounds 9
    python scripts/tuned.py --part batches --gpu "RTX 4090"

Exit code 1 if a step exceeds its limit; a tuned setting is slower than one by hand by
more than 3 %; fewer than 90 % of the speeds are predicted within 8 %, or fewer than
95 % of the pairs in their order; a tuned step has no room on its card, or more than 3 %
of the cards stays unused on average; a lever has another sign than predicted, or fewer
than 90 % of the levers are within 2 points; or a search takes longer than asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import _by_hand
import _lever_signs
import _measuring as measuring
import _tune_seconds
import _tuned_cards
import torch

from ckplan.tuning.search import WaySearch

LARGE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt2", ()),
    ("resnet50", ()),
    ("resnet50", ("layers=101",)),
    ("unet", ()),
    ("unet", ("layers=8",)),
)


class _Part(NamedTuple):
    title: str
    doc: str | None
    table: Callable[[argparse.Namespace], tuple[str, Sequence[str]]]


def main() -> int:
    """Print the tables and write their pages of results."""
    args = _arguments()
    measuring.keep_memory()
    torch.set_num_threads(1)
    wanted = args.part or PARTS
    codes = []
    for name in wanted:
        title, doc, table = PARTS[name]
        found, broken = table(args)
        report = measuring.Report(f"tuned_{name}", title, doc, [found], broken)
        codes.append(measuring.finish(report, args))
    return max(codes)


def batches(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The largest batches of a card."""
    rows: list[list[str]] = []
    for name, search in _tuned_cards.searches(LARGE, args):
        for expandable in (False, True):
            limit = replace(search.limit, expandable=expandable)
            rows.append(_largest(name, search.with_limit(limit)))
    headers = ("workload", "segments", "no plan", "planned", "ratio", "overhead")
    return measuring.make_table((*headers, "per sample"), rows), []


def _largest(name: str, search: WaySearch) -> list[str]:
    least, most = search.largest_unplanned, search.largest_planned
    one, bare = search.setting(most), search.setting(least)
    assert one is not None
    slower = None
    if bare is not None:
        slower = one.seconds_per_sample / bare.seconds_per_sample - 1
    return [
        name,
        "expandable" if search.limit.expandable else "usual",
        *(str(least), str(most), f"{most / max(least, 1):.1f} x"),
        measuring.format_overhead(one.overhead),
        measuring.format_overhead(slower),
    ]


_BATCHES = """Shows how much larger a batch can be with a plan.

The largest batch of a card with a plan, over the largest one without, and what the
plan costs there; "per sample" is beyond the seconds of a sample at the largest batch
without. What every layer keeps for backward, plans free; what one layer needs while it
runs, they do not: deeper models have larger ratios. Segments are those of PyTorch's
allocator, as usual and with `PYTORCH_ALLOC_CONF=expandable_segments:True`.
"""
PARTS: Mapping[str, _Part] = {
    "hand": _Part(
        "Tuned settings beside those by hand", _by_hand.__doc__, _by_hand.by_hand
    ),
    "cards": _Part(
        "Tuned settings on cards", _tuned_cards.__doc__, _tuned_cards.on_cards
    ),
    "signs": _Part(
        "The signs of the levers of tune", _lever_signs.__doc__, _lever_signs.signs
    ),
    "batches": _Part("Largest batches with a plan", _BATCHES, batches),
    "seconds": _Part(
        "How long a search takes", _tune_seconds.__doc__, _tune_seconds.seconds
    ),
}


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, only=True, gpu="RTX 4090")
    parser.add_argument(
        "--part",
        action="append",
        choices=tuple(PARTS),
        help="one table; repeatable  [default: all]",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=5,
        help="of steps of each way to train  [default: 5]",
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=float("inf"),
        help="begin no workload after so many; the next run goes on",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget the rows of earlier runs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
