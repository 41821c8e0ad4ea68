"""Whether a step fits on cards: as it is, with a plan, at which batch, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from ckplan import gpus, units
from ckplan.errors import CkplanError
from ckplan.fitting.other_card import estimated, on_card
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.allocations import is_on_card, reserved_bytes
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.alternatives import expandable
from ckplan.solving.card_memory import check_profiled_for
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.remedies import SAME, SMALLER, Remedy, by_cost, remedies
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import plan_within
from ckplan.tuning.known_batches import STEPS, KnownBatches, batches_of
from ckplan.tuning.largest import largest_number

AS_IT_IS = "as it is"
WITH_A_PLAN = "with a plan"
SMALLER_BATCH = "at a smaller batch"
AT_NO_BATCH = "at no batch"
NOT = "not at this batch"  # and others are not known


@dataclass(frozen=True, slots=True)
class CardFit:
    """The answer for one card, or for a budget."""

    name: str
    limit_bytes: int
    needed_bytes: int  # of the unplanned step: reserved on a card, else of tensors
    how: str  # AS_IT_IS and so on
    planned_overhead: float | None  # of the cheapest plan that fits; 0 as it is
    least_bytes: int  # of the smallest plan
    largest_unplanned: int | None  # rows; None if other batches are not known
    largest_planned: int | None
    uncertain: tuple[str, ...]  # what is estimated, and with what
    remedies: tuple[Remedy, ...] = ()  # what would make it fit, the cheapest first

    @property
    def fits(self) -> bool:
        """Whether the batch that was asked for fits, with a plan or without."""
        return self.how in (AS_IT_IS, WITH_A_PLAN)


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for several cards."""

    graph: Graph
    rows: int | None  # of the batch, if known
    cards: tuple[CardFit, ...]
    cheapest: str | None  # of those that fit
    all_named: bool  # whether every one must fit, or only one
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every named card fits; without names, whether any does."""
        found = [card.fits for card in self.cards]
        return all(found) if self.all_named else any(found)


def fit(
    *graphs: Graph | str | Path,
    gpu: str | Sequence[str] | None = None,
    budget: str | int | None = None,
) -> Fit:
    """Find out which cards a step fits on.

    Args:
        graphs: The step, or the path of its trace; a second one, of another batch,
            lets every other batch be drawn.
        gpu: One or several cards of ``ckplan gpus``; all of them by default.
        budget: Instead of cards, a limit on the bytes of tensors.

    Raises:
        CkplanError: A card is not known, the step is one of the CPU, or the two steps
            differ in more than their batch.
    """
    if not 1 <= len(graphs) <= 2:
        raise CkplanError(
            f"cannot fit {len(graphs)} traces",
            needed="one trace, or two of the same workload at two batches",
            hint="ckplan.fit(graph), or ckplan.fit(small, large)",
        )
    loaded = tuple(
        one if isinstance(one, Graph) else trace_file.load(Path(one)) for one in graphs
    )
    return fit_batches(batches_of(loaded), gpu=gpu, budget=budget)


def fit_batches(
    batches: KnownBatches,
    *,
    gpu: str | Sequence[str] | None = None,
    budget: str | int | None = None,
) -> Fit:
    """The same for a step whose other batches are known, or not."""
    names = [gpu] if isinstance(gpu, str) else gpu
    if names and budget is not None:
        raise CkplanError(
            "cannot fit a budget and cards at once",
            needed="a budget of tensors, or cards",
            hint="--budget 12GiB, or --gpu 'RTX 4090'",
        )
    asked = _Asked(batches, in_steps=not names and budget is None)
    if budget is not None:
        peak_bytes = asked.planner.unplanned.peak_bytes
        limit = MemoryLimit(units.parse_budget(budget, peak_bytes))
        alone = asked.card_fit(units.format_bytes(limit.bytes), limit, None)
        alone = asked.with_remedies(alone, limit, None)
        return _as_fit(batches, (alone,), cheapest=None, all_named=True)
    if not is_on_card(batches.graph):
        check_profiled_for(batches.graph, gpus.find(names[0]) if names else None)
    cards = [gpus.find(name) for name in names or gpus.load()]
    limits = [MemoryLimit(card.usable_bytes, of_reserved=True) for card in cards]
    answers = tuple(
        asked.card_fit(card.name, limit, card)
        for card, limit in zip(cards, limits, strict=True)
    )
    if names or not any(answer.fits for answer in answers):
        roomiest = max(card.usable_bytes for card in cards)
        answers = tuple(
            asked.with_remedies(answer, limit, card)
            if names or limit.bytes == roomiest
            else answer
            for answer, limit, card in zip(answers, limits, cards, strict=True)
        )
    return _as_fit(batches, answers, cheapest=_cheapest(answers), all_named=bool(names))


def together(each: Sequence[Fit]) -> Fit:
    """One answer for several named cards, each from a profile of its own."""
    answers = tuple(answer for found in each for answer in found.cards)
    notes = dict.fromkeys(note for found in each for note in found.notes)
    return replace(
        each[0], cards=answers, cheapest=_cheapest(answers), notes=tuple(notes)
    )


def _cheapest(answers: Sequence[CardFit]) -> str | None:
    """The cheapest card that fits: by price, else by memory and bandwidth."""
    cards = [gpus.find(answer.name) for answer in answers if answer.fits]
    found = min(cards, key=_cost, default=None)
    return found.name if found else None


def _as_fit(
    batches: KnownBatches,
    answers: tuple[CardFit, ...],
    *,
    cheapest: str | None,
    all_named: bool,
) -> Fit:
    notes = (batches.why_one,) if batches.why_one else ()
    if not (all_named or notes):
        notes = ("batches: of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 and so on",)
    return Fit(batches.graph, batches.rows, answers, cheapest, all_named, notes)


def _cost(card: gpus.Gpu) -> tuple[bool, float, int, int]:
    """Priced cards by price, then the others by memory and bandwidth."""
    priced = card.price is None, card.price or 0.0
    return *priced, card.memory_bytes, card.bandwidth


class _Asked:
    """One step and its plans, which all cards share."""

    def __init__(self, batches: KnownBatches, *, in_steps: bool) -> None:
        self._batches = batches
        self._in_steps = in_steps
        self._sizes: dict[tuple[int, bool, bool], int] = {}
        self.planner = Planner(batches.graph)
        self._simulators = {self._own_rows: self.planner.simulator}
        self._timelines: dict[tuple[int, bool], Timeline] = {}

    @property
    def _smallest(self) -> tuple[Region, ...]:
        """The regions of the smallest plan, by bytes alone where batches are coarse.

        A search by seconds, too, takes as long again.
        """
        return self.planner.smallest[1] if self._in_steps else self._cheapest_smallest

    @cached_property
    def _cheapest_smallest(self) -> tuple[Region, ...]:
        """Those of the cheapest plan that is as small."""
        found = self.planner.within(self.planner.least.peak_bytes)
        assert found is not None, "internal error: the least peak is that of a plan"
        return found[1]

    @property
    def _planned(self) -> Timeline:
        """The step under the smallest plan."""
        return self._timeline(self._own_rows, planned=True)

    def card_fit(self, name: str, limit: MemoryLimit, card: gpus.Gpu | None) -> CardFit:
        overhead = self._overhead(limit, card)
        largest = self._largest(limit, planned=False)
        planned = self._largest(limit, planned=True)
        how = AS_IT_IS if overhead == 0.0 else WITH_A_PLAN
        if overhead is None:
            how = NOT if planned is None else SMALLER_BATCH if planned else AT_NO_BATCH
        needed = self._needed(limit, planned=False)
        return CardFit(
            name,
            limit.bytes,
            needed,
            how,
            overhead,
            min(needed, self._needed(limit, planned=True)),  # it has gaps, too
            largest,
            planned,
            uncertain=tuple(estimated(self._batches.graph, card)) if card else (),
        )

    def with_remedies(
        self, answer: CardFit, limit: MemoryLimit, card: gpus.Gpu | None
    ) -> CardFit:
        """The same answer, with what would make it fit, or fit at less cost."""
        if answer.how == AS_IT_IS:
            return answer
        return replace(answer, remedies=tuple(self._remedies(limit, card, answer)))

    def _remedies(
        self, limit: MemoryLimit, card: gpus.Gpu | None, answer: CardFit
    ) -> list[Remedy]:
        gaps = answer.least_bytes - self._planned.peak_bytes
        graph = self._batches.graph
        every = [plan for _, plan in self.planner.standard_baselines.every_call]
        room = limit.bytes - gaps
        found = remedies(graph, self._cheapest_smallest, room, others=every)
        if answer.how == SMALLER_BATCH and answer.largest_planned:
            rows = answer.largest_planned
            smaller = self._timeline(rows, planned=True)
            cheaper = self._simulators[rows].run(self._cheapest_smallest)
            smaller = cheaper if limit.allows(cheaper) else smaller
            own = graph.step_seconds / self._own_rows
            taken = smaller.graph.step_seconds + smaller.recompute_seconds
            row = Remedy(
                SMALLER,
                f"a batch of {rows} in place of {self._own_rows}, with a plan",
                limit.reserved_bytes(smaller) or smaller.peak_bytes,
                SAME,
                overhead=taken / rows / own - 1,
                fits=True,
            )
            others = (one for one in found if one.name != row.name)
            found = (row, *others)
        elif self._batches.other is not None:  # what is about right is not needed
            found = tuple(one for one in found if one.name != SMALLER)
        if answer.fits:  # nothing else is needed; what is cheaper is worth a row
            found = tuple(one for one in found if one.overhead is not None)
        expanded = expandable(
            self.planner,
            limit,
            answer.planned_overhead,
            partial(self._at_seconds_of, card),
        )
        return sorted([*found, *expanded], key=by_cost)

    def _overhead(self, limit: MemoryLimit, card: gpus.Gpu | None) -> float | None:
        """Of the cheapest plan found, at the seconds of the card; None if none fits."""
        found = self._solved(limit)
        return None if found is None else self._at_seconds_of(card, found)

    def _solved(self, limit: MemoryLimit) -> ReplayedPlan | None:
        """The step as it is or under the cheapest plan that fits, if any does."""
        unplanned = self.planner.unplanned
        if self._needed(limit, planned=False) <= limit.bytes:
            return unplanned, ()
        return plan_within(self.planner, limit)

    def _at_seconds_of(self, card: gpus.Gpu | None, found: ReplayedPlan) -> float:
        """The overhead of a plan at the seconds of another card."""
        timeline, regions = found
        if not regions or card is None:
            return timeline.overhead
        graph = on_card(timeline.graph, card)
        if graph is timeline.graph:
            return timeline.overhead
        return Simulator(graph).run(regions).overhead

    @property
    def _own_rows(self) -> int:
        return self._batches.rows or 0

    def _largest(self, limit: MemoryLimit, *, planned: bool) -> int | None:
        """The largest batch, unplanned or under the smallest plan."""
        batches = self._batches
        if batches.other is None:
            return None

        def size(rows: int) -> int:
            return self._size(rows, planned=planned, of_reserved=limit.of_reserved)

        return largest_number(
            lambda rows: self._timeline(rows, planned=planned).peak_bytes,
            lambda rows: size(rows) <= limit.bytes,
            limit.bytes,
            STEPS if self._in_steps else range(1, STEPS[-1]),
            self._own_rows,
        )

    def _needed(self, limit: MemoryLimit, *, planned: bool) -> int:
        """What the batch that is asked for needs within a limit, or beyond it."""
        timeline = self._timeline(self._own_rows, planned=planned)
        size = self._size(
            self._own_rows, planned=planned, of_reserved=limit.of_reserved
        )
        if size <= limit.bytes or timeline.peak_bytes > limit.bytes:
            return size
        return limit.reserved_bytes(timeline, size) or size

    def _size(self, rows: int, *, planned: bool, of_reserved: bool) -> int:
        """What a batch needs, unplanned or under the smallest plan, cached."""
        key = rows, planned, of_reserved
        if key not in self._sizes:
            timeline = self._timeline(rows, planned=planned)
            reserved = reserved_bytes(timeline) if of_reserved else 0
            self._sizes[key] = max(reserved, timeline.peak_bytes)
        return self._sizes[key]

    def _timeline(self, rows: int, *, planned: bool) -> Timeline:
        """The step at a batch, cached."""
        if (rows, planned) not in self._timelines:
            if rows not in self._simulators:
                self._simulators[rows] = Simulator(self._batches.at(rows))
            regions = self._smallest if planned else ()
            self._timelines[rows, planned] = self._simulators[rows].run(regions)
        return self._timelines[rows, planned]
