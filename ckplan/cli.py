"""The command line: parse, call, print.

What a command needs is imported inside it, so that ``ckplan --help`` answers at once
and ``show`` and ``solve`` wake no torch. How commands end stands in ``terminal.py``.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.errors import CkplanError
from ckplan.terminal import TRACEBACK, Command, Commands, say, write

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ckplan.graph import Graph
    from ckplan.plan import Plan
    from ckplan.sharding import Sharding
    from ckplan.training.step import Training
    from ckplan.training.workload import WorkloadSpec
    from ckplan.verifying.dry_run import DryRun
    from ckplan.verifying.verify import Verification

TRACES = Path("traces")


class Amp(str, Enum):
    """What autocast casts to; as ``ckplan.training.step.AMP``."""

    BF16 = "bf16"
    FP16 = "fp16"


class Shard(str, Enum):
    """What several ranks divide; as ``ckplan.sharding.SCHEMES``."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP2 = "fsdp2"


class Form(str, Enum):
    """Whose words a plan is put in; "torch" or one of ``ckplan.elsewhere.TOOLS``."""

    TORCH = "torch"
    TRANSFORMERS = "transformers"
    DEEPSPEED = "deepspeed"
    MEGATRON = "megatron"


class Method(str, Enum):
    """How far solving goes; as ``ckplan.solving.solve.METHODS``."""

    CHAIN = "chain"
    MILP = "milp"


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line: the entry point of the program ``ckplan``."""
    app(prog_name="ckplan")


# -- arguments and options ---------------------------------------------------------

_Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:factory or package.module:factory. The factory, by "
        "default build(), returns (model, batch), (model, batch, loss_fn) or a dict.",
    ),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="An option of the factory; repeatable."
    ),
]
_Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE:DTYPE",
        help="For a model without a factory: 8x3x224x224:float32; repeatable.",
    ),
]
_OptimizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KERNEL]",
        help="adamw, adam, sgd, momentum, adafactor, adamw8bit (predicted only), none "
        "or own; with foreach, fused or single.  [default: own if there is one, else "
        "adamw, as torch chooses]",
    ),
]
_AmpOption = Annotated[
    Amp | None, typer.Option(help="Forward and loss under autocast to this type.")
]
_Accumulate = Annotated[
    int, typer.Option(min=1, metavar="N", help="Batches per step of the optimizer.")
]
_Clip = Annotated[
    float | None,
    typer.Option(metavar="NORM", help="Clip the gradients to this norm."),
]
_Scaler = Annotated[
    bool, typer.Option("--scaler", help="Scale the loss, for --amp fp16.")
]
_ShardOption = Annotated[
    Shard | None,
    typer.Option("--shard", help="Of the step of one rank among several."),
]
_WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", min=1, metavar="N", help="With --shard: the ranks."),
]
_Units = Annotated[
    list[str] | None,
    typer.Option(
        "--unit",
        metavar="MODULES",
        help="With fsdp2 and zero3: what is gathered as one, like h.[0..11]; "
        "repeatable.  [default: the layers]",
    ),
]
_Trace = Annotated[
    Path | None,
    typer.Argument(help="From `ckplan profile`.  [default: newest of traces/]"),
]
_Card = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="In place of a budget: what a card of `ckplan gpus` leaves to tensors.",
    ),
]
_Reserve = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Taken off the budget first, for others."),
]
_WISHES = "--budget, --gpu, --max-overhead, --min-memory or --knee"
_Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def _version(wanted: bool) -> None:
    if wanted:
        from ckplan import __version__

        write(f"ckplan {__version__}\n")
        raise typer.Exit


@app.callback()
def _ckplan(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="Show the version."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="With an error, show where it came from.")
    ] = False,
) -> None:
    """Plan activation checkpointing: the fastest training step that fits in memory.

    Profile a model once, solve for a budget, apply the plan in Python with
    ckplan.apply(model, "plan.yaml"), and verify that it keeps its word.

    Exit codes: 0 done, 1 bad input, 2 usage, 3 no plan fits, 4 verification failed.
    """


@app.command(cls=Command)
def profile(
    target: _Target,
    settings: _Settings = None,
    inputs: _Inputs = None,
    optimizer: _OptimizerOption = None,
    amp: _AmpOption = None,
    accumulate: _Accumulate = 1,
    clip: _Clip = None,
    scaler: _Scaler = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where the step is to run: cpu, or cuda, GPU or not.  "
            "[default: cpu; cuda with --gpu]",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A card of `ckplan gpus`: its roofline in place of measured seconds, "
            "its memory as the budget of solve.",
        ),
    ] = None,
    shard: _ShardOption = None,
    world_size: _WorldSize = None,
    units: _Units = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure again what was measured before."),
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(help="Run the forward of a small model twice, to compare."),
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option("-o", help="The trace to write.  [default: traces/NAME.json.gz]"),
    ] = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Trace one training step: its memory, layers and seconds."""
    if output is not None:
        _check_output(output, force)
    sharding = _sharding(shard, world_size, units)
    from ckplan import graph as graphs
    from ckplan.report.progress import ProgressLine
    from ckplan.tracing.profile import profile_workload

    spec = _workload(target, settings, inputs)
    path = output or TRACES / f"{spec.name}.json.gz"
    _check_output(path, force)
    # Whatever the workload prints is not the product.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        graph = profile_workload(
            spec,
            training=_training(optimizer, amp, accumulate, clip, scaler),
            device=device,
            gpu=gpu,
            fresh=fresh,
            replay=replay,
            progress=progress,
        )
    graph = _shard(graph, sharding)
    graphs.save(graph, path, force=force)
    _show_trace(graph, path, as_json)
    say(f"wrote {path}")


