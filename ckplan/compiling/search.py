"""The closed loop: plans for a compiled step, each replayed before it counts.

The simulator proposes: it knows the ops of the joint graph, but not which buffers
Inductor reuses. The replay of the generated code decides. So the candidates are the
non-dominated plans of the solver, a fixed list that no budget changes, and a budget
gets the cheapest that is found to fit (``choosing.py``). More budget never costs more.
All that is found is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ckplan import units
from ckplan.compiling import plan_cache
from ckplan.compiling.choosing import cheapest_within, try_the_smallest
from ckplan.compiling.graph import CompiledStep, as_graph
from ckplan.compiling.lowering import DynamoGraph, Lowered
from ckplan.compiling.partition import JointGraph, Saved
from ckplan.compiling.proposing import Candidate, Proposer
from ckplan.compiling.refusals import check_same_graph, check_within_budget
from ckplan.compiling.replay import Replayed, replay
from ckplan.compiling.replays import Replays
from ckplan.compiling.saved_values import saved_in_any
from ckplan.compiling.torch_errors import refuse_read_values
from ckplan.errors import InfeasibleError
from ckplan.plan.plan import Plan, Prediction, plan_fingerprint
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Simulator
from ckplan.tracing.target import local_card
from ckplan.training.allocator import CPU
from ckplan.training.workload import device_of

Progress: TypeAlias = Callable[[str, int, int], object]
"""Told the stage of the work, the number of items done and their total."""


@dataclass(frozen=True)
class Chosen:
    """A plan for compiled code, and its replayed peak; the rest when it is asked for.

    Of a plan that is followed, the rest takes the code of the unplanned step.
    """

    budget_bytes: int | None
    saved: Saved
    replayed: Replayed
    planner: CompiledPlanner
    wanted: Plan | Candidate

    @property
    def unplanned(self) -> Replayed:
        """The replay of the code that torch's own choice gives."""
        return self.planner.unplanned

    @cached_property
    def candidate(self) -> Candidate:
        """The plan as if it were proposed, with estimates for what is saved."""
        if isinstance(self.wanted, Plan):
            return self.planner.named(self.wanted)
        return self.wanted

    @cached_property
    def plan(self) -> Plan:
        """The plan, in the names of the step."""
        if isinstance(self.wanted, Plan):
            return self.wanted
        return self.planner.describe(self.wanted, self.budget_bytes)


def plan_graph(
    traced: DynamoGraph,
    model: str = "model",
    progress: Progress | None = None,
    quick: bool = False,
    follows: bool = False,
) -> CompiledPlanner | None:
    """Make the planner of a graph, with what is known of it from before.

    Args:
        traced: The graph of Dynamo.
        model: Name of the model.
        progress: Told of the work.
        quick: See ``CompiledPlanner``.
        follows: It is to follow a plan, for which no unplanned code is generated.

    Returns:
        None if nothing requires a gradient.

    Raises:
        ApplyError: Its code cannot be replayed.
        GraphBreakError: It goes by values of tensors.
    """
    refuse_read_values(traced.module)
    path = plan_cache.path_of(traced)
    how = model, progress, quick, path
    if follows or (path is not None and path.exists()):
        joint = traced.trace()
        if joint is None:
            return None
        known = None if path is None else plan_cache.read(path, joint)
        if follows or known is not None:
            return CompiledPlanner(traced, joint, *how, known=known)
    joint, lowered = traced.lower(None)
    if joint is None or lowered is None:
        return None
    unplanned = replay(lowered, joint.num_outputs)
    return CompiledPlanner(traced, joint, *how, unplanned=unplanned)


