"""The seconds that several ranks spend on their collectives, where rates are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckplan.graph.graph import Graph
from ckplan.graph.sharding import Communication, Traffic, communication
from ckplan.simulating.peers import peer_rate
from ckplan.simulating.simulate import Timeline


@dataclass(frozen=True)
class Ranks:
    """What the ranks of one way to train send."""

    traffic: Callable[[], Traffic | None] = lambda: None  # None: one rank

    def communication(
        self, timeline: Timeline, *, planned: bool = True
    ) -> Communication | None:
        """The collectives of a step; None on one rank, or at an unknown rate."""
        sending = self._sending(timeline.graph)
        if sending is None:
            return None
        added = timeline.recompute_seconds - timeline.added_seconds if planned else 0.0
        return communication(timeline.graph, *sending, added)

    def seconds(self, timeline: Timeline) -> float:
        """Seconds of a step of the optimizer, with all that nothing hides."""
        sent = self.communication(timeline)
        alone = timeline.unplanned_seconds + timeline.recompute_seconds
        return alone + (sent.exposed_seconds if sent else 0.0)

    def overhead(self, timeline: Timeline) -> float:
        """What a plan adds to a step; recomputation hides communication, too."""
        unplanned = self.communication(timeline, planned=False)
        if unplanned is None or not timeline.recompute_seconds:
            return timeline.overhead
        step = timeline.unplanned_seconds + unplanned.exposed_seconds
        return self.seconds(timeline) / step - 1

    def least_seconds(self, graph: Graph, seconds: float, accumulate: int) -> float:
        """A bound on the seconds of an unplanned step: as if all that can be is hidden.

        Args:
            graph: Any step of the way.
            seconds: Of the step without communication.
            accumulate: Micro-batches of the step.
        """
        sending = self._sending(graph)
        if sending is None:
            return seconds
        traffic, rate = sending
        sent = traffic.step_bytes(accumulate)
        return max(seconds + traffic.update_bytes / rate, sent / rate)

    def _sending(self, graph: Graph) -> tuple[Traffic, int] | None:
        """What a rank sends, and how fast, if there are several and that is known."""
        traffic = self.traffic()
        rate = None if traffic is None else peer_rate(graph)
        return None if traffic is None or rate is None else (traffic, rate)