@app.command(cls=Command)
def solve(
    trace: _Trace = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Limit on the whole peak: 12GB, 12GiB, or 80% of the unplanned peak.",
        ),
    ] = None,
    gpu: _Card = None,
    max_overhead: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="In place of a budget: least memory at 5% or less."
        ),
    ] = None,
    min_memory: Annotated[
        bool, typer.Option("--min-memory", help="In place of a budget: least memory.")
    ] = False,
    knee: Annotated[
        bool,
        typer.Option("--knee", help="In place of a budget: before memory gets dear."),
    ] = False,
    reserve: _Reserve = "0",
    method: Annotated[
        Method,
        typer.Option(help="milp: a tighter bound, exact for small graphs."),
    ] = Method.CHAIN,
    time_limit: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="That milp may take.")
    ] = 60.0,
    shard: _ShardOption = None,
    world_size: _WorldSize = None,
    units: _Units = None,
    output: Annotated[Path, typer.Option("-o", help="The plan to write.")] = Path(
        "plan.yaml"
    ),
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Write the plan that fits a budget and costs the least time."""
    goals = [name for name, on in (("min-memory", min_memory), ("knee", knee)) if on]
    given = [wish for wish in (budget, gpu, max_overhead, *goals) if wish is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"only one is possible: {_WISHES}")
    _check_output(output, force)
    sharding = _sharding(shard, world_size, units)
    from ckplan import graph as graphs
    from ckplan import plan as plans
    from ckplan.allocations import reserved_on_card
    from ckplan.report.plans import solution_json, solution_report
    from ckplan.report.progress import ProgressLine
    from ckplan.report.reserved import reserved_warning
    from ckplan.solving import solve as solving
    from ckplan.units import parse_bytes, parse_percent

    fraction = None if max_overhead is None else parse_percent(max_overhead)
    if method is Method.MILP:
        from ckplan.solving.milp import check_solver

        check_solver()
    reserve_bytes = parse_bytes(reserve)
    graph = _shard(graphs.load(trace or _newest_trace()), sharding)
    if not given and "gpu" not in graph.options:
        raise typer.BadParameter(f"one is needed: {_WISHES}")
    card = gpu if given else graph.options["gpu"]
    if card is not None:
        _say_usable(card)
    goal = goals[0] if goals else None
    wish = solving.Wish(budget, fraction, goal, gpu=card)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        planner = solving.Planner(graph)
        solution = solving.find(planner, wish, reserve_bytes)
        if method is Method.MILP:
            progress("solving exactly", 0, 0)
            solution = solving.with_exact(planner, solution, time_limit)
    if not solution.regions:
        say("no plan is needed: the unplanned step fits; the plan is empty")
    plan = solving.to_plan(graph, solution)
    plans.save(plan, output, force=force)
    found, reserved = (
        (solution, plan, reserve_bytes),
        reserved_on_card(solution.timeline),
    )
    _print(
        solution_json(*found, str(output), reserved)
        if as_json
        else solution_report(*found, reserved)
    )
    warning = reserved_warning(reserved, solution.budget_bytes + reserve_bytes)
    if warning:
        say(warning)
    say(f"wrote {output}")


@app.command(cls=Command)
def frontier(
    trace: _Trace = None,
    *,
    points: Annotated[
        int, typer.Option(min=2, max=500, help="How many budgets to try.")
    ] = 24,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as PNG or SVG.")
    ] = None,
    reserve: _Reserve = "0",
    shard: _ShardOption = None,
    world_size: _WorldSize = None,
    units: _Units = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Show the whole trade-off between memory and time."""
    sharding = _sharding(shard, world_size, units)
    from ckplan import graph as graphs
    from ckplan.report.frontier import frontier_json, frontier_report, save_plot
    from ckplan.report.progress import ProgressLine
    from ckplan.solving.practices import everything
    from ckplan.solving.solve import Planner
    from ckplan.units import parse_bytes

    reserve_bytes = parse_bytes(reserve)
    if plot is not None:
        _check_picture(plot, force)
    graph = _shard(graphs.load(trace or _newest_trace()), sharding)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        planner = Planner(graph)
        found = planner.frontier(points)
        wanted = as_json or plot is not None
        budget_bytes = planner.unplanned.peak_bytes
        others = everything(planner, budget_bytes) if wanted else ()
    if plot is not None:
        save_plot(plot, graph.model, found, others, force=force)
        say(f"wrote {plot}")
    _print(
        frontier_json(graph.model, found, others, reserve_bytes)
        if as_json
        else frontier_report(graph.model, found, reserve_bytes)
    )


