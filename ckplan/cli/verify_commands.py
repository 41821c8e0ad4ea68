"""Commands that use a plan: verify it, or export it as plain PyTorch."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.cli.compiled import check_alone, check_plan, verify_in_compiled
from ckplan.cli.inputs import (
    check_output,
    check_page_output,
    check_plot_output,
    find_trace,
    make_training,
    workload,
)
from ckplan.cli.options import (
    Accumulate,
    AmpOption,
    Clip,
    EjectFormat,
    Force,
    Inputs,
    Json,
    OptimizerOption,
    Scaler,
    Seed,
    Settings,
    Target,
)
from ckplan.cli.terminal import print_message, print_report, write
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.verifying.dry_run import DryRun
    from ckplan.verifying.verify import Verification


def verify(
    target: Target,
    plan: Annotated[
        Path | None,
        typer.Argument(help="From `ckplan solve`, or by hand; or --budget."),
    ] = None,
    settings: Settings = None,
    inputs: Inputs = None,
    optimizer: OptimizerOption = None,
    amp: AmpOption = None,
    accumulate: Accumulate = 1,
    clip: Clip = None,
    scaler: Scaler = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda.  [default: the device of the plan]"),
    ] = None,
    cap: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="On a GPU: limit its memory to this size."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="How many steps to time.")] = 5,
    seed: Seed = 0,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Memory only, by a dry run: needs no hardware."),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Forward, loss and backward in torch.compile."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="With --compile: plan for this, on the spot."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --compile: write the plan here."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Predicts the timeline.  [default: traces/NAME.json.gz]"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the timeline as PNG or SVG."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page with the timeline."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train with a plan and without it, and compare the two."""
    if compiled:
        others = (optimizer, amp, clip, device, cap, trace, plot, report)
        check_alone(others, accumulate == 1 and not (scaler or fake))
        spec = workload(target, settings, inputs)
        verify_in_compiled(spec, plan, budget, steps, seed, save, force, as_json)
        return
    plan = check_plan(plan, budget, save)
    from ckplan.plan import file as plan_file

    loaded = plan_file.load(plan)
    if plot is not None:
        check_plot_output(plot, force)
    spec = workload(target, settings, inputs)
    step = find_trace(spec.name, trace)
    if report is not None:
        _check_report(report, step, force)
    how: dict[str, Any] = {
        "optimizer": optimizer,
        "amp": amp and amp.value,
        "accumulate": accumulate,
        "clip": clip,
        "scaler": scaler,
        "device": device,
        "seed": seed,
        "trace": step,
    }
    if fake:
        found: DryRun | Verification = _dry_run(spec, loaded, how)
    else:
        found = _real(spec, loaded, steps, cap, how)
    shown, error = _report_and_error(found)
    print_report(found.as_json() if as_json else shown)
    for call in found.regions_idle:
        print_message(f"warning: the region {call} never ran")
    if plot is not None:
        from ckplan.report.timeline import save_timeline

        name = loaded.model or spec.name
        budget_bytes, owners = found.budget_bytes, _owners(step, loaded)
        save_timeline(
            plot, name, found.curves, budget_bytes, owners=owners, force=force
        )
        print_message(f"wrote {plot}")
    if report is not None and step is not None:
        from ckplan.report.html import save_report

        plans = {plan.stem: loaded}
        save_report(step, plans, report, seen=found.curves, force=force)
        print_message(f"wrote {report}")
    if error is not None:
        raise error


def _owners(trace: Graph | None, plan: Plan) -> dict[str, str]:
    """Where the peaks are predicted, as far as that is known."""
    from ckplan.simulating.curve import PLANNED, UNPLANNED
    from ckplan.simulating.simulate import simulate

    found = {PLANNED: plan.predicted.peak_at} if plan.predicted else {}
    return found if trace is None else {UNPLANNED: simulate(trace).peak_at, **found}


def _check_report(path: Path, trace: Graph | None, force: bool) -> None:
    """Raise early if the page cannot be made or written."""
    from ckplan.report.html import check_report

    if trace is None:
        raise CkplanError(
            f"cannot write '{path}': there is no trace of this workload",
            needed="the trace that the plan was made from",
            hint="--trace FILE, from `ckplan profile`",
        )
    check_report()
    check_page_output(path, force)


def _dry_run(spec: WorkloadSpec, plan: Plan, how: dict[str, Any]) -> DryRun:
    from ckplan.report.progress import ProgressLine
    from ckplan.verifying.dry_run import dry_run

    # Output of the workload does not belong on stdout.
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


def _report_and_error(
    found: DryRun | Verification,
) -> tuple[RenderableType, CkplanError | None]:
    """The report of a verification, and the error if it has not passed."""
    from ckplan.report import verification as report
    from ckplan.verifying.dry_run import DryRun

    if isinstance(found, DryRun):
        shown, why = report.dry_run_report(found), report.dry_run_error
        return shown, None if found.passed else why(found)
    error = None if found.passed else report.verification_error(found)
    return report.verification_report(found), error


def eject(
    plan: Annotated[Path, typer.Argument(help="From `ckplan solve`, or by hand.")],
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="As for profile, or the model's trace."),
    ],
    settings: Settings = None,
    inputs: Inputs = None,
    optimizer: OptimizerOption = None,
    amp: AmpOption = None,
    accumulate: Accumulate = 1,
    clip: Clip = None,
    scaler: Scaler = False,
    form: Annotated[
        EjectFormat,
        typer.Option("--as", help="Code, or the nearest setting of another tool."),
    ] = EjectFormat.TORCH,
    output: Annotated[
        Path | None, typer.Option("-o", help="Write the code here.  [default: stdout]")
    ] = None,
    force: Force = False,
) -> None:
    """Print the nearest plan in plain PyTorch, or in the words of another tool."""
    if output is not None:
        check_output(output, force)
    from ckplan import files
    from ckplan.graph import file as trace_file
    from ckplan.plan import file as plan_file
    from ckplan.report.progress import ProgressLine

    loaded = plan_file.load(plan)
    if target.endswith((".json", ".json.gz")):
        graph = trace_file.load(Path(target))
    else:
        from ckplan.tracing.profile import profile_workload

        spec = workload(target, settings, inputs)
        with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
            training = make_training(optimizer, amp, accumulate, clip, scaler)
            device = loaded.fingerprint.get("device", "cpu")
            how = {"training": training, "device": device, "progress": progress}
            graph = profile_workload(spec, **how)
    text = (
        _plain_code(graph, loaded)
        if form is EjectFormat.TORCH
        else _setting(graph, loaded, form.value)
    )
    if output is None:
        write(text)
    else:
        files.write_text(output, text, force=force)
        print_message(f"wrote {output}")


def _plain_code(graph: Graph, plan: Plan) -> str:
    from ckplan import __version__
    from ckplan.ejecting.code import as_code, plain_form

    plain = plain_form(graph, plan)
    if not plain.same:
        print_message(
            "the plan rebuilds single ops, which has no plain form: printing the"
        )
        print_message("nearest one, with its own peak and overhead at the top")
    return as_code(plain, __version__)


def _setting(graph: Graph, plan: Plan, tool: str) -> str:
    from ckplan.ejecting.settings import setting_for

    setting = setting_for(graph, plan, tool)
    for line in setting.about():
        print_message(line)
    return setting.text
