"""A planned step in the queues of a GPU: what regions add stands where it runs.

Ops that rerun are launched and run in the gap before an op of backward. The engine's
own time delays launches: where a forward saves tensors, and before each op that reruns.
Offloaded values add two queues, copies out and copies back. A copy begins when the
device has come to it and the copy before it is over; the device waits for a copy out
where its value is to be freed, and for a copy back where its value is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckplan.graph.graph import Graph
from ckplan.graph.queues import Span, span
from ckplan.simulating.effect import Effect, Work


class CopyEvent(NamedTuple):
    """A copy begins or is waited for, at a half moment."""

    moment: int
    order: int  # within the half moment
    queue: str  # in which copies run one after the other
    copy: tuple[str, int]  # its way, and the storage
    seconds: float | None  # if it begins


class Copies:
    """The queues of copies beside a clock of ops."""

    def __init__(self) -> None:
        """No copy has begun."""
        self._free: defaultdict[str, float] = defaultdict(float)
        self._over: dict[tuple[str, int], float] = {}

    def meet(self, event: CopyEvent, now: float) -> float:
        """Ops come to an event; returns when they go on."""
        if event.seconds is None:
            return max(now, self._over[event.copy])
        over = max(now, self._free[event.queue]) + event.seconds
        self._free[event.queue] = self._over[event.copy] = over
        return now


def planned_span(
    graph: Graph,
    effects: Iterable[Effect],
    copies: Sequence[CopyEvent] = (),
    *,
    engine: bool,
) -> Span:
    """A step of the optimizer under a plan.

    Args:
        graph: The unplanned step, whose ops are launched.
        effects: Those of the plan's regions.
        copies: Of offloaded values, in order.
        engine: Whether the engine takes time.
    """
    added: defaultdict[int, list[Work]] = defaultdict(list)
    for effect in effects:
        for work in effect.work:
            added[work.moment].append(work)
    device, launch = graph.device_and_launch
    launches: list[float] = []
    kernels: list[float] = []
    met: dict[int, list[CopyEvent]] = {}  # number of launches before -> events
    events = iter(copies)
    event = next(events, None)
    done = 0

    def run_to(stop: int) -> None:
        """Launch ops up to one, with the copies that begin or end between them."""
        nonlocal done, event
        while event is not None and (event.moment + 1) // 2 <= stop:
            ran = max((event.moment + 1) // 2, done)
            launches.extend(launch[done:ran])
            kernels.extend(device[done:ran])
            done = ran
            met.setdefault(len(launches), []).append(event)
            event = next(events, None)
        launches.extend(launch[done:stop])
        kernels.extend(device[done:stop])
        done = stop

    for moment in sorted(added):
        run_to((moment + 1) // 2)  # ops before a gap, or with the op of an odd one
        for work in added[moment]:
            launches.append(work.launch_seconds + engine * work.engine_seconds)
            kernels.append(work.device_seconds)
    run_to(graph.backward_stop)
    if met:
        return graph.step_span(_with_copies(launches, kernels, met))
    return graph.step_span(span(launches, kernels))


def _with_copies(
    launches: Sequence[float],
    kernels: Sequence[float],
    met: dict[int, list[CopyEvent]],
) -> Span:
    """A part of a step whose device waits for copies.

    The part begins and ends without copies under way. What the device waits counts as
    its work.
    """
    copies = Copies()
    launched = ran = waited = 0.0
    for number in range(len(launches) + 1):
        for event in met.get(number, ()):
            now = max(launched, ran)
            ran = copies.meet(event, now)
            waited += ran - now
        if number < len(launches):
            launched += launches[number]
            ran = max(launched, ran) + kernels[number]
    return Span(sum(launches), sum(kernels) + waited, max(launched, ran))