@app.command(cls=Command)
def compare(
    trace: _Trace = None,
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="As for solve.  [default: 80% of the unplanned peak]",
        ),
    ] = None,
    gpu: _Card = None,
    reserve: _Reserve = "0",
    shard: _ShardOption = None,
    world_size: _WorldSize = None,
    units: _Units = None,
    as_json: _Json = False,
) -> None:
    """Show what people do beside the plan, under one budget."""
    if budget is not None and gpu is not None:
        raise typer.BadParameter("only one is possible: --budget or --gpu")
    sharding = _sharding(shard, world_size, units)
    from ckplan import graph as graphs
    from ckplan.report.plans import as_baseline, comparison_json, comparison_report
    from ckplan.report.progress import ProgressLine
    from ckplan.solving.practices import everything
    from ckplan.solving.solve import Planner, budget_bytes_of
    from ckplan.units import parse_bytes

    reserve_bytes = parse_bytes(reserve)
    if gpu is not None:
        budget = str(_say_usable(gpu))
    graph = _shard(graphs.load(trace or _newest_trace()), sharding)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        planner = Planner(graph)
        budget_bytes = budget_bytes_of(planner, budget or "80%", reserve_bytes)
        plan = planner.nearest(budget_bytes)
        found = (*everything(planner, budget_bytes), as_baseline(plan, budget_bytes))
    of = graph.model, budget_bytes, reserve_bytes, found
    _print(comparison_json(*of) if as_json else comparison_report(*of))


@app.command(cls=Command)
def show(
    file: Annotated[Path, typer.Argument(help="A trace or a plan.")],
    shard: _ShardOption = None,
    world_size: _WorldSize = None,
    units: _Units = None,
    as_json: _Json = False,
) -> None:
    """Show a trace or a plan."""
    sharding = _sharding(shard, world_size, units)
    from ckplan import files

    if _is_trace(files.read_bytes(file, "trace or plan")):
        from ckplan import graph as graphs

        _show_trace(_shard(graphs.load(file), sharding), file, as_json)
    else:
        from ckplan import plan as plans
        from ckplan.report.plans import plan_json, plan_report

        plan = plans.load(file)
        _print(plan_json(plan) if as_json else plan_report(plan))


