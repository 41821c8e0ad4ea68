"""Entry points of solving: find the cheapest plan that fits a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ckplan import units
from ckplan.errors import CkplanError
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, Prediction, plan_fingerprint
from ckplan.plan.resolve import describe
from ckplan.plan.workload import plan_workload
from ckplan.simulating.moving import Link, is_on_gpu
from ckplan.solving.card_memory import card_bytes
from ckplan.solving.levers import GROUPS, allowed_levers, search_with
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import behind_host, host_rate
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import room_warning
from ckplan.solving.search import solve_with_room
from ckplan.solving.solution import FrontierPoint, Solution

GOALS = (None, "min-memory", "knee")
METHODS = ("chain", "milp")


def solve(graph: Graph, budget_bytes: int) -> Solution:
    """Find the cheapest plan whose simulated peak is within a budget.

    Args:
        graph: The recorded step.
        budget_bytes: Limit on the total allocated peak of the step.

    Raises:
        InfeasibleError: No plan found fits; the floor and its owner are named.
    """
    return Planner(graph).solve(budget_bytes)


def frontier(graph: Graph | str | Path, count: int = 24) -> tuple[FrontierPoint, ...]:
    """Non-dominated plans, the smallest first; see ``Planner.frontier``."""
    return Planner(trace_file.step_of(graph)).frontier(count)


def solve_plan(
    graph: Graph | str | Path,
    budget: str | int | None = None,
    *,
    gpu: str | None = None,
    gpu_memory: str | int | None = None,
    reserve: str | int = 0,
    expandable_segments: bool = False,
    max_overhead: float | str | None = None,
    goal: str | None = None,
    method: str = "chain",
    time_limit: float = 60.0,
    allow: str | Collection[str] | None = (),
    spill_rate: str | float | Link | None = None,
    offload: str | None = None,
) -> Plan:
    """Find a plan for exactly one of a budget, a card, an overhead or a goal.

    Args:
        graph: The recorded step, or the path of its file.
        budget: A size such as ``"12GiB"``, ``"80%"`` of the unplanned peak, or bytes.
            The result is the cheapest plan within it.
        gpu: A card of ``ckplan gpus``; the plan fits its memory as PyTorch's allocator
            reserves it. The default, without other objectives, is the card that the
            graph was profiled for.
        gpu_memory: Instead of its name, the memory of a card that is not listed, such
            as ``"16GB"``.
        reserve: Size subtracted from the budget or the card's memory, for memory that
            is not in the graph.
        expandable_segments: Whether training on the card runs with
            ``PYTORCH_ALLOC_CONF=expandable_segments:True``, which leaves fewer gaps.
        max_overhead: ``"5%"`` or a fraction of the step. The result is the plan with
            the smallest peak within this overhead.
        goal: ``"min-memory"``, or ``"knee"``: beyond it, further savings cost much
            more time.
        method: ``"chain"``, or ``"milp"`` for a tighter bound by integer programming
            (small graphs; needs the extra ``milp``).
        time_limit: Seconds that ``"milp"`` may take.
        allow: ``"tiles"``: the head and its loss may run in tiles, without the
            logits, and MLPs and attentions, without their hidden values and scores. For
            a budget, a card, or the least memory. With ``"close"``, too: also a head
            whose 16-bit logits are not cast to float32, and others whose gradients
            tiles round in another place; the plan says ``bits: close``. ``"groups"``:
            the optimizer may update groups of parameters, one after the other; then the
            plan's ``workload`` says so, and ``update_in_groups`` does it. Several are
            a list, or joined by commas.
        spill_rate: A disk that activations may move to, ``ckplan.spill_link("/tmp")``,
            or its bytes per second, such as ``"2GB"``, for copies that take nothing
            from the processor; on a GPU, of the way to host memory, each way. For a
            budget, a card or the least memory. On the CPU, the plan needs
            ``apply(..., spill=FOLDER)``.
        offload: ``"host"``: activations of a GPU may move to host memory, at the rate
            of the card in ``configs/gpus.yaml`` unless ``spill_rate`` is given. A
            folder: to a file there, whose disk has that ``spill_rate``.

    Raises:
        CkplanError: Not exactly one of a budget, a card, a largest overhead and a goal
            is passed, one cannot be parsed, a reserve is passed without a budget, or
            the graph was profiled for another card or the CPU.
        InfeasibleError: No plan found fits; the floor and its owner are named.

    Warns:
        UserWarning: On a card, PyTorch's allocator has no room for the plan, or only
            with expandable segments, which were not asked for.
    """
    graph = trace_file.step_of(graph)
    if method not in METHODS:
        raise CkplanError(
            f"unknown method {method!r}",
            needed=f"one of {', '.join(METHODS)}",
            hint="ckplan.solve(graph, budget='12GiB')",
        )
    if budget is max_overhead is goal is gpu_memory is None:
        gpu = gpu or graph.options.get("gpu")
    if max_overhead is not None:
        max_overhead = units.parse_overhead(max_overhead)
    reserve_bytes = units.parse_bytes(reserve)
    objective = Objective(
        budget,
        max_overhead,
        goal,
        gpu,
        reserve_bytes,
        expandable_segments,
        gpu_memory,
    )
    planner = Planner(graph)
    link, allow = _link(graph, spill_rate, offload, gpu), allow or ()
    if method == "milp":
        check_exact(allow, link)
    solution = find(planner, objective, allow, link)
    warning = room_warning(solution, reserve_bytes, asked=expandable_segments)
    if warning and solution.limit.of_reserved:  # a budget is of tensors alone
        warnings.warn(warning, stacklevel=2)
    if method == "milp":
        solution = add_exact_bound(planner, solution, time_limit)
    return to_plan(graph, solution)


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a plan: exactly one of the first four or the last is set."""

    budget: str | int | None = None
    max_overhead: float | None = None
    goal: str | None = None
    gpu: str | None = None  # card whose usable memory is the allocator's limit
    reserve_bytes: int = 0  # subtracted from the budget
    expandable: bool = False  # whether the card's allocator uses expandable segments
    gpu_memory: str | int | None = None  # of a card that is not listed

    def __post_init__(self) -> None:
        """Raise unless exactly one is set, and for a reserve without a budget."""
        if self.goal not in GOALS:
            raise CkplanError(
                f"unknown goal {self.goal!r}",
                needed=" or ".join(filter(None, GOALS)),
                hint="ckplan.solve(graph, goal='min-memory')",
            )
        if self.max_overhead is not None and not 0 <= self.max_overhead < math.inf:
            raise CkplanError(
                f"cannot find a plan that costs at most {self.max_overhead}",
                needed="a fraction of the step, 0 or more",
                hint="ckplan.solve(graph, max_overhead=0.05)",
            )
        objectives = [self.budget, self.max_overhead, self.goal, self.gpu]
        objectives.append(self.gpu_memory)
        if sum(objective is not None for objective in objectives) != 1:
            raise CkplanError(
                "cannot choose the objective of the plan",
                needed="exactly one of a budget, a card, a largest overhead and a goal "
                f"({' or '.join(filter(None, GOALS))})",
                hint="ckplan.solve(graph, budget='12GiB')",
            )
        names_card = self.gpu is not None or self.gpu_memory is not None
        if self.expandable and not names_card:
            raise CkplanError(
                "cannot use expandable segments: no card is named",
                needed="a card, whose usable memory depends on them",
                hint="--gpu 'RTX 4090', or leave out --expandable-segments",
            )
        if self.reserve_bytes and self.budget is None and not names_card:
            reserve = units.format_bytes(self.reserve_bytes)
            raise CkplanError(
                f"cannot subtract the reserve {reserve}: there is no budget",
                needed="a budget or a card to subtract it from",
                hint="leave out the reserve, or --budget 12GiB",
            )


