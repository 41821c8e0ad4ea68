"""Commands that plan from a trace alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckplan.cli.inputs import (
    check_plan_output,
    check_plot_output,
    find_mean,
    load_step,
    newest_trace,
)
from ckplan.cli.lever_options import LeverOptions
from ckplan.cli.options import (
    OBJECTIVE_OPTIONS,
    CardOptions,
    Force,
    Json,
    Method,
    Reserve,
    ShardOptions,
    Trace,
)
from ckplan.cli.terminal import print_message, print_report
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.simulating.moving import Link
    from ckplan.solving.memory_limit import MemoryLimit
    from ckplan.solving.remedies import Remedy
    from ckplan.solving.solution import Solution


def solve(
    trace: Trace = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Limit on the whole peak: 12GB, 12GiB, or 80% of the unplanned peak.",
        ),
    ] = None,
    card: CardOptions,
    max_overhead: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Instead of a budget: least memory within this overhead, such as 5%.",
        ),
    ] = None,
    min_memory: Annotated[
        bool,
        typer.Option("--min-memory", help="Instead of a budget: the least memory."),
    ] = False,
    knee: Annotated[
        bool,
        typer.Option(
            "--knee",
            help="Instead of a budget: where further savings cost much more time.",
        ),
    ] = False,
    reserve: Reserve = "0",
    method: Annotated[
        Method,
        typer.Option(help="milp: a tighter bound, exact for small graphs."),
    ] = Method.CHAIN,
    time_limit: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time limit of --method milp."),
    ] = 60.0,
    levers: LeverOptions,
    rank: ShardOptions,
    output: Annotated[Path, typer.Option("-o", help="The plan to write.")] = Path(
        "plan.yaml"
    ),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write the plan that fits a budget and costs the least time."""
    goals = [name for name, on in (("min-memory", min_memory), ("knee", knee)) if on]
    objectives = [
        one for one in (budget, max_overhead, *goals, *card.given) if one is not None
    ]
    if len(objectives) > 1:
        raise typer.BadParameter(f"only one is possible: {OBJECTIVE_OPTIONS}")
    check_plan_output(output, force)
    sharding = rank.sharding()
    from ckplan.plan import file as plan_file
    from ckplan.report.progress import ProgressLine
    from ckplan.simulating.moving import is_on_gpu
    from ckplan.solving import solve as solving
    from ckplan.solving.alternatives import alternatives
    from ckplan.solving.planner import Planner
    from ckplan.units import parse_bytes, parse_percent

    fraction = None if max_overhead is None else parse_percent(max_overhead)
    if method is Method.MILP:
        from ckplan.solving.binary_program import check_solver

        check_solver()
    reserve_bytes = parse_bytes(reserve)
    trace = trace or newest_trace()
    graph = load_step(trace, sharding)
    if not objectives:
        card = replace(card, gpu=graph.options.get("gpu"))
        if card.gpu is None:
            raise typer.BadParameter(f"one is needed: {OBJECTIVE_OPTIONS}")
    card.check_and_announce(graph)
    link = levers.link(graph, card.gpu)
    goal = goals[0] if goals else None
    objective = solving.Objective(
        budget,
        fraction,
        goal,
        card.gpu,
        reserve_bytes,
        card.expandable,
        card.gpu_memory,
    )
    if method is Method.MILP:
        solving.check_exact(levers.allowed, link)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        planner = Planner(graph)
        solution = solving.find(planner, objective, levers.allowed, link)
        if method is Method.MILP:
            progress("solving exactly", 0, 0)
            solution = solving.add_exact_bound(planner, solution, time_limit)
    plan = solving.to_plan(graph, solution)
    _tell_of_levers(graph, solution, plan, link)
    plan_file.save(plan, output, force=force)
    found = solution, plan, reserve_bytes
    instead = alternatives(planner, solution)
    _show_solution(*found, instead, output, expandable=card.expandable, as_json=as_json)
    mean = find_mean(graph, trace, sharding)
    if mean is not None:
        _tell_mean(plan, mean)
    if "compiled" in graph.fingerprint and is_on_gpu(graph):
        print_message(
            "this peak is simulated, and no code was replayed; the optimizer is not "
            "part of the trace: --reserve SIZE leaves room for its state"
        )
    elif "compiled" in graph.fingerprint and not graph.generated:
        print_message(
            "this peak is simulated; that of the generated code may be larger: `ckplan "
            f"verify TARGET --compile --budget {plan.budget_bytes}` plans to that one, "
            "and so does solve from a trace of `profile TARGET --compile --generate`"
        )
    print_message(f"wrote {output}")


