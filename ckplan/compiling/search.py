"""The closed loop: plans for a compiled step, each replayed before it counts.

The simulator proposes: it knows the ops of the joint graph, but not which buffers
Inductor reuses. The replay of the generated code decides. So the candidates are the
non-dominated plans of the solver, a fixed list that no budget changes, and a budget
gets the cheapest candidate whose replayed peak is within it. More budget allows more
candidates, so it never costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ckplan import units
from ckplan.compiling.costs import CpuCosts
from ckplan.compiling.cuts import Cuts
from ckplan.compiling.graph import CompiledStep, as_graph
from ckplan.compiling.layouts import convolutions_to_save, saving
from ckplan.compiling.lowering import DynamoGraph, Lowered
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.proposing import budgets_to_try, fused, saving_nodes
from ckplan.compiling.refusals import check_same_graph, check_within_budget
from ckplan.compiling.replay import Replayed, replay
from ckplan.compiling.saved_values import flat, saved_by
from ckplan.errors import InfeasibleError
from ckplan.plan.plan import Plan, Prediction, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Simulator
from ckplan.solving.planner import Planner

Progress: TypeAlias = Callable[[str, int, int], object]
"""Told the stage of the work, the number of items done and their total."""
TORCH_BUDGETS = (0.75, 0.5, 0.25, 0.0)
"""Values of torch's ``activation_memory_budget``: what they save is a candidate."""
WAYS = ("every layer", "everything", *(f"torch, {one:g}" for one in TORCH_BUDGETS))
"""Candidates whatever their simulated bytes, since ``compare`` shows them."""
_MOST_DOMINATED = 1.1
"""A candidate whose simulated peak exceeds that of a cheaper one by more than this
factor is left out. Replayed peaks of nearly equal ones may be in another order."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that the solver proposes."""

    regions: tuple[Region, ...]
    simulated_peak_bytes: int
    overhead: float  # estimated for its division, as a fraction of the unplanned step
    saved: frozenset[str] | None  # nodes that forward saves; None: torch's own choice


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan for compiled code, and its replayed peak."""

    plan: Plan
    saved: frozenset[str] | None
    replayed: Replayed
    unplanned: Replayed
    overhead: float  # estimated for what is saved, whatever the plan's file says
    regions: tuple[Region, ...]


class CompiledPlanner:
    """The plans of one compiled step. Replays are remembered."""

    def __init__(
        self,
        traced: DynamoGraph,
        joint: JointGraph,
        unplanned: Replayed,
        model: str = "model",
        progress: Progress | None = None,
        quick: bool = False,
    ) -> None:
        """Plan one step.

        Args:
            traced: The graph of Dynamo.
            joint: Its joint graph, divided as torch does.
            unplanned: The replay of that.
            model: Name of the model.
            progress: Told of the work.
            quick: Replay code that is not vectorized. ``check`` what is compiled then.
        """
        self.traced = traced
        self.joint = joint
        self.unplanned = unplanned
        self.step = _nearer(joint, model, unplanned)
        self._progress = progress
        self._quick = quick
        self._own = joint.instead
        self._replayed: dict[frozenset[str] | None, Replayed] = {self._own: unplanned}
        self._real = dict(self._replayed)  # of code that is, or would be, compiled
        self._overheads: dict[frozenset[str], float] = {}

    def solve(self, budget_bytes: int) -> Chosen:
        """Find the cheapest candidate whose replayed peak is within a budget.

        Args:
            budget_bytes: Limit on the bytes alive in forward and backward, parameters
                and batch included.

        Raises:
            InfeasibleError: None fits; the smallest replayed peak is named.
        """
        found = self._first_within(budget_bytes)
        if found is None and not self._is_real(self.smallest.saved):
            found = self._first_within(budget_bytes)
        if found is None:
            raise self._nothing_fits(budget_bytes)
        return found

    def check(self, chosen: Chosen, lowered: Lowered | None) -> bool:
        """Whether code that was compiled takes the bytes that a plan says.

        If not, nothing more is replayed quickly, and the plan is to be made again.

        Args:
            chosen: The plan.
            lowered: The code; None if it is to be generated for this.
        """
        return self._is_real(chosen.saved, lowered)

    @property
    def smallest(self) -> Candidate:
        """The candidate with the smallest replayed peak, of those replayed."""
        known = [one for one in self.candidates if one.saved in self._replayed]
        return min(known, key=lambda one: self._replayed[one.saved].peak_bytes)

    @cached_property
    def ways(self) -> Mapping[str, Candidate]:
        """Those of ``WAYS`` that the step has, by name."""
        layers = [one for _, one in self._planner.standard_baselines.plans]
        found = dict(zip(WAYS, (*(layers or [()]), (Region(0),)), strict=False))
        for name, share in zip(WAYS[2:], TORCH_BUDGETS, strict=True):
            found[name] = self._saving(self.joint.saved_by_torch(share))
        return {name: self.candidate(some) for name, some in found.items() if some}

    def named(self, plan: Plan) -> Candidate:
        """Find the values that a plan saves.

        Raises:
            PlanError: The plan is for uncompiled code or another graph, or names what
                the graph does not have.
        """
        check_same_graph(plan, self.joint.digest)
        return self.candidate(resolve(plan, self.step.graph))

    def follow(self, plan: Plan, lowered: Lowered | None = None) -> Chosen:
        """Find the values that a plan saves, and replay it.

        Args:
            plan: The plan.
            lowered: The code that saves them; None if it is to be generated for this.

        Raises:
            PlanError: As of ``named``, or its replayed peak exceeds its budget.
        """
        one = self.named(plan)
        saved = one.saved
        self._is_real(saved, lowered)
        found = self.replayed(saved)
        check_within_budget(plan, found.peak_bytes)
        return Chosen(plan, saved, found, self.unplanned, one.overhead, one.regions)

    def replayed(self, saved: frozenset[str] | None) -> Replayed:
        """The replayed step with the given values saved."""
        if saved not in self._replayed:
            if self._progress is not None:
                proposed = len(self.__dict__.get("candidates", ()))
                done = len(self._replayed) if proposed else 0
                self._progress("replaying generated code", done, proposed)
            _, lowered = self.traced.lower(saved, quick=self._quick)
            assert lowered is not None
            self._replayed[saved] = replay(lowered, self.joint.num_outputs)
        return self._replayed[saved]

    def _first_within(self, budget_bytes: int) -> Chosen | None:
        for candidate in self.candidates:
            found = self.replayed(candidate.saved)
            if found.peak_bytes <= budget_bytes:
                return self.chosen(candidate, budget_bytes)
        return None

    def _is_real(
        self, saved: frozenset[str] | None, lowered: Lowered | None = None
    ) -> bool:
        """Whether the code that runs takes what was replayed; if not, forget the rest.

        Args:
            saved: What forward saves.
            lowered: The code that runs; None: it is generated.
        """
        if not self._quick or saved in self._real:
            return True
        if lowered is None:
            _, lowered = self.traced.lower(saved)
            assert lowered is not None
        found = replay(lowered, self.joint.num_outputs)
        self._real[saved] = found
        if self._replayed.setdefault(saved, found) == found:
            return True
        self._quick = False
        self._replayed = dict(self._real)
        return False

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The plans of the solver, flattened, the cheapest first."""
        if self._progress is not None:
            self._progress("solving", 0, 0)
        return tuple(self._proposed())

    def candidate(self, regions: Sequence[Region]) -> Candidate:
        """What compiled code can have of a plan for single ops: nothing nested."""
        found = tuple(map(flat, regions))
        simulator = self._planner.simulator
        saved = saved_by(self.step, simulator, found) if found else self._own
        peak_bytes = simulator.run(found).peak_bytes
        return Candidate(found, peak_bytes, self.overhead_of(saved), saved)

    def overhead_of(self, saved: frozenset[str] | None) -> float:
        """Estimated seconds that saving the given values adds, as a fraction.

        They are those of that division of the joint graph.
        """
        if saved == self._own:
            return 0.0
        assert saved is not None
        if saved not in self._overheads:
            self._overheads[saved] = self.overhead_in(self.joint.divided(saved))
        return self._overheads[saved]

    def overhead_in(self, joint: JointGraph) -> float:
        """Estimated seconds of another division beyond torch's own, as a fraction.

        Estimates are too rough to promise a gain, so 0 is the least.
        """
        return max(self.seconds_in(joint) / self._own_seconds - 1, 0.0)

    def seconds_in(self, joint: JointGraph) -> float:
        """Estimated seconds of a division."""
        return self.step.divided(joint).step_seconds

    def least_overhead(self, saved_bytes: int) -> float:
        """Contractions that run again at least, as a fraction of the unplanned step.

        Args:
            saved_bytes: Most bytes that forward saves.
        """
        return self._cuts.seconds_at_least(saved_bytes) / self._own_seconds

    @cached_property
    def _cuts(self) -> Cuts:
        costs = CpuCosts(self.unplanned.kernel_bytes)
        costs.measure(self.joint.module.graph)
        return Cuts(self.joint, costs.alone)

    @cached_property
    def _own_seconds(self) -> float:
        return self.step.graph.step_seconds

    def chosen(self, one: Candidate, budget_bytes: int | None = None) -> Chosen:
        """A candidate as a plan; by default, its budget is what it takes."""
        found = self.replayed(one.saved)
        if budget_bytes is None:
            budget_bytes = found.peak_bytes
        graph = self.step.graph
        plan = Plan(
            model=graph.model,
            fingerprint=plan_fingerprint(graph.fingerprint),
            budget_bytes=budget_bytes,
            predicted=Prediction(
                peak_bytes=found.peak_bytes,
                peak_at=found.peak_at,
                overhead=one.overhead,
                unplanned_peak_bytes=self.unplanned.peak_bytes,
            ),
            regions=describe(graph, one.regions),
        )
        return Chosen(plan, one.saved, found, self.unplanned, one.overhead, one.regions)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.step.graph)

    @cached_property
    def _fused_planner(self) -> Planner:
        return Planner(fused(self.step))

    def _proposed(self) -> Iterator[Candidate]:
        planner = self._planner
        seen: set[frozenset[str] | None] = set()
        kept = convolutions_to_save(self.joint, self.unplanned.kernel_bytes)
        found = [Candidate((), planner.unplanned.peak_bytes, 0.0, self._own)]
        ends = planner.floor.peak_bytes, planner.unplanned.peak_bytes
        for budget_bytes in budgets_to_try(*ends):
            for solver in (planner, self._fused_planner):
                plan = solver.within(budget_bytes)
                if plan is not None and plan[1]:
                    found.append(self.candidate(saving(self.step, plan[1], kept)))
        smallest = float("inf")
        ways = {one.saved for one in self.ways.values()}
        for one in sorted([*found, *self.ways.values()], key=_cheapest_first):
            is_promising = one.simulated_peak_bytes <= _MOST_DOMINATED * smallest
            if one.saved not in ways:
                smallest = min(smallest, one.simulated_peak_bytes)
            if (is_promising or one.saved in ways) and one.saved not in seen:
                seen.add(one.saved)
                yield one

    def _saving(self, names: Collection[str]) -> tuple[Region, ...]:
        """All of forward as one region that saves the storages of nodes."""
        return saving_nodes(self.step, self.joint, names, Region(0))

    def _nothing_fits(self, budget_bytes: int) -> InfeasibleError:
        smallest = min(one.peak_bytes for one in self._replayed.values())
        budget, floor = map(units.format_bytes, (budget_bytes, smallest))
        return InfeasibleError(
            f"no plan fits {budget} in compiled code",
            needed=f"at least {floor} ({smallest} B), the smallest replayed peak",
            hint="a larger budget, a smaller batch, or ckplan.apply, uncompiled",
        )


def _cheapest_first(one: Candidate) -> tuple[float, bool, int]:
    return one.overhead, bool(one.regions), one.simulated_peak_bytes


def _nearer(joint: JointGraph, model: str, unplanned: Replayed) -> CompiledStep:
    """The step whose simulated peak is nearer to the replayed one, of two ways."""
    given = joint, model, unplanned.kernel_bytes

    def far(one: CompiledStep) -> int:
        return abs(Simulator(one.graph).run(()).peak_bytes - unplanned.peak_bytes)

    return min((as_graph(*given, fuses_more=one) for one in (False, True)), key=far)
