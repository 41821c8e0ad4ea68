"""Proves that `ckplan tune` finds settings that are worth it, in four tables.

*By hand*: small workloads of configs/workloads train on the CPU, on one thread, within
limits on the bytes of tensors. The tuned setting stands beside what people do: the
largest batch without a plan, every layer checkpointed at its largest batch, every
second one, and four micro-batches accumulated. All take steps in processes of their
own, one each in every round. A limit is the peak of the workload's own batch less a
share of its activation bytes. Seconds are medians over the rounds but the first two;
predicted ones are of ops that are measured once, with the same seconds in all settings.
*Cards*: steps of a card of which a part of the memory is taken away, from what the
smallest plan needs to what the largest batch of the workload would: the tuned setting
runs two steps on the model of PyTorch's CUDA allocator. "Unused" is what it never
reserves. *Batches*: the largest batch with a plan,
over the largest one without. *Signs*: eight small models train on the CPU at their own
batch, on one thread, without a lever and with every lever alone, one step each in every
round: bytes that it saves and seconds per sample that it adds, predicted and measured,
as parts of those without. Seconds whose quartiles lie on both sides of none have no
sign. These rows are kept in a file of JSON lines as soon as they are known: the next
run goes on there. Alone, they have a page of their own.

    python scripts/tuned.py
    python scripts/tuned.py --part hand --only gpt2 --rounds 12
    python scripts/tuned.py --part batches --gpu "RTX 4090"
    python scripts/tuned.py --part signs --minutes 30

Exit code 1 if a step exceeds its limit, a tuned setting is slower than one by hand by
more than 3 %, a tuned step has no room on its card, more than 3 % of the cards stays
unused on average, a lever has another sign than predicted, or fewer than 90 % of the
levers are within 2 points.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import _lever_signs
import _measuring as measuring
import torch

from ckplan import gpus
from ckplan.autotune import recorder_of_spec
from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe
from ckplan.simulating.allocations import replayed
from ckplan.simulating.caching_allocator import NoRoomError
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.training.step import Training
from ckplan.tuning.largest import largest_under
from ckplan.tuning.search import WaySearch
from ckplan.tuning.settings import Setting, Way
from ckplan.tuning.tune import Tuning
from ckplan.units import format_bytes
from ckplan.verifying.step_process import StepProcess, interleave

SMALL = {
    "mlp": ("layers=6", "width=256", "batch=2048"),
    "gpt2": ("layers=4", "width=128", "heads=4", "length=64", "vocab=1000", "batch=16"),
    "bert": ("layers=4", "width=128", "heads=4", "length=64", "vocab=1000", "batch=16"),
}
LARGE = {"gpt2": (), "resnet50": (), "unet": ()}
FREED = (0.3, 0.6)  # share of the activation bytes by which a limit is below the peak
CARD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the way from floor to unplanned need
PARTS = ("hand", "cards", "batches", "signs")
MICRO_BATCHES = 4
DROPPED_ROUNDS = 2
MOST_SLOWER, MOST_UNUSED = 0.03, 0.03


@dataclass(frozen=True)
class Contestant:
    """One setting of a workload within a limit, and what it took."""

    name: str
    rows: int
    accumulate: int
    regions: tuple[Region, ...]
    predicted_seconds: float
    training: Training
    graph: Graph
    peak_bytes: int = 0  # measured
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Measured samples per second."""
        return self.rows * self.accumulate / self.seconds

    def plan(self) -> Plan | None:
        """Its plan, for the process that trains."""
        if not self.regions:
            return None
        found = describe(self.graph, self.regions)
        fingerprint = plan_fingerprint(self.graph.fingerprint)
        return Plan(self.graph.model, fingerprint, regions=found)

    def cells(self, limit_bytes: int) -> list[str]:
        """The end of its row."""
        predicted = self.rows * self.accumulate / self.predicted_seconds
        batch = f"{self.rows}" + f" x {self.accumulate}" * (self.accumulate > 1)
        share = f"{self.peak_bytes / limit_bytes:.1%}"
        off = f"{predicted / self.speed - 1:+.1%}"
        return [batch, share, f"{self.speed:,.1f}", f"{predicted:,.1f}", off]