def check_exact(allow: str | Collection[str], link: Link | None) -> None:
    """Refuse an exact search where plans may do more than it knows."""
    if allow or link is not None:
        raise CkplanError(
            "cannot search exactly with levers: an integer program knows recomputation "
            "alone, so its bound would be none of these plans",
            needed="either --method milp, or --allow and --offload",
            hint="leave out --method milp",
        )


def add_exact_bound(
    planner: Planner, solution: Solution, time_limit_seconds: float
) -> Solution:
    """Add the result of an exact search for the same budget and the better bound."""
    from ckplan.solving.milp import solve_exactly

    budget_bytes = solution.budget_bytes
    exact = solve_exactly(planner.simulator, budget_bytes, time_limit_seconds)
    bound = max(solution.bound_overhead, exact.bound_overhead)
    return replace(solution, exact=exact, bound_overhead=bound)


def find(
    planner: Planner,
    objective: Objective,
    allow: str | Collection[str] = (),
    link: Link | None = None,
) -> Solution:
    """Find the plan of an objective.

    Args:
        planner: Of the graph.
        objective: What is asked for.
        allow: As in ``solve_plan``.
        link: The way of copies, if values may move.
    """
    limit = limit_of_objective(planner, objective)
    allow = allowed_levers(allow)
    if allow or link is not None:
        _check_levers(allow, objective, limit)
    if limit is not None or allow or link is not None:
        search = search_with(planner, allow=allow, link=link)
        return solve_with_room(search, limit or MemoryLimit(search.floor_bytes))
    if objective.max_overhead is not None:
        return planner.least_memory(objective.max_overhead)
    if objective.goal == "knee":
        return planner.knee()
    return planner.solve(planner.least.peak_bytes)


