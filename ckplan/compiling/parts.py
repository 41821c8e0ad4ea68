"""One budget for a step that graph breaks divide into several graphs.

Each graph is planned from what all need: while one runs forward or backward, what the
graphs before it save is alive, and the gradients of those after it. So all must be
known before the first is compiled: ``finding.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckplan import units
from ckplan.compiling.choosing import cheapest_within, try_the_smallest
from ckplan.compiling.combining import Combination, JointReplays, all_combinations
from ckplan.compiling.estimating import rounded_up
from ckplan.compiling.joining import JoinedStep, Run, join
from ckplan.compiling.proposing import WAYS, Candidate
from ckplan.compiling.refusals import check_same_graph, check_within_budget
from ckplan.compiling.replay import Replayed
from ckplan.compiling.search import Chosen, CompiledPlanner
from ckplan.errors import InfeasibleError
from ckplan.graph.records import BEFORE_STEP, GeneratedCode, SavingRegion
from ckplan.plan.plan import Plan, PlannedRegion, Prediction, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Simulator


@dataclass(frozen=True)
class Parts:
    """The graphs of one step, in the order in which forward runs them."""

    planners: Mapping[str, CompiledPlanner]  # by key of their graph
    runs: Sequence[Run]  # of graphs, in the order of forward
    gradient_bytes: Sequence[int]  # that backward of each run is the first to make
    eager_bytes: Sequence[int]  # saved by code before the first run, and after each
    eager_gradient_bytes: int  # of parameters that no graph trains
    held_bytes: int  # parameters, buffers and batch
    uncompiled: Mapping[str, str]  # why torch cannot compile graphs, by key
    # Of graphs that are compiled without a plan: their backward, if any, has no code.
    plain: frozenset[str] = frozenset()
    model: str = "model"
    # Saved by code that is not compiled, by path of the module that runs it.
    code_bytes: Mapping[str, int] = field(default_factory=dict)
    eager: tuple[PlannedRegion, ...] = ()  # regions that such code follows

    @property
    def saved_uncompiled_bytes(self) -> int:
        """Bytes that autograd saves for code that is not compiled."""
        return sum(self.eager_bytes)

    @property
    def runs_uncompiled(self) -> bool:
        """Whether code that matters for memory is not compiled."""
        return bool(self.saved_uncompiled_bytes or self.eager_gradient_bytes)

    @property
    def notice(self) -> str | None:
        """Which code runs without a plan, and the advice; None if all is compiled."""
        if not (self.runs_uncompiled or self.uncompiled):
            return None
        keeps = units.format_bytes(self.saved_uncompiled_bytes)
        code = ", ".join(
            f"{path} ({units.format_bytes(num_bytes)})"
            for path, num_bytes in self.code_bytes.items()
        )
        why = "".join(f"; Inductor fails at {one}" for one in self.uncompiled.values())
        titles = ", ".join(one.title for one in self.eager)
        plan = f"with regions for {titles}" if titles else "without a plan"
        advice = "" if titles else "; ckplan.apply(model, plan), before, plans it"
        return (
            f"{len(self.runs)} graphs of the step are compiled; code between them runs "
            f"uncompiled, {plan}, and keeps {keeps} for backward, which the budget "
            f"includes: {code or 'no module'}{why}{advice}"
        )

    def peak_bytes(self, replayed: Mapping[str, Replayed]) -> int:
        """Most bytes alive at once in the whole step; never too low for its graphs.

        Args:
            replayed: By key of a graph. What a graph returns is taken to live until its
                backward ends.
        """
        before = self.held_bytes + self.eager_bytes[0]
        peak = before
        for place, run in enumerate(self.runs):
            one = replayed[run.key]
            gradients = sum(self.gradient_bytes[place + 1 :])
            if any(self.eager_bytes[place + 1 :]):
                gradients += self.eager_gradient_bytes
            in_backward = one.backward_peak_bytes + gradients
            peak = max(peak, before + max(one.forward_peak_bytes, in_backward))
            before += one.saved_bytes + self.eager_bytes[place + 1]
        return peak

    @cached_property
    def joined(self) -> JoinedStep:
        """All graphs as one, to be planned by one solve; a lone one is as it is."""
        if len(self.runs) == 1:
            return JoinedStep(self.planners[self.runs[0].key].step.graph, ((0, 0),))
        steps = {key: one.step for key, one in self.planners.items()}
        known = join(self.runs, steps, 0, self.model).graph.storages
        found = sum(s.bytes for s in known if s.maker == BEFORE_STEP)
        beside = self.held_bytes + self.saved_uncompiled_bytes - found
        return join(self.runs, steps, beside, self.model)

    def overhead_of(self, overheads: Mapping[str, float]) -> float:
        """Estimated overhead of the graphs together, from that of each, by key."""
        added = sum(overheads[key] * one for key, one in self._seconds.items())
        return rounded_up(added / sum(self._seconds.values()))

    def plan(self, chosen: Mapping[str, Chosen], budget_bytes: int | None) -> Plan:
        """The plan of the whole step, in the names of its joined graph."""
        graph = self.joined.graph
        replayed = {key: one.replayed for key, one in chosen.items()}
        found = {key: one.candidate for key, one in chosen.items()}
        return Plan(
            model=graph.model,
            fingerprint=plan_fingerprint(graph.fingerprint),
            budget_bytes=budget_bytes,
            predicted=Prediction(
                peak_bytes=self.peak_bytes(replayed),
                peak_at=self._peak_at(replayed),
                overhead=self.overhead_of({k: c.overhead for k, c in found.items()}),
                unplanned_peak_bytes=self.unplanned_peak_bytes,
            ),
            regions=(*describe(graph, self._regions(found)), *self.eager),
        )

    def generated(self) -> tuple[GeneratedCode, ...]:
        """Every plan that a budget may get, its code replayed; the cheapest first."""
        simulator = Simulator(self.joined.graph)
        found: dict[tuple[SavingRegion, ...], GeneratedCode] = {}
        for one in self._plans():
            regions = self._regions(one)
            saving = tuple(region.saving for region in regions)
            if saving in found:
                continue
            replayed = self._replayed(one)
            found[saving] = GeneratedCode(
                saving,
                simulator.run(regions).simulated_peak_bytes,
                self.peak_bytes(replayed),
                self._peak_at(replayed),
                self.overhead_of({key: c.overhead for key, c in one.items()}),
            )
        return tuple(found.values())

    def _peak_at(self, replayed: Mapping[str, Replayed]) -> str:
        """Where a step has its peak: of a lone graph, the half."""
        if len(self.runs) == 1:
            return replayed[self.runs[0].key].peak_at
        return f"{len(self.runs)} compiled graphs"

    def follow(self, plan: Plan) -> dict[str, Chosen]:
        """Find what each graph saves under a plan of the whole step, and replay it.

        A graph that runs several times has one code: of its runs' plans, that which
        recomputes most.

        Raises:
            PlanError: The plan is for another step, or its peak exceeds its budget.
        """
        graph = self.joined.graph
        check_same_graph(plan, str(graph.fingerprint["compiled"]))
        found: dict[str, Candidate] = {}
        divided = self.joined.divided(resolve(plan, graph))
        for run, regions in zip(self.runs, divided, strict=True):
            one = self.planners[run.key].proposer.candidate(regions)
            other = found.setdefault(run.key, one)
            found[run.key] = max(other, one, key=lambda some: some.overhead)
        chosen = self._chosen(found)
        replayed = {key: one.replayed for key, one in chosen.items()}
        check_within_budget(plan, self.peak_bytes(replayed))
        return chosen

    @property
    def unplanned_peak_bytes(self) -> int:
        """Most bytes alive at once in the step as torch divides its graphs."""
        return self.peak_bytes({k: one.unplanned for k, one in self.planners.items()})

    def share(self, budget_bytes: int) -> dict[str, Chosen]:
        """Find the cheapest plans of all graphs that fit one budget together.

        Returns:
            By key of a graph. The budget of each plan is the bytes that it takes, those
            of its graph's inputs included.

        Raises:
            InfeasibleError: None fit; the smallest peak is named.
        """
        if self._is_whole:
            alone = self.runs[0].key
            return {alone: self.planners[alone].solve(budget_bytes)}
        some, told = self._combinations, self._told_of_replays
        beside = self.held_bytes + sum(self.eager_bytes)
        replays = JointReplays(
            {key: one.replays for key, one in self.planners.items()}, self.peak_bytes
        )
        found = cheapest_within(some, replays, budget_bytes, beside, told)
        if found is None:
            try_the_smallest(some, replays, budget_bytes, told)
            found = cheapest_within(some, replays, budget_bytes, beside, told)
        if found is not None:
            return self._chosen(found.choices)
        known = filter(None, (replays.known(one.saved) for one in some))
        smallest = min(one.peak_bytes for one in known)
        budget, floor = map(units.format_bytes, (budget_bytes, smallest))
        raise InfeasibleError(
            f"no plans of {len(self.planners)} compiled graphs fit {budget} together",
            needed=f"at least {floor} ({smallest} B), the smallest peak",
            hint="a larger budget, a smaller batch, or ckplan.apply, uncompiled",
        )

    def alike(self, name: str) -> dict[str, Candidate]:
        """One way for all graphs; those that do not have it are as torch divides."""
        every = {key: one.proposer for key, one in self.planners.items()}
        return {k: one.ways.get(name, one.candidate(())) for k, one in every.items()}

    def _chosen(self, combination: Mapping[str, Candidate]) -> dict[str, Chosen]:
        return {k: self.planners[k].chosen(one) for k, one in combination.items()}

    @property
    def _is_whole(self) -> bool:
        """Whether the step is one graph, and nothing beside it takes memory."""
        alone = self.planners[self.runs[0].key].unplanned
        return len(self.runs) == 1 and alone.peak_bytes == self.unplanned_peak_bytes

    def _plans(self) -> Iterator[Mapping[str, Candidate]]:
        """What a budget may get, in the order in which it is tried."""
        if self._is_whole:
            alone = self.runs[0].key
            planner = self.planners[alone]
            for one, _ in planner.each_replayed(planner.candidates):
                yield {alone: one}
            return
        for place, combination in enumerate(self._combinations):
            self._told_of_replays(place, len(self._combinations))
            yield combination.choices

    def _told_of_replays(self, done: int, total: int) -> None:
        next(iter(self.planners.values())).told_of_replays(done, total)

    def _regions(self, chosen: Mapping[str, Candidate]) -> tuple[Region, ...]:
        return self.joined.joined([chosen[run.key].regions for run in self.runs])

    def _replayed(self, combination: Mapping[str, Candidate]) -> dict[str, Replayed]:
        every = combination.items()
        return {key: self.planners[key].replayed(one.saved) for key, one in every}

    @cached_property
    def _combinations(self) -> list[Combination]:
        """What a budget may get, of a step of several graphs."""
        every = self.planners.items()
        return all_combinations(
            {key: one.candidates for key, one in every},
            [
                {key: one.proposer.candidate(()) for key, one in every},
                *map(self.alike, WAYS),
            ],
            self._seconds,
            self._simulated_peak,
        )

    @cached_property
    def _seconds(self) -> dict[str, float]:
        """Of all runs of a graph in an unplanned step, by key."""
        found = dict.fromkeys(self.planners, 0.0)
        for run in self.runs:
            found[run.key] += self.planners[run.key].step.graph.step_seconds
        return found

    def _simulated_peak(self, choices: Mapping[str, Candidate]) -> int:
        """As ``peak_bytes``, by simulation."""
        simulated = {}
        for key, one in choices.items():
            unplanned = self.planners[key].unplanned
            peak = one.simulated_peak_bytes - unplanned.held_bytes
            simulated[key] = replace(
                unplanned,
                forward_peak_bytes=peak,
                saved_bytes=one.saved_bytes,
                backward_peak_bytes=peak,
            )
        return self.peak_bytes(simulated)


def only(planner: CompiledPlanner) -> Parts:
    """A step of one graph."""
    held_bytes = planner.unplanned.held_bytes
    model = planner.step.graph.model
    return Parts(
        {"": planner}, (Run(""),), (0,), (0, 0), 0, held_bytes, {}, model=model
    )
