"""The values of a joint graph that forward saves under the regions of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ckplan.compiling.graph import CompiledStep, as_graph
from ckplan.compiling.partition import JointGraph, Saved
from ckplan.errors import PlanError
from ckplan.graph.records import BEFORE_STEP
from ckplan.plan.plan import Plan
from ckplan.plan.region import PROGRAM, Region
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Simulator


def flat(region: Region) -> Region:
    """The region as compiled code can have it: op by op, with nothing nested."""
    return Region(region.call, PROGRAM, region.save, region.last)


def saved_by(
    step: CompiledStep, simulator: Simulator, regions: Sequence[Region]
) -> frozenset[str]:
    """Names of the nodes that forward saves under flat regions.

    They are the saved tensors that no region drops, and what the regions retain.

    Args:
        step: The compiled step.
        simulator: Of its graph.
        regions: Flat ones; see ``flat``.
    """
    graph, name_of = step.graph, step.name_of
    dropped: set[int] = set()
    kept: set[int] = set()
    for region in regions:
        dropped |= simulator.effect(region).dropped
        last = region.call if region.last is None else region.last
        view = simulator.view(region.call, last)
        program, _ = view.program(region)
        kept |= {view.flow.storage_of[value] for value in program.retained}
    kept |= {s.storage for i, s in enumerate(graph.saved) if i not in dropped}
    made = (s for s in kept if graph.storages[s].maker != BEFORE_STEP)
    return frozenset(name_of[storage] for storage in made)


def saved_in_any(joint: JointGraph, plan: Plan) -> frozenset[Saved]:
    """What forward saves under a plan, in each of the two graphs of a step.

    Which of them the plan was made of, only the code of the unplanned step shows. Where
    both say the same, or one lacks names of the plan, nobody needs to know.

    Args:
        joint: The joint graph, on a CPU.
        plan: A plan of it.
    """
    found: set[Saved] = set()
    for fuses_more in (False, True):
        step = as_graph(joint, plan.model, fuses_more=fuses_more, is_measured=False)
        with suppress(PlanError):
            regions = [*map(flat, resolve(plan, step.graph))]
            made = saved_by(step, Simulator(step.graph), regions)
            found.add(made if regions else None)
    return frozenset(found)
