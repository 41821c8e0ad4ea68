"""The closed loop: plans for a compiled step, each replayed before it counts.

The simulator proposes: it knows the ops of the joint graph, but not which buffers
Inductor reuses. The replay of the generated code decides. So the candidates are the
non-dominated plans of the solver, a fixed list that no budget changes, and a budget
gets the cheapest candidate whose replayed peak is within it. More budget allows more
candidates, so it never costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ckplan import units
from ckplan.compiling.graph import CompiledStep, as_graph
from ckplan.compiling.lowering import DynamoGraph, Lowered
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.proposing import Candidate, Proposer
from ckplan.compiling.refusals import check_same_graph, check_within_budget
from ckplan.compiling.replay import Replayed, replay, replay_known
from ckplan.compiling.side_by_side import most_at_once, side_by_side
from ckplan.errors import InfeasibleError
from ckplan.gpus import Gpu
from ckplan.plan.plan import Plan, Prediction, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Simulator
from ckplan.tracing.target import local_card
from ckplan.training.allocator import CPU
from ckplan.training.workload import device_of

Progress: TypeAlias = Callable[[str, int, int], object]
"""Told the stage of the work, the number of items done and their total."""


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
        self.device = device_of(traced.inputs)
        card = None if self.device == CPU else local_card(self.device)
        self.step = _step_of(joint, model, unplanned, card)
        self._progress = progress
        self._quick = quick
        self.proposer = Proposer(joint, self.step, card)
        own = self.proposer.own
        self._replayed: dict[frozenset[str] | None, Replayed] = {own: unplanned}
        self._real = dict(self._replayed)  # of code that is, or would be, compiled

    def solve(self, budget_bytes: int) -> Chosen:
        """Find the cheapest candidate whose replayed peak is within a budget.

        Args:
            budget_bytes: Limit on the bytes alive in forward and backward, parameters
                and batch included.

        Raises:
            InfeasibleError: None fits; the smallest replayed peak is named.
        """
        found = self._first_within(budget_bytes)
        if found is None:
            _ = [*self.each_replayed(self.candidates)]  # the smallest is told
            if not self._is_real(self.smallest.saved):
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

    def named(self, plan: Plan) -> Candidate:
        """Find the values that a plan saves.

        Raises:
            PlanError: The plan is for uncompiled code or another graph, or names what
                the graph does not have.
        """
        check_same_graph(plan, self.joint.digest, self.device.type)
        return self.proposer.candidate(resolve(plan, self.step.graph))

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
            self._replayed[saved] = replay(self._lowered(saved), self._num_outputs)
        return self._replayed[saved]

    def each_replayed(
        self, some: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Replayed]]:
        """Replay candidates in their order, several at a time where that is quicker."""
        for place, one in enumerate(some):
            if self._progress is not None:
                self._progress("replaying generated code", place, len(some))
            if one.saved not in self._replayed:
                self._replay_side_by_side([other.saved for other in some[place:]])
            yield one, self.replayed(one.saved)

    def _replay_side_by_side(self, some: Sequence[frozenset[str] | None]) -> None:
        """Replay the first, and meanwhile others that are not yet, if that can be."""
        first, *others = (one for one in some if one not in self._replayed)
        others = others[: most_at_once() - 1]
        found = side_by_side(self._known, others, lambda: self.replayed(first))
        for saved, replayed in zip(others, found, strict=True):
            if replayed is not None:
                self._replayed[saved] = replayed

    def _known(self, saved: frozenset[str] | None) -> Replayed | None:
        """A replay; None where that would have to measure kernels first."""
        return replay_known(self._lowered(saved), self._num_outputs)

    def _lowered(self, saved: frozenset[str] | None) -> Lowered:
        _, lowered = self.traced.lower(saved, quick=self._quick)
        assert lowered is not None
        return lowered

    @property
    def _num_outputs(self) -> int:
        return self.joint.num_outputs

    def _first_within(self, budget_bytes: int) -> Chosen | None:
        left = budget_bytes - self.unplanned.held_bytes
        some = [one for one in self.candidates if one.saved_bytes <= left]
        for candidate, found in self.each_replayed(some):
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
        found = replay(lowered, self._num_outputs)
        self._real[saved] = found
        if self._replayed.setdefault(saved, found) == found:
            return True
        self._quick = False
        self._replayed = dict(self._real)
        return False

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """All plans that a budget may get, flattened, the cheapest first."""
        if self._progress is not None:
            self._progress("solving", 0, 0)
        return self.proposer.candidates

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

    def _nothing_fits(self, budget_bytes: int) -> InfeasibleError:
        smallest = min(one.peak_bytes for one in self._replayed.values())
        budget, floor = map(units.format_bytes, (budget_bytes, smallest))
        return InfeasibleError(
            f"no plan fits {budget} in compiled code",
            needed=f"at least {floor} ({smallest} B), the smallest replayed peak",
            hint="a larger budget, a smaller batch, or ckplan.apply, uncompiled",
        )


def _step_of(
    joint: JointGraph, model: str, unplanned: Replayed, card: Gpu | None
) -> CompiledStep:
    """The step whose simulated peak is nearer to the replayed one, of two ways.

    For a card, that of ``elsewhere.py``, so that a plan made there names the same ops.
    """
    given = joint, model, unplanned.kernel_bytes
    if card is not None:
        return as_graph(*given, gpu=card)

    def far(one: CompiledStep) -> int:
        return abs(Simulator(one.graph).run(()).peak_bytes - unplanned.peak_bytes)

    return min((as_graph(*given, fuses_more=one) for one in (False, True)), key=far)