def main() -> int:
    """Print the tables and write the page of results."""
    args = _arguments()
    torch.set_num_threads(1)
    parts, broken = list[str](), list[str]()
    for part in args.part or PARTS:
        table, wrong = _PARTS[part](args)
        parts += [f"## {part.capitalize()}", table]
        broken += wrong
    report = measuring.Report(
        "tuned", "Tuned settings beside those by hand", __doc__, parts, broken
    )
    if args.part == ["signs"]:
        title, doc = "The signs of the levers of tune", _lever_signs.__doc__
        report = measuring.Report("tuned_signs", title, doc, parts, broken)
        return measuring.finish(report, args)
    return measuring.finish(report, args, whole=not (args.only or args.part))


# -- by hand -----------------------------------------------------------------------


def by_hand(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The first table, and where its claim does not hold."""
    rows, broken = list[list[str]](), list[str]()
    for name in measuring.chosen(SMALL, args.only):
        spec = WorkloadSpec(measuring.workload_path(name), parse_options(SMALL[name]))
        for share in FREED:
            measuring.say(f"{name}: {share:.0%} of the activations freed")
            limit, found = _measured(spec, share, args.rounds)
            best = max(one.speed for one in found[1:])
            if found[0].speed < best * (1 - MOST_SLOWER):
                lost = 1 - found[0].speed / best
                broken.append(f"{name}, {share:.0%}: tuned is {lost:.1%} slower")
            for one in found:
                if one.peak_bytes > limit.bytes:
                    broken.append(f"{name}, {share:.0%}: {one.name} exceeds the limit")
                title = [name, format_bytes(limit.bytes), one.name]
                rows.append([*title, *one.cells(limit.bytes)])
    headers = ("workload", "limit", "setting", "batch", "of limit")
    speeds = ("samples/s", "predicted", "off")
    return measuring.make_table((*headers, *speeds), rows, texts=3), broken


def _measured(
    spec: WorkloadSpec, share: float, rounds: int
) -> tuple[MemoryLimit, list[Contestant]]:
    """The tuned setting, then those by hand, all measured in turns."""
    record, rows, way = recorder_of_spec(spec)
    with _lever_signs.no_known_costs():  # of which some could be of a busy machine
        step = record(way, rows, 1)
        freed = int(share * step.bytes_by_kind["activation"])
        limit = MemoryLimit(Simulator(step).run().peak_bytes - freed)
        tuning = Tuning(record, limit, way=way, rows=rows)
        found = tuning.run()
        settings = [_contestant("tuned", found.best, found.graph)]
        settings += _practices(tuning.search(way), limit)
    with ExitStack() as running:
        processes = [
            running.enter_context(
                StepProcess(
                    replace(spec, rows=one.rows), one.plan(), one.training, seed=0
                )
            )
            for one in settings
        ]
        peaks = [process.first_steps().peak_bytes for process in processes]
        timed = interleave(processes, rounds)
    return limit, [
        replace(one, peak_bytes=peak, seconds=statistics.median(taken[DROPPED_ROUNDS:]))
        for one, peak, taken in zip(settings, peaks, timed, strict=True)
    ]


def _contestant(name: str, one: Setting, graph: Graph) -> Contestant:
    way = one.way
    training = Training(way.optimizer, way.amp, one.accumulate, scaler=way.scaler)
    seconds = one.step_seconds
    return Contestant(
        name, one.batch, one.accumulate, one.regions, seconds, training, graph
    )


def _practices(search: WaySearch, limit: MemoryLimit) -> Iterator[Contestant]:
    """What people do by hand, each at its largest batch."""
    largest = search.largest_unplanned
    if largest:
        one = search.setting(largest, planned=False)
        assert one is not None
        yield _contestant("no plan", one, search.graph_at(largest))
    plans = search.planner_at(max(largest, 1)).standard_baselines.plans
    for name, step in (("every layer", 1), ("every second layer", 2)):
        for _, layers in plans:
            regions = layers[::step]
            rows = largest_under(search.graph_at, limit, regions, max(largest, 1))
            if rows:
                timeline = Simulator(search.graph_at(rows)).run(regions)
                seconds = timeline.graph.step_seconds + timeline.recompute_seconds
                yield Contestant(
                    name, rows, 1, regions, seconds, Training(), search.graph_at(rows)
                )
    many = replace(search, accumulate=MICRO_BATCHES, _settings={})
    if rows := many.largest_unplanned:
        one = many.setting(rows, planned=False)
        assert one is not None
        yield _contestant("accumulated", one, many.graph_at(rows))


# -- cards -------------------------------------------------------------------------


def on_cards(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The second table, and where its claim does not hold."""
    rows, broken, unused = list[list[str]](), list[str](), list[float]()
    for name, search, own in _searches(args):
        planner = search.planner_at(own)
        least, most = planner.floor.peak_bytes, planner.unplanned.peak_bytes
        for share in CARD_SHARES:
            size = int(least + share * (most - least))
            limit = MemoryLimit(size, of_reserved=True)
            one, graph = _tuned(search, limit, own)
            title = [name, format_bytes(size)]
            if one is None:
                rows.append([*title, "nothing fits", "", "", "", ""])
                continue
            reserved = _reserved(graph, one, size)
            if reserved is None:
                broken.append(f"{name}, {format_bytes(size)}: out of memory")
            free = 1 - (reserved or size) / size
            larger = search.graph_at(one.batch + 1)
            by_memory = not limit.allows(Simulator(larger).run(one.regions))
            if by_memory:
                unused.append(free)
            cells = [str(one.batch), measuring.format_overhead(one.overhead)]
            runs = "no" if reserved is None else "yes"
            rows.append([*title, *cells, f"{free:.1%}", runs, "-+"[by_memory]])
    mean = statistics.mean(unused) if unused else 0.0
    if mean > MOST_UNUSED:
        broken.append(f"{mean:.1%} of the cards is unused on average")
    headers = ("workload", "card", "batch", "overhead", "unused", "runs", "by memory")
    said = f"{mean:.1%} unused on average, of {len(unused)} limited by memory (+)."
    return f"{measuring.make_table(headers, rows)}\n\n{said}", broken


def _tuned(
    search: WaySearch, limit: MemoryLimit, rows: int
) -> tuple[Setting | None, Graph]:
    """The best setting of a search within another limit, at a recorded batch."""
    found = search.with_limit(limit)
    found.start = rows
    try:
        best = found.best()
    except InfeasibleError:
        best = None
    if best is None:
        return None, found.graph_at(rows)
    found.check(best.batch)
    return found.setting(best.batch), found.graph_at(best.batch)


def _reserved(graph: Graph, one: Setting, size: int) -> int | None:
    """What the allocator reserves within a card; None if it runs out of memory."""
    try:
        timeline = Simulator(graph).run(one.regions)
        return replayed(timeline, capacity_bytes=size).reserved_bytes
    except NoRoomError:
        return None


# -- batches -----------------------------------------------------------------------


def batches(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The third table; its ratios are results, and no claim."""
    rows: list[list[str]] = []
    for name, search, _ in _searches(args):
        least, most = search.largest_unplanned, search.largest_planned
        one, bare = search.setting(most), search.setting(least)
        assert one is not None
        slower = bare and one.seconds_per_sample / bare.seconds_per_sample - 1
        rows.append(
            [
                name,
                format_bytes(search.limit.bytes),
                *(str(least), str(most), f"{most / max(least, 1):.1f} x"),
                measuring.format_overhead(one.overhead),
                measuring.format_overhead(slower),
            ]
        )
    headers = ("workload", "card", "no plan", "planned", "ratio", "overhead")
    return measuring.make_table((*headers, "per sample"), rows), []


def _searches(args: argparse.Namespace) -> Iterator[tuple[str, WaySearch, int]]:
    """(workload, its search on a card, rows of its own batch)."""
    card = gpus.find(args.gpu)
    for name in measuring.chosen(LARGE, args.only):
        measuring.say(f"{name} on {card.name}")
        spec = WorkloadSpec(measuring.workload_path(name), parse_options(LARGE[name]))
        record, rows, _ = recorder_of_spec(spec, gpu=card.name)
        limit = MemoryLimit(card.usable_bytes, of_reserved=True)
        yield name, Tuning(record, limit, way=Way(), rows=rows).search(Way()), rows


_PARTS: Mapping[str, Callable[[argparse.Namespace], tuple[str, Sequence[str]]]] = {
    "hand": by_hand,
    "cards": on_cards,
    "batches": batches,
    "signs": _lever_signs.signs,
}


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, only=True, gpu="RTX 4090")
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help="one table; repeatable  [default: all]",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=12,
        help=f"steps of each, the first {DROPPED_ROUNDS} dropped  [default: 12]",
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=float("inf"),
        help="of signs: begin no model after so many; the next run goes on",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="of signs: forget the rows of earlier runs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
