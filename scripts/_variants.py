"""The ways to take a step that `cost.py` measures: ours, and whole layers rerun."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import describe
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.baselines import find_repeated_layers
from ckplan.solving.menu import Menus
from ckplan.solving.solve import solve, to_plan

OURS, PLAIN = "our plan", "our plan, nothing encoded"


@dataclass(frozen=True)
class Variant:
    """One way to take the step."""

    name: str
    timeline: Timeline
    plan: Plan | None = None
    share: float | None = None  # of the activation bytes, to be freed
    budget_bytes: int | None = None
    bound_overhead: float | None = None  # of a plan of ours

    @property
    def ours(self) -> bool:
        """Whether ``solve`` made it."""
        return self.bound_overhead is not None


def choose(
    graph: Graph, shares: Iterable[float], *, plain: bool
) -> tuple[list[Variant], list[str]]:
    """All ways to take the step, the unplanned one first, and what cannot be done."""
    ours = {OURS: graph}
    if plain:
        ours[PLAIN] = replace(graph, encodings=())
    layers = _Layers(graph)
    unplanned = Variant("unplanned", layers.simulator.run())
    variants, notes = [unplanned], []
    for share in shares:
        freed_bytes = round(share * graph.bytes_by_kind["activation"])
        budget_bytes = unplanned.timeline.peak_bytes - freed_bytes
        for name, of in ours.items():
            try:
                variants.append(_ours(name, of, share, budget_bytes))
            except InfeasibleError as error:
                notes.append(f"{name} that frees {share:.0%}: {error.what}.")
        practice = layers.within(share, budget_bytes)
        if practice is None:
            notes.append(f"No number of whole layers frees {share:.0%}.")
        else:
            variants.append(practice)
    return [*variants, layers.every()], notes


def _ours(name: str, graph: Graph, share: float, budget_bytes: int) -> Variant:
    found = solve(graph, budget_bytes)
    return Variant(
        name,
        found.timeline,
        to_plan(graph, found),
        share,
        budget_bytes,
        found.bound_overhead,
    )


class _Layers:
    """Everyday practice: whole layers are run again, the first ones of the model."""

    def __init__(self, graph: Graph) -> None:
        self.simulator = Simulator(graph)
        layers = find_repeated_layers(graph, Menus(self.simulator))
        self._regions = [Region(layer, RERUN) for layer in layers]

    def within(self, share: float, budget_bytes: int) -> Variant | None:
        """As few layers as a budget needs; None if all are not enough."""
        for count in range(1, len(self._regions) + 1):
            timeline = self.simulator.run(self._regions[:count])
            if timeline.peak_bytes <= budget_bytes:
                name = f"{count} of {len(self._regions)} layers rerun"
                return Variant(name, timeline, self._plan(count), share, budget_bytes)
        return None

    def every(self) -> Variant:
        """All layers."""
        timeline = self.simulator.run(self._regions)
        return Variant("every layer rerun", timeline, self._plan(len(self._regions)))

    def _plan(self, count: int) -> Plan:
        graph = self.simulator.graph
        return Plan(graph.model, regions=describe(graph, self._regions[:count]))
