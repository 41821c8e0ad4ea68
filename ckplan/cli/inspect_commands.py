"""Commands that inspect a step, a file or the cards."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckplan.cli.compiled import profile_in_compiled
from ckplan.cli.inputs import (
    check_output,
    compiled_name,
    default_trace,
    is_trace,
    load_step,
    mean_trace,
    shard_for_rank,
)
from ckplan.cli.options import (
    Force,
    Fresh,
    Json,
    Seed,
    ShardOptions,
    StepOptions,
    Target,
    TraceOutput,
)
from ckplan.cli.source_options import SourceOptions, blaming_lengths
from ckplan.cli.terminal import print_message, print_report
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.training.loading import WorkloadSpec


def profile(
    target: Target,
    *,
    step: StepOptions,
    source: SourceOptions,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of the step: cpu or cuda; cuda needs no GPU.  "
            "[default: cpu; cuda with --gpu]",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A card of `ckplan gpus`: seconds come from its roofline, and solve "
            "plans for its memory.",
        ),
    ] = None,
    host: Annotated[
        float,
        typer.Option(
            metavar="FACTOR",
            help="Speed of the processor beside the GPU, relative to this one: 2 is "
            "twice as fast.",
        ),
    ] = 1.0,
    rank: ShardOptions,
    fresh: Fresh = False,
    replay: Annotated[
        bool,
        typer.Option(help="Run a small model's forward twice to find hazards."),
    ] = True,
    in_step: Annotated[
        bool | None,
        typer.Option(
            "--in-step/--no-in-step",
            help="Take steps with and without plans on the CPU, for truer seconds.  "
            "[default: if they take a few seconds]",
        ),
    ] = None,
    seed: Seed = 0,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Lengths of batches, or a file of them: the trace is of the longest, "
            "and `solve` also tells what its plan costs at their mean.",
        ),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Forward, loss and backward in torch.compile."),
    ] = False,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="With --compile: generate the code of all plans, so that solve is "
            "exact; takes minutes if many layers are compiled.",
        ),
    ] = False,
    output: TraceOutput = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Trace one training step: its memory, layers and seconds."""
    names_factory = ":" in target
    if output is not None and not names_factory:
        check_output(output, force)
    sharding = rank.sharding()
    from ckplan.graph import file as trace_file
    from ckplan.report.progress import ProgressLine
    from ckplan.tracing.profile import profile_workload
    from ckplan.training.lengths import parse_lengths

    if generate and not compiled:
        raise typer.BadParameter("--generate goes with --compile alone")
    of_batches = None if lengths is None else parse_lengths(lengths)
    given = source.batch
    if of_batches is not None:
        source = source.at_length(target, of_batches.longest)
    assumed = None if source.batch == given else source.batch
    spec = step.workload(target, source)
    path = output or _default_trace(step, spec, device, gpu, seed, rank, compiled)
    if lengths is not None and output is None:
        path = path.with_name(f"lengths-{path.name}")
    try:
        _check_outputs(path, force, with_mean=of_batches is not None)
    except CkplanError:
        if names_factory:  # a factory that is not there comes first
            with redirect_stdout(sys.stderr):
                spec.load()
        raise
    if compiled:
        defaults = step.is_plain and (replay, fresh) == (True, False)
        others = (sharding, lengths, in_step)
        place = (device, gpu, host)
        amp = step.training().amp
        graph = profile_in_compiled(spec, amp, seed, generate, place, others, defaults)
        trace_file.save(graph, path, force=force)
        _show_trace(graph, path, as_json)
        print_message(f"wrote {path}")
        return
    mean = None
    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        at = partial(
            profile_workload,
            spec,
            training=step.training(),
            device=device,
            gpu=gpu,
            host=host,
            fresh=fresh,
            in_step=in_step,
            seed=seed,
            progress=progress,
        )
        with blaming_lengths(assumed):
            graph = at(replay=replay, change=of_batches.whole if of_batches else None)
        if of_batches:
            mean = at(replay=False, change=of_batches.cut_to_mean)
    _say_what_is_assumed(graph, assumed)
    graph = shard_for_rank(graph, sharding)
    if mean is not None and of_batches is not None:
        named = {"lengths": ",".join(map(str, of_batches.lengths))}
        graph = replace(graph, options={**graph.options, **named})
        mean = replace(shard_for_rank(mean, sharding), options=graph.options)
        trace_file.save(mean, mean_trace(path), force=force)
        print_message(f"wrote {mean_trace(path)}, of the mean length {of_batches.mean}")
    trace_file.save(graph, path, force=force)
    _show_trace(graph, path, as_json)
    print_message(f"wrote {path}")


def _check_outputs(path: Path, force: bool, *, with_mean: bool) -> None:
    check_output(path, force)
    if with_mean:
        check_output(mean_trace(path), force)


def _say_what_is_assumed(graph: Graph, batch: str | None) -> None:
    """Say it of a step that was recorded: nothing but its error precedes an error."""
    from ckplan.training.losses import LOSS_IS_SUM

    if batch is not None:
        print_message(f"assumed --batch {batch}, the longest of --lengths")
    if LOSS_IS_SUM in graph.notes:
        print_message(f"warning: {LOSS_IS_SUM}: give a loss_fn, or labels")


def _default_trace(
    step: StepOptions,
    spec: WorkloadSpec,
    device: str | None,
    gpu: str | None,
    seed: int,
    rank: ShardOptions,
    compiled: bool,
) -> Path:
    from ckplan.gpus import find
    from ckplan.plan.workload import plan_workload
    from ckplan.training.remembered import describe_workload

    card = {} if gpu is None else {"gpu": find(gpu).name}
    known = describe_workload(spec, seed) or {"set": step.settings or []}
    options = {"workload": known, **step.training().as_options(), **card}
    sharding = rank.sharding()
    ranks = f"-{sharding.scheme}-{sharding.world_size}" if sharding else ""
    name = f"{spec.name}{ranks}"
    name = compiled_name(name) if compiled else name
    return default_trace(name, plan_workload(options), device)


def show(
    file: Annotated[Path, typer.Argument(help="A trace or a plan.")],
    rank: ShardOptions,
    as_json: Json = False,
) -> None:
    """Show a trace or a plan."""
    sharding = rank.sharding()
    from ckplan import files

    data = files.read_bytes(file, "trace or plan")
    if is_trace(data) or file.suffix == ".json":
        _show_trace(load_step(file, sharding), file, as_json)
    elif sharding is not None:
        raise typer.BadParameter("--shard needs a trace, and this is a plan")
    else:
        from ckplan.plan import file as plan_file
        from ckplan.report.plans import plan_json, plan_report

        plan = plan_file.load(file)
        print_report(plan_json(plan) if as_json else plan_report(plan))


def _show_trace(graph: Graph, path: Path, as_json: bool) -> None:
    from ckplan.report.step import step_json, step_report
    from ckplan.simulating.allocations import reserved_on_card
    from ckplan.simulating.simulate import simulate

    step = graph, simulate(graph)
    reserved = reserved_on_card(step[1])
    print_report(
        step_json(*step, str(path), reserved)
        if as_json
        else step_report(*step, reserved)
    )


def gpus(
    name: Annotated[
        str | None, typer.Argument(help="One card, with the source of every figure.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the cards that --gpu knows."""
    from ckplan import gpus as table
    from ckplan.report.gpus import card_report, cards_json, cards_report

    cards = [*table.load().values()] if name is None else [table.find(name)]
    if as_json:
        print_report(cards_json(cards))
    else:
        print_report(cards_report(cards) if name is None else card_report(cards[0]))