class CompiledPlanner:
    """The plans of one compiled step. Replays are remembered."""

    def __init__(
        self,
        traced: DynamoGraph,
        joint: JointGraph,
        model: str = "model",
        progress: Progress | None = None,
        quick: bool = False,
        path: Path | None = None,
        *,
        known: plan_cache.Known | None = None,
        unplanned: Replayed | None = None,
    ) -> None:
        """Plan one step.

        Args:
            traced: The graph of Dynamo.
            joint: Its joint graph, divided as torch does.
            model: Name of the model.
            progress: Told of the work.
            quick: Replay code that is not vectorized. ``check`` what is compiled then.
            path: Of a file to keep what is found; see ``plan_cache.py``.
            known: What is known from before.
            unplanned: The replay of the joint graph, if its code was generated.
        """
        self.traced = traced
        self.joint = joint
        self.device = device_of(traced.inputs)
        self._card = None if self.device == CPU else local_card(self.device)
        self._model = model
        self._progress = progress
        self._path = path
        if known is None:
            digest = plan_cache.digest_of(joint)
            known = plan_cache.Known(digest, None, None, {}, frozenset())
        self.digest = known.joint  # equal for joint graphs that have the same plans
        self._fuses_more, self._candidates = known.fuses_more, known.candidates
        real: dict[Saved, Replayed] = {} if unplanned is None else {None: unplanned}
        found = {**(known.replayed if quick else known.real_ones), **real}
        given = joint.num_outputs, self._lowered, self._remember, quick
        self.replays = Replays(*given, found, real, known.real)

    @property
    def unplanned(self) -> Replayed:
        """The replay of the code that torch's own choice gives."""
        self.replays.is_real(None)
        return self.replays.of(None)

    @cached_property
    def step(self) -> CompiledStep:
        """The step as a ``Graph``."""
        if self._card is not None:  # as in ``elsewhere.py``: plans name the same ops
            return as_graph(self.joint, self._model, gpu=self._card)
        given = self.joint, self._model, self.unplanned
        found = _step_of(*given, self._fuses_more)
        self._fuses_more = found.fuses_more
        return found

    @cached_property
    def proposer(self) -> Proposer:
        """Proposes plans, and estimates what they cost."""
        return Proposer(self.joint, self.step, self._card)

    def solve(self, budget_bytes: int) -> Chosen:
        """Find the cheapest candidate whose replayed peak is within a budget.

        Args:
            budget_bytes: Limit on the bytes alive, parameters and batch included.

        Raises:
            InfeasibleError: None fits; the smallest known peak is named.
        """
        found = self._first_within(budget_bytes)
        if found is None:
            told = self.told_of_replays
            try_the_smallest(self.candidates, self.replays, budget_bytes, told)
            self.replays.is_real(self.smallest.saved)
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
        return self.replays.is_real(chosen.saved, lowered)

    @property
    def smallest(self) -> Candidate:
        """The candidate with the smallest replayed peak, of those replayed."""
        known = [one for one in self.candidates if one.saved in self.replays.found]
        return min(known, key=lambda one: self.replays.found[one.saved].peak_bytes)

    def named(self, plan: Plan) -> Candidate:
        """Find the values that a plan saves.

        Raises:
            PlanError: The plan is for uncompiled code or another graph, or names what
                the graph does not have.
        """
        check_same_graph(plan, self.joint.digest, self.device.type)
        return self.proposer.candidate(resolve(plan, self.step.graph))

    def saved_under(self, plan: Plan) -> Saved:
        """Find the values that a plan saves, without unplanned code if that can be.

        Raises:
            PlanError: As of ``named``.
        """
        check_same_graph(plan, self.joint.digest, self.device.type)
        if self._card is None and None not in self.replays.found:
            found = saved_in_any(self.joint, plan)
            if len(found) == 1:
                return next(iter(found))
        return self.named(plan).saved

    def follow(self, plan: Plan) -> Chosen:
        """Find the values that a plan saves, generate that code and replay it.

        Raises:
            PlanError: As of ``named``, or its replayed peak exceeds its budget.
        """
        return self.followed(plan, self.saved_under(plan), None)

    def followed(self, plan: Plan, saved: Saved, lowered: Lowered | None) -> Chosen:
        """A plan whose values are found; see ``check`` for its code.

        Raises:
            PlanError: Its replayed peak exceeds its budget.
        """
        self.replays.is_real(saved, lowered)
        found = self.replayed(saved)
        check_within_budget(plan, found.peak_bytes)
        return Chosen(plan.budget_bytes, saved, found, self, plan)

    def replayed(self, saved: Saved) -> Replayed:
        """The replayed step with the given values saved."""
        return self.replays.of(saved)

    def each_replayed(
        self, some: Sequence[Candidate]
    ) -> Iterator[tuple[Candidate, Replayed]]:
        """Replay candidates in their order, several at a time where that is quicker."""
        for place, one in enumerate(some):
            self.told_of_replays(place, len(some))
            yield one, self.replays.of_first([other.saved for other in some[place:]])

    def _lowered(self, saved: Saved, quick: bool) -> Lowered:
        _, lowered = self.traced.lower(saved, quick=quick)
        assert lowered is not None
        return lowered

    def _first_within(self, budget_bytes: int) -> Chosen | None:
        given = self.candidates, self.replays, budget_bytes, self.unplanned.held_bytes
        found = cheapest_within(*given, self.told_of_replays)
        return None if found is None else self.chosen(found, budget_bytes)

    def told_of_replays(self, done: int, total: int) -> None:
        """Tell how many replays are made, of how many at most."""
        if self._progress is not None:
            self._progress("replaying generated code", done, total)

    def _remember(self) -> None:
        """Keep what was found for the next start."""
        if self._path is not None:
            found = self._fuses_more, self._candidates, self.replays.found
            real = self.replays.trusted | self.replays.real.keys()
            plan_cache.write(self._path, plan_cache.Known(self.digest, *found, real))

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All plans that a budget may get, flattened, the cheapest first."""
        if self._candidates is None:
            if self._progress is not None:
                self._progress("solving", 0, 0)
            self._candidates = self.proposer.candidates
            self._remember()
        return self._candidates

    def chosen(self, one: Candidate, budget_bytes: int | None = None) -> Chosen:
        """A candidate as a plan; by default, its budget is what it takes."""
        found = self.replayed(one.saved)
        if budget_bytes is None:
            budget_bytes = found.peak_bytes
        return Chosen(budget_bytes, one.saved, found, self, one)

    def describe(self, one: Candidate, budget_bytes: int | None) -> Plan:
        """A candidate in the names of the step."""
        graph, found = self.step.graph, self.replayed(one.saved)
        return Plan(
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

    def _nothing_fits(self, budget_bytes: int) -> InfeasibleError:
        smallest = min(one.peak_bytes for one in self.replays.found.values())
        budget, floor = map(units.format_bytes, (budget_bytes, smallest))
        return InfeasibleError(
            f"no plan fits {budget} in compiled code",
            needed=f"at least {floor} ({smallest} B), the smallest replayed peak",
            hint="a larger budget, a smaller batch, or ckplan.apply, uncompiled",
        )


def _step_of(
    joint: JointGraph, model: str, unplanned: Replayed, fuses_more: bool | None
) -> CompiledStep:
    """The step whose simulated peak is nearer to the replayed one, of two ways.

    Which one, may be known.
    """
    given = joint, model, unplanned.kernel_bytes
    if fuses_more is not None:
        return as_graph(*given, fuses_more=fuses_more)

    def far(one: CompiledStep) -> int:
        return abs(Simulator(one.graph).run(()).peak_bytes - unplanned.peak_bytes)

    return min((as_graph(*given, fuses_more=one) for one in (False, True)), key=far)