def _tell_of_levers(
    graph: Graph, solution: Solution, plan: Plan, link: Link | None
) -> None:
    """Print what else a step needs, and which lever a plan does without."""
    from ckplan.plan.updates import group_size_of

    grouped = solution.timeline.graph.options.get("optimizer")
    if grouped != graph.options.get("optimizer"):
        size = group_size_of(plan)
        print_message(
            f"the update runs in groups: ckplan.update_in_groups(optimizer, {size!r})"
        )
    elif not solution.regions:
        print_message("no plan is needed: the unplanned step fits; the plan is empty")
    if (
        link is not None
        and solution.regions
        and not solution.timeline.moves.moved_bytes
    ):
        print_message("nothing moves: recomputation alone is no slower")


def _tell_mean(plan: Plan, mean: Graph) -> None:
    """Print what a plan costs at the mean length of the batches."""
    from ckplan.plan.resolve import resolve
    from ckplan.simulating.simulate import simulate
    from ckplan.units import format_bytes

    try:
        timeline = simulate(mean, resolve(plan, mean))
    except CkplanError as error:  # other kernels run at other lengths
        print_message(f"at the mean length: not known ({error.what})")
        return
    peak = format_bytes(timeline.peak_bytes)
    print_message(f"at the mean length: peak {peak}, time +{timeline.overhead:.1%}")


def _show_solution(
    solution: Solution,
    plan: Plan,
    reserve_bytes: int,
    instead: Sequence[Remedy],
    output: Path,
    *,
    expandable: bool,
    as_json: bool,
) -> None:
    """Print the report of a plan, and a warning if it may not fit on a card."""
    from ckplan.report.plans import solution_json, solution_report
    from ckplan.simulating.allocations import reserved_on_card
    from ckplan.solving.reserved_limit import SETTING, room_warning

    timeline = solution.timeline
    reserved = reserved_on_card(timeline)
    found = solution, plan, reserve_bytes
    print_report(
        solution_json(*found, str(output), reserved, instead)
        if as_json
        else solution_report(*found, reserved, instead)
    )
    if reserved is None:
        return
    warning = room_warning(solution, reserve_bytes, asked=expandable)
    if warning:
        print_message(f"warning: {warning}")
    elif expandable:
        print_message(f"the plan needs {SETTING}")
    elif solution.fragmentation_bytes:
        print_message("--expandable-segments lowers fragmentation, if they are on")


def frontier(
    trace: Trace = None,
    *,
    points: Annotated[
        int, typer.Option(min=2, max=500, help="Number of budgets.")
    ] = 24,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as PNG or SVG.")
    ] = None,
    card: CardOptions,
    reserve: Reserve = "0",
    levers: LeverOptions,
    rank: ShardOptions,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show the whole trade-off between memory and time, and what fits on a card."""
    if len(card.given) > 1:
        raise typer.BadParameter("only one is possible: --gpu or --gpu-memory")
    if card.expandable and not card.given:
        raise typer.BadParameter("--expandable-segments needs --gpu or --gpu-memory")
    sharding = rank.sharding()
    from ckplan.report.frontier import frontier_json, frontier_report, save_plot
    from ckplan.report.progress import ProgressLine
    from ckplan.simulating.simulate import Simulator
    from ckplan.solving.common_strategies import all_baselines
    from ckplan.solving.levers import frontier_of, search_with
    from ckplan.solving.memory_limit import MemoryLimit
    from ckplan.solving.planner import Planner
    from ckplan.solving.solution import Baseline
    from ckplan.units import parse_bytes

    reserve_bytes = parse_bytes(reserve)
    if plot is not None:
        check_plot_output(plot, force)
    graph = load_step(trace, sharding)
    room = _card_limit(graph, card, reserve_bytes)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        planner = Planner(graph)
        link = levers.link(graph, card.gpu)
        allow = levers.allowed
        found = (
            frontier_of(planner, search_with(planner, allow=allow, link=link), points)
            if allow or link is not None
            else planner.frontier(points)
        )
        shows_baselines = as_json or plot is not None
        limit = room or MemoryLimit(planner.unplanned.peak_bytes)
        baselines = all_baselines(planner, limit) if shows_baselines else ()
        run = Simulator(graph, link).run
        lines = [p.timeline or run(p.regions) for p in (found if room else ())]
        on_card = [Baseline.of("", line, room) for line in lines if room]
    if plot is not None:
        save_plot(plot, graph.model, found, baselines, force=force)
        print_message(f"wrote {plot}")
    print_report(
        frontier_json(graph.model, found, baselines, reserve_bytes, on_card)
        if as_json
        else frontier_report(graph.model, found, reserve_bytes, on_card)
    )


def _card_limit(
    graph: Graph, card: CardOptions, reserve_bytes: int
) -> MemoryLimit | None:
    """The memory of a card less the reserve; None without a card."""
    from ckplan.solving.card_memory import card_bytes
    from ckplan.solving.memory_limit import MemoryLimit

    if not card.given:
        return None
    card.check_and_announce(graph)
    whole_bytes = card_bytes(graph, card.gpu, card.gpu_memory)
    return MemoryLimit(whole_bytes - reserve_bytes, True, card.expandable)
