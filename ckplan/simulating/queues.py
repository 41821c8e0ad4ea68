"""A planned step in the two queues of a GPU: what regions add stands where it runs.

Ops that rerun are launched and run in the gap before an op of backward. The engine's
own time delays launches: where a forward saves tensors, and before each op that reruns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ckplan.graph.graph import Graph
from ckplan.graph.queues import Span, span
from ckplan.simulating.effect import Effect, Work


def planned_span(graph: Graph, effects: Iterable[Effect], *, engine: bool) -> Span:
    """A step of the optimizer under a plan.

    Args:
        graph: The unplanned step, whose ops are launched.
        effects: Those of the plan's regions.
        engine: Whether the engine takes time.
    """
    added: defaultdict[int, list[Work]] = defaultdict(list)
    for effect in effects:
        for work in effect.work:
            added[work.moment].append(work)
    device, launch = graph.device_and_launch
    launches: list[float] = []
    kernels: list[float] = []
    done = 0
    for moment in sorted(added):
        ran = (moment + 1) // 2  # ops before a gap, or with the op of an odd one
        launches += launch[done:ran]
        kernels += device[done:ran]
        for work in added[moment]:
            launches.append(work.launch_seconds + engine * work.engine_seconds)
            kernels.append(work.device_seconds)
        done = ran
    stop = graph.backward_stop
    launches += launch[done:stop]
    kernels += device[done:stop]
    return graph.step_span(span(launches, kernels))
