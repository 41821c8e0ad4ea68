"""Plans of a compiled step for a card: of each, the graph that it divides.

There is no code to replay. But the solver's graph is not what a plan gives: compiled
code has nothing nested, saves every draw, and computes values again as late as it may.
So every candidate divides the joint graph, and what counts is the simulated peak and
the seconds of that. These peaks are still simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckplan.compiling.costs import CardCosts
from ckplan.compiling.cuts import Cuts
from ckplan.compiling.graph import CompiledStep, as_graph
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.proposing import (
    TORCH_BUDGETS,
    budgets_to_try,
    fused,
    narrowed,
    saving_nodes,
)
from ckplan.compiling.saved_values import flat, saved_by
from ckplan.compiling.search import Progress
from ckplan.gpus import Gpu
from ckplan.graph.graph import Graph
from ckplan.graph.records import GeneratedCode, SavingRegion
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.timeline import Timeline
from ckplan.solving.planner import Planner


@dataclass(frozen=True)
class CardStep:
    """A compiled step, and what it is on a card."""

    joint: JointGraph
    step: CompiledStep
    gpu: Gpu
    finish: Callable[[Graph], Graph]  # in blocks of the allocator, on its host

    def timeline_of(self, joint: JointGraph) -> Timeline:
        """The step under another division of its joint graph."""
        other = as_graph(joint, self.step.graph.model, gpu=self.gpu)
        return Simulator(self.finish(other.graph)).run(())


def divided_plans(of: CardStep, progress: Progress | None) -> list[GeneratedCode]:
    """Every plan that a budget may get, its joint graph divided; the cheapest first.

    Args:
        of: The step.
        progress: Told of the work.
    """
    planner = Planner(of.finish(fused(of.step)))
    own = of.timeline_of(of.joint)
    found: dict[tuple[SavingRegion, ...], GeneratedCode] = {
        (): GeneratedCode(
            (), planner.unplanned.simulated_peak_bytes, own.peak_bytes, own.peak_at, 0.0
        )
    }
    seen = {of.joint.instead}
    proposed = list(_proposed(of, planner))
    for number, regions in enumerate(proposed):
        if progress is not None:
            progress("dividing the joint graph", number, len(proposed))
        saved = saved_by(of.step, planner.simulator, regions)
        if saved in seen:
            continue
        seen.add(saved)
        line = of.timeline_of(of.joint.divided(saved))
        key = tuple(region.saving for region in regions)
        more = line.graph.step_seconds / own.graph.step_seconds - 1
        simulated = planner.simulator.run(regions).simulated_peak_bytes
        found[key] = GeneratedCode(
            key, simulated, line.peak_bytes, line.peak_at, max(more, 0.0)
        )
    return sorted(found.values(), key=lambda one: (one.overhead, one.peak_bytes))


def _proposed(of: CardStep, planner: Planner) -> Iterator[tuple[Region, ...]]:
    """The solver's plans, every layer, everything, and what torch itself would save."""
    low, high = planner.floor.peak_bytes, planner.unplanned.peak_bytes
    cuts = Cuts(of.joint, CardCosts(of.gpu).again)
    for budget_bytes in budgets_to_try(low, high):
        plan = planner.within(budget_bytes)
        if plan is not None and plan[1]:
            regions = tuple(map(flat, plan[1]))
            yield regions
            saved = saved_by(of.step, planner.simulator, regions)
            fewer = narrowed(of.step, cuts, saved)
            yield saving_nodes(of.step, of.joint, fewer, flat(Region(0)))
    for _, regions in planner.standard_baselines.every_call:
        yield tuple(map(flat, regions))
    yield (flat(Region(0)),)
    for share in TORCH_BUDGETS:
        names = of.joint.saved_by_torch(share)
        yield saving_nodes(of.step, of.joint, names, flat(Region(0)))