@app.command(cls=Command)
def gpus(
    name: Annotated[
        str | None, typer.Argument(help="One card, with the source of every figure.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """List the cards that --gpu knows."""
    from ckplan import gpus as table
    from ckplan.report.gpus import card_report, cards_json, cards_report

    cards = [*table.load().values()] if name is None else [table.find(name)]
    if as_json:
        _print(cards_json(cards))
    else:
        _print(cards_report(cards) if name is None else card_report(cards[0]))


@app.command(cls=Command)
def verify(
    target: _Target,
    plan: Annotated[Path, typer.Argument(help="From `ckplan solve`, or by hand.")],
    settings: _Settings = None,
    inputs: _Inputs = None,
    optimizer: _OptimizerOption = None,
    amp: _AmpOption = None,
    accumulate: _Accumulate = 1,
    clip: _Clip = None,
    scaler: _Scaler = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda.  [default: what the plan is for]"),
    ] = None,
    cap: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="On a GPU: as if it had no more memory."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="How many steps to time.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of every random number.")] = 0,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Memory only, by a dry run: needs no hardware."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Predicts the timeline.  [default: traces/NAME.json.gz]"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the timeline as PNG or SVG."),
    ] = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Train with a plan and without it, and compare the two."""
    from ckplan import plan as plans

    loaded = plans.load(plan)
    if plot is not None:
        _check_picture(plot, force)
    spec = _workload(target, settings, inputs)
    how: dict[str, Any] = {
        "optimizer": optimizer,
        "amp": amp and amp.value,
        "accumulate": accumulate,
        "clip": clip,
        "scaler": scaler,
        "device": device,
        "seed": seed,
        "trace": _trace_of(spec.name, trace),
    }
    if fake:
        found: DryRun | Verification = _dry_run(spec, loaded, how)
    else:
        found = _real(spec, loaded, steps, cap, how)
    shown, error = _judge(found)
    _print(found.as_json() if as_json else shown)
    for call in found.regions_idle:
        say(f"warning: the region {call} never ran")
    if plot is not None:
        from ckplan.report.timeline import save_timeline

        name = loaded.model or spec.name
        save_timeline(plot, name, found.curves, found.budget_bytes, force=force)
        say(f"wrote {plot}")
    if error is not None:
        raise error


def _dry_run(spec: WorkloadSpec, plan: Plan, how: dict[str, Any]) -> DryRun:
    from ckplan.report.progress import ProgressLine
    from ckplan.verifying.dry_run import dry_run

    # Whatever the workload prints is not the product.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        return dry_run(spec, plan, progress=progress, **how)


def _real(
    spec: WorkloadSpec, plan: Plan, steps: int, cap: str | None, how: dict[str, Any]
) -> Verification:
    from ckplan.report.progress import ProgressLine
    from ckplan.units import parse_bytes
    from ckplan.verifying.verify import verify

    with ProgressLine(sys.stderr) as progress:
        return verify(
            spec,
            plan,
            steps=steps,
            cap_bytes=None if cap is None else parse_bytes(cap),
            progress=progress,
            **how,
        )


def _judge(
    found: DryRun | Verification,
) -> tuple[RenderableType, CkplanError | None]:
    """The report of a verification, and the error if it has not passed."""
    from ckplan.report import verification as report
    from ckplan.verifying.dry_run import DryRun

    if isinstance(found, DryRun):
        shown, why = report.dry_run_report(found), report.too_large
        return shown, None if found.passed else why(found)
    error = None if found.passed else report.failure(found)
    return report.verification_report(found), error


@app.command(cls=Command)
def eject(
    plan: Annotated[Path, typer.Argument(help="From `ckplan solve`, or by hand.")],
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="As for profile, or the model's trace."),
    ],
    settings: _Settings = None,
    inputs: _Inputs = None,
    optimizer: _OptimizerOption = None,
    amp: _AmpOption = None,
    accumulate: _Accumulate = 1,
    clip: _Clip = None,
    scaler: _Scaler = False,
    form: Annotated[
        Form,
        typer.Option("--as", help="Code, or the nearest setting of another tool."),
    ] = Form.TORCH,
    output: Annotated[
        Path | None, typer.Option("-o", help="Write the code here.  [default: stdout]")
    ] = None,
    force: _Force = False,
) -> None:
    """Print the nearest plan in plain PyTorch, or in the words of another tool."""
    if output is not None:
        _check_output(output, force)
    from ckplan import files
    from ckplan import graph as graphs
    from ckplan import plan as plans
    from ckplan.report.progress import ProgressLine

    loaded = plans.load(plan)
    if target.endswith((".json", ".json.gz")):
        graph = graphs.load(Path(target))
    else:
        from ckplan.tracing.profile import profile_workload

        spec = _workload(target, settings, inputs)
        with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
            training = _training(optimizer, amp, accumulate, clip, scaler)
            device = loaded.fingerprint.get("device", "cpu")
            how = {"training": training, "device": device, "progress": progress}
            graph = profile_workload(spec, **how)
    text = (
        _plain_code(graph, loaded)
        if form is Form.TORCH
        else _setting(graph, loaded, form.value)
    )
    if output is None:
        write(text)
    else:
        files.write_text(output, text, force=force)
        say(f"wrote {output}")


def _plain_code(graph: Graph, plan: Plan) -> str:
    from ckplan import __version__
    from ckplan.eject import as_code, plain_form

    plain = plain_form(graph, plan)
    if not plain.same:
        say("the plan rebuilds single ops, which has no plain form: printing the")
        say("nearest one, with its own peak and overhead at the top")
    return as_code(plain, __version__)


def _setting(graph: Graph, plan: Plan, tool: str) -> str:
    from ckplan.elsewhere import setting_for

    setting = setting_for(graph, plan, tool)
    for line in setting.about():
        say(line)
    return setting.text


# -- input -------------------------------------------------------------------------


def _workload(
    target: str, settings: list[str] | None, inputs: list[str] | None
) -> WorkloadSpec:
    from ckplan.training.workload import WorkloadSpec, parse_options

    return WorkloadSpec(target, parse_options(settings or ()), tuple(inputs or ()))


def _training(
    optimizer: str | None,
    amp: Amp | None,
    accumulate: int,
    clip: float | None,
    scaler: bool,
) -> Training:
    from ckplan.training.step import Training

    return Training(optimizer, amp and amp.value, accumulate, clip, scaler)


def _sharding(
    shard: Shard | None, world_size: int | None, units: list[str] | None
) -> Sharding | None:
    """What the three options say together."""
    if (shard is None) != (world_size is None) or (units and shard is None):
        raise typer.BadParameter("--shard and --world-size go together")
    if shard is None or world_size is None:
        return None
    from ckplan.sharding import Sharding

    return Sharding(shard.value, world_size, tuple(units or ()))


def _shard(graph: Graph, sharding: Sharding | None) -> Graph:
    """Make the step of one rank, if that is asked for."""
    if sharding is None:
        return graph
    from ckplan.sharding import sharded

    return sharded(graph, sharding)


def _check_output(path: Path, force: bool) -> None:
    """Say before any work that a file could not be written after it."""
    if path.is_dir():
        raise CkplanError(
            f"cannot write '{path}': it is a folder",
            needed="the name of a file",
            hint=f"-o {path / 'NAME'}",
        )
    if path.is_file() and not force:
        raise CkplanError(
            f"cannot write '{path}': it already exists",
            needed="a new file, or leave to overwrite this one",
            hint="--force to overwrite it, or another name with -o",
        )


def _check_picture(path: Path, force: bool) -> None:
    from ckplan.report.plots import check_plot

    _check_output(path, force)
    check_plot(path)


def _say_usable(gpu: str) -> int:
    """Return the bytes of the budget that a card is, and how they come about."""
    from ckplan.gpus import find
    from ckplan.units import format_bytes

    card = find(gpu)
    capacity, context = map(format_bytes, (card.capacity_bytes, card.context_bytes))
    say(f"budget of {card.name}: {capacity} less {context} for CUDA's context")
    return card.usable_bytes


def _newest_trace() -> Path:
    from ckplan import files

    found = files.newest(TRACES, "*.json*")
    if found is None:
        raise CkplanError(
            f"cannot find a trace: there is none in {TRACES}/",
            needed="a trace that `ckplan profile` wrote",
            hint="ckplan profile model.py, or name the trace",
        )
    say(f"reading {found}")
    return found


def _trace_of(name: str, path: Path | None) -> Graph | None:
    """The trace that was asked for, or a workload's usual one if it can be read."""
    from ckplan import graph as graphs

    if path is not None:
        return graphs.load(path)
    usual = TRACES / f"{name}.json.gz"
    try:
        return graphs.load(usual) if usual.is_file() else None
    except CkplanError:
        return None  # verifying does without


def _is_trace(data: bytes) -> bool:
    """Whether a file is a trace, whole or damaged; anything else may be a plan."""
    gzipped, json_object = data[:2] == b"\x1f\x8b", data[:1] == b"{"
    return gzipped or (json_object and b"ckplan_graph" in data[:1000])


# -- output ------------------------------------------------------------------------


def _show_trace(graph: Graph, path: Path, as_json: bool) -> None:
    from ckplan.allocations import reserved_on_card
    from ckplan.report.step import step_json, step_report
    from ckplan.simulate import simulate

    step = graph, simulate(graph)
    reserved = reserved_on_card(step[1])
    _print(
        step_json(*step, str(path), reserved)
        if as_json
        else step_report(*step, reserved)
    )


def _print(product: RenderableType | dict[str, Any]) -> None:
    """Write a report as a person reads it, or a dict as JSON."""
    if isinstance(product, dict):
        import json

        write(json.dumps(product, indent=2) + "\n")
    else:
        from ckplan.report.tables import render

        write(render(product))