def _link(
    graph: Graph, rate: str | float | Link | None, offload: str | None, gpu: str | None
) -> Link | None:
    """The way of copies that ``solve_plan`` is asked for."""
    known = rate.bytes_per_second if isinstance(rate, Link) else rate
    found = None if known is None else parse_rate(known)
    if found is not None and offload not in (None, "host"):
        disk = rate if isinstance(rate, Link) else Link(found)
        if is_on_gpu(graph):
            return behind_host(graph, disk, gpu)
        offload = None  # the file is the one way of the CPU
    if isinstance(rate, Link) and offload is None:
        return replace(rate, both_ways=is_on_gpu(graph))
    if offload is not None:
        found = host_rate(graph, offload, gpu, found)
    return None if found is None else Link.of(graph, found)


def parse_rate(rate: str | float) -> float:
    """Read bytes per second, such as ``2GB``.

    Raises:
        CkplanError: It is no rate above zero.
    """
    found = float(units.parse_bytes(rate)) if isinstance(rate, str) else float(rate)
    if not 0 < found < math.inf:
        raise CkplanError(
            f"cannot move {rate} per second",
            needed="the bytes that a disk moves per second, more than 0",
            hint="--spill-rate 2GB, or leave it out to measure it",
        )
    return found


def _check_levers(
    allow: Collection[str], objective: Objective, limit: MemoryLimit | None
) -> None:
    if limit is None and objective.goal != "min-memory":
        what = "plan to offload" if not allow else "choose tiles"
        what = "choose groups" if {*allow} == {GROUPS} else what
        raise CkplanError(
            f"cannot {what} for this objective",
            needed="a budget, a card, or the least memory",
            hint="--budget 12GiB, or leave out --allow and --offload",
        )


def limit_of_objective(planner: Planner, objective: Objective) -> MemoryLimit | None:
    """The memory limit of an objective less its reserve; None if it has no limit.

    Raises:
        CkplanError: The budget cannot be parsed, all of it is reserved, or the graph
            was profiled for another card or the CPU.
    """
    if objective.gpu is not None or objective.gpu_memory is not None:
        usable_bytes = card_bytes(planner.graph, objective.gpu, objective.gpu_memory)
        budget_bytes = _budget_bytes(planner, usable_bytes, objective.reserve_bytes)
        return MemoryLimit(budget_bytes, True, objective.expandable)
    if objective.budget is not None:
        return MemoryLimit(
            _budget_bytes(planner, objective.budget, objective.reserve_bytes)
        )
    return None


def _budget_bytes(planner: Planner, budget: str | int, reserve_bytes: int) -> int:
    """Parse a budget and subtract the reserve, both in bytes."""
    budget_bytes = units.parse_budget(budget, planner.unplanned.peak_bytes)
    if reserve_bytes >= budget_bytes:
        whole, reserve = map(units.format_bytes, (budget_bytes, reserve_bytes))
        raise CkplanError(
            f"cannot plan for the budget {whole}: all of it is reserved ({reserve})",
            needed="a reserve that is smaller than the budget",
            hint="a larger --budget, or a smaller --reserve",
        )
    return budget_bytes - reserve_bytes


def to_plan(graph: Graph, solution: Solution) -> Plan:
    """Convert a solution to a plan, as the plan file stores it."""
    timeline = solution.timeline
    return Plan(
        model=graph.model,
        fingerprint=plan_fingerprint(graph.fingerprint),
        budget_bytes=solution.budget_bytes,
        predicted=Prediction(
            peak_bytes=timeline.peak_bytes,
            peak_at=timeline.peak_at,
            overhead=timeline.overhead,
            unplanned_peak_bytes=solution.unplanned.peak_bytes,
            moved_bytes=timeline.moves.moved_bytes,
            stall_seconds=timeline.stall_seconds,
            host_bytes=timeline.moves.host_bytes,
        ),
        bound={"any_schedule": solution.bound_overhead},
        regions=describe(graph, solution.regions),
        workload=plan_workload(timeline.graph.options),  # with a grouped update
    )
