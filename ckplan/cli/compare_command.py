"""``ckplan compare``: the plan beside common strategies."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckplan.cli.compiled import check_alone, compare_in_compiled
from ckplan.cli.inputs import (
    load_step,
)
from ckplan.cli.lever_options import LeverOptions
from ckplan.cli.options import (
    Amp,
    CardOptions,
    Json,
    Reserve,
    Seed,
    ShardOptions,
    Trace,
)
from ckplan.cli.terminal import print_report

if TYPE_CHECKING:
    pass


def compare(
    trace: Trace = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="As for solve.  [default: 80% of the unplanned peak]",
        ),
    ] = None,
    card: CardOptions,
    reserve: Reserve = "0",
    levers: LeverOptions,
    rank: ShardOptions,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="With a target: torch.compile's own choices instead."
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="With --compile: an option of the factory; repeatable.",
        ),
    ] = None,
    amp: Annotated[
        Amp | None,
        typer.Option(help="With --compile: forward and loss under autocast to this."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare the plan with common strategies under one budget."""
    if compiled:
        moves = levers.offload, levers.spill_rate
        others = (*card.given, rank.sharding(), levers.allow, *moves)
        check_alone(others, reserve == "0" and not card.expandable)
        cast = amp and amp.value
        compare_in_compiled(trace, settings, budget, cast, seed, as_json)
        return
    if settings or seed or amp:
        raise typer.BadParameter("--set, --amp and --seed go with --compile alone")
    limits = [*card.given, *([] if budget is None else [budget])]
    if len(limits) > 1:
        raise typer.BadParameter(
            "only one is possible: --budget, --gpu or --gpu-memory"
        )
    if card.expandable and not card.given:
        raise typer.BadParameter("--expandable-segments needs --gpu or --gpu-memory")
    sharding = rank.sharding()
    from ckplan.report.comparison import comparison_json, comparison_report
    from ckplan.report.progress import ProgressLine
    from ckplan.solving.common_strategies import all_baselines
    from ckplan.solving.levers import lever_baselines, search_with
    from ckplan.solving.planner import Planner
    from ckplan.solving.reserved_limit import solve_within_limit
    from ckplan.solving.solution import Baseline
    from ckplan.solving.solve import Objective, limit_of_objective
    from ckplan.units import parse_bytes

    reserve_bytes = parse_bytes(reserve)
    objective = Objective(
        budget if limits else "80%",
        gpu=card.gpu,
        reserve_bytes=reserve_bytes,
        expandable=card.expandable,
        gpu_memory=card.gpu_memory,
    )
    graph = load_step(trace, sharding)
    card.check_and_announce(graph)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        planner = Planner(graph)
        limit = limit_of_objective(planner, objective)
        assert limit is not None, "internal error: neither a budget nor a card"
        link, allow = levers.link(graph, card.gpu), levers.allowed
        fits = planner.within(limit.bytes) is not None
        least = limit.bytes if fits else planner.least.peak_bytes
        plan = solve_within_limit(planner, replace(limit, bytes=least)).timeline
        found = [*all_baselines(planner, limit), Baseline.of("this plan", plan, limit)]
        if allow or link is not None:
            found += lever_baselines(planner, limit, allow=allow, link=link)
            search = search_with(planner, allow=allow, link=link)
            least = max(limit.bytes, search.floor_bytes)
            plan = search.solve(replace(limit, bytes=least)).timeline
            found.append(Baseline.of("with levers", plan, limit))
    of = graph.model, limit, reserve_bytes, found
    print_report(comparison_json(*of) if as_json else comparison_report(*of))
