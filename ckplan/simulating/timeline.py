"""The replay of a step: live bytes at every half moment, and extra seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckplan.graph.graph import Graph
from ckplan.graph.queues import Span
from ckplan.graph.records import KINDS, GeneratedCode
from ckplan.simulating.effect import Effect
from ckplan.simulating.moving import NO_MOVES, Moves
from ckplan.simulating.queues import planned_span

_ROUNDING = 1e-9  # of sums of seconds


@dataclass(frozen=True)
class Timeline:
    """Live bytes of a step at every half moment."""

    graph: Graph
    live_bytes: list[int]
    effects: tuple[Effect, ...]
    unplanned_stops: Sequence[int]  # storage -> last half moment alive
    changed_stops: Mapping[int, int]  # same, for storages that regions change
    freed_ticks: Mapping[int, int]  # storage freed within a gap -> tick
    # Of `graph` beyond the unplanned step: tiles of heads, an update in groups.
    added_seconds: float = 0.0
    moves: Moves = NO_MOVES
    generated: GeneratedCode | None = None  # compiled code with the same plan
    # (bytes of a card, expandable) -> (whether there is room, whether the card was
    # full), as ``has_room`` has found.
    rooms: dict[tuple[int, bool], tuple[bool, bool]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def stops(self) -> list[int]:
        """The last half moment that each storage is alive."""
        moved = self.changed_stops
        return [moved.get(s, stop) for s, stop in enumerate(self.unplanned_stops)]

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes alive at once; those of generated code where that was replayed."""
        found = self.generated
        return found.peak_bytes if found else self.simulated_peak_bytes

    @cached_property
    def simulated_peak_bytes(self) -> int:
        """Most bytes of the ops alive at once."""
        return max(self.live_bytes, default=0)

    @cached_property
    def peak_moment(self) -> int:
        """First half moment of the peak of the ops."""
        peak = self.simulated_peak_bytes
        return self.live_bytes.index(peak) if self.live_bytes else 0

    @property
    def peak_at(self) -> str:
        """The place of the peak in words: ``backward of transformer.h.11``."""
        if self.generated is not None:
            return self.generated.peak_at
        if not self.graph.ops:
            return "nowhere"
        place = self.graph.place(self.peak_moment // 2)
        recomputing = any(self.peak_moment in e.gap_peaks for e in self.effects)
        return f"recomputation in {place}" if recomputing else place

    @cached_property
    def recompute_seconds(self) -> float:
        """Extra seconds of recomputation, tiles and moves in an optimizer step.

        On a GPU, the step with all that regions add to its two queues, less the
        unplanned one.
        """
        if self.generated is not None:
            return self.generated.overhead * self.graph.step_seconds
        if self.graph.is_launched:
            planned = self._queued(engine=True).seconds
            return planned - self.graph.step_seconds + self.added_seconds
        seconds = sum(effect.seconds for effect in self.effects)
        more = self.graph.num_batches * seconds
        return more + self.added_seconds + self.moving_seconds

    @property
    def moving_seconds(self) -> float:
        """Seconds that a step is longer for moves: stalls, and what copies take."""
        busy = 0.0 if self.graph.is_launched else self.moves.busy_seconds
        return self.stall_seconds + self.graph.num_batches * busy

    @cached_property
    def stall_seconds(self) -> float:
        """Seconds that a step is longer for waiting for copies of offloaded values."""
        if self.graph.is_launched and self.moves.copies:
            without = planned_span(self.graph, self.effects, engine=True).seconds
            return self._queued(engine=True).seconds - without
        return self.graph.num_batches * self.moves.stall_seconds

    @property
    def unplanned_seconds(self) -> float:
        """Seconds of the unplanned step."""
        return self.graph.step_seconds - self.added_seconds

    @property
    def engine_seconds(self) -> float:
        """CPU time of the engine, whether it adds to the step or not."""
        return self.graph.num_batches * sum(e.engine_seconds for e in self.effects)

    @cached_property
    def queues(self) -> tuple[float, float]:
        """Seconds of a GPU, and of the CPU beside it; without a GPU, the last is 0."""
        if not self.graph.is_launched:
            return self.unplanned_seconds + self.recompute_seconds, 0.0
        planned = self._queued(engine=True)
        return planned.device_seconds, planned.launch_seconds

    @cached_property
    def engine_overhead(self) -> float:
        """The engine's share of the overhead; 0 if all of it is beside the device."""
        if not self.unplanned_seconds:
            return 0.0
        seconds = self.engine_seconds
        if self.graph.is_launched:
            without = self._queued(engine=False).seconds
            seconds = self._queued(engine=True).seconds - without
        return seconds / self.unplanned_seconds

    @property
    def hidden_engine_seconds(self) -> float:
        """CPU time of the engine that passes beside a GPU's kernels."""
        if not self.graph.is_launched:
            return 0.0
        added = self.engine_overhead * self.unplanned_seconds
        hidden = self.engine_seconds - added
        return hidden if hidden > _ROUNDING * self.engine_seconds else 0.0

    def _queued(self, *, engine: bool) -> Span:
        """The step in the queues of a GPU."""
        copies = self.moves.copies
        return planned_span(self.graph, self.effects, copies, engine=engine)

    @property
    def overhead(self) -> float:
        """Extra seconds as a fraction of the unplanned step."""
        step = self.unplanned_seconds
        return self.recompute_seconds / step if step else 0.0

    @cached_property
    def peak_by_kind(self) -> dict[str, int]:
        """Bytes alive at the peak by kind."""
        return self.bytes_by_kind(self.peak_moment)

    def alive(self, moment: int) -> list[int]:
        """Storages of the unplanned step that are alive at a half moment."""
        return [
            number
            for number, (one, stop) in enumerate(
                zip(self.graph.storages, self.stops, strict=True)
            )
            if 2 * one.maker + 1 <= moment <= stop
        ]

    def bytes_by_kind(self, moment: int) -> dict[str, int]:
        """Bytes alive at a half moment by kind; they add up to ``live_bytes``.

        Memory that regions allocate counts as activation; the rest, such as workspaces,
        as temporary.
        """
        storages, moved = self.graph.storages, self.changed_stops
        freed = {s: storages[s].bytes for s in self.freed_ticks if moved[s] == moment}
        total = dict.fromkeys(KINDS, 0)
        for storage in self.alive(moment):
            total[storages[storage].kind] += storages[storage].bytes
        for effect in self.effects:
            part = effect.gap_peak(moment, freed)[1]
            total["activation"] += effect.allocated_bytes(moment, part)
            for went, _ in effect.freed_in_gap.get(moment, ())[:part]:
                total[storages[went].kind] -= freed.get(went, 0)
        total["activation"] += sum(
            one.bytes
            for one in (*self.moves.leaving, *self.moves.early)
            if one.start <= moment <= one.stop
        )
        total["temporary"] += self.live_bytes[moment] - sum(total.values())
        return total
