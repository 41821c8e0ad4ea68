"""Commands that use a plan: verify it, or export it as plain PyTorch."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.cli import inputs
from ckplan.cli.inputs import (
    check_output,
    check_page_output,
    check_plot_output,
    find_trace,
)
from ckplan.cli.options import (
    EjectFormat,
    Force,
    Json,
    Seed,
    StepOptions,
    TargetAndPlan,
)
from ckplan.cli.terminal import print_message, print_report, write
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.step import Training
    from ckplan.verifying.dry_run import DryRun
    from ckplan.verifying.verify import Verification


def verify(
    target_and_plan: TargetAndPlan,
    step: StepOptions,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda.  [default: the device of the plan]"),
    ] = None,
    cap: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="On a GPU: limit its memory to this size."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Number of steps to time.")] = 5,
    seed: Seed = 0,
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
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page with the timeline."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train with a plan and without it, and compare the two."""
    from ckplan.plan import file as plan_file

    target, plan = inputs.target_and_plan(target_and_plan)
    loaded = plan_file.load(plan)
    if plot is not None:
        check_plot_output(plot, force)
    spec, training, seed = step.completed(target, seed, loaded)
    known = find_trace(trace, _default_trace(spec, training, seed, loaded))
    if report is not None:
        _check_report(report, known, force)
    options: dict[str, Any] = {
        **asdict(training),
        "device": device,
        "seed": seed,
        "trace": known,
    }
    if fake:
        found: DryRun | Verification = _dry_run(spec, loaded, options)
    else:
        found = _real(spec, loaded, steps, cap, options)
    shown, error = _report_and_error(found)
    print_report(found.as_json() if as_json else shown)
    for call in found.regions_idle:
        print_message(f"warning: the region {call} never ran")
    if plot is not None:
        from ckplan.report.timeline import save_timeline

        name = loaded.model or spec.name
        budget_bytes, owners = found.budget_bytes, _owners(known, loaded)
        save_timeline(
            plot, name, found.curves, budget_bytes, owners=owners, force=force
        )
        print_message(f"wrote {plot}")
    if report is not None and known is not None:
        from ckplan.report.html import save_report

        plans = {plan.stem: loaded}
        save_report(known, plans, report, seen=found.curves, force=force)
        print_message(f"wrote {report}")
    if error is not None:
        raise error


def _default_trace(
    spec: WorkloadSpec, training: Training, seed: int, plan: Plan
) -> Path:
    from ckplan.plan.workload import plan_workload
    from ckplan.training.remembered import describe_workload

    card = {"gpu": plan.workload["gpu"]} if "gpu" in plan.workload else {}
    known = describe_workload(spec, seed)
    options = {"workload": known, **training.as_options(), **card}
    device = plan.fingerprint.get("device")
    return inputs.default_trace(spec.name, plan_workload(options), device)


def _owners(trace: Graph | None, plan: Plan) -> dict[str, str]:
    """Step -> predicted place of its peak, where known."""
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


def _dry_run(spec: WorkloadSpec, plan: Plan, options: dict[str, Any]) -> DryRun:
    from ckplan.report.progress import ProgressLine
    from ckplan.verifying.dry_run import dry_run

    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        return dry_run(spec, plan, progress=progress, **options)


def _real(
    spec: WorkloadSpec, plan: Plan, steps: int, cap: str | None, options: dict[str, Any]
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
            **options,
        )


def _report_and_error(
    found: DryRun | Verification,
) -> tuple[RenderableType, CkplanError | None]:
    """The report of a verification, and the error if it has not passed."""
    from ckplan.report import verification as report
    from ckplan.verifying.dry_run import DryRun

    if isinstance(found, DryRun):
        shown, make_error = report.dry_run_report(found), report.dry_run_error
        return shown, None if found.passed else make_error(found)
    error = None if found.passed else report.verification_error(found)
    return report.verification_report(found), error


def eject(
    target_and_plan: TargetAndPlan,
    step: StepOptions,
    form: Annotated[
        EjectFormat,
        typer.Option(
            "--as", help="PyTorch code, or the nearest setting of another tool."
        ),
    ] = EjectFormat.TORCH,
    output: Annotated[
        Path | None, typer.Option("-o", help="Write the code here.  [default: stdout]")
    ] = None,
    force: Force = False,
) -> None:
    """Print the nearest plan in plain PyTorch, or as a setting of another tool.

    TARGET can also be the model's trace.
    """
    if output is not None:
        check_output(output, force)
    from ckplan import files
    from ckplan.graph import file as trace_file
    from ckplan.plan import file as plan_file
    from ckplan.report.progress import ProgressLine

    target, plan = inputs.target_and_plan(target_and_plan)
    loaded = plan_file.load(plan)
    if target is not None and target.endswith((".json", ".json.gz")):
        graph = trace_file.load(Path(target))
    else:
        from ckplan.tracing.profile import profile_workload

        spec, training, seed = step.completed(target, 0, loaded)
        with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
            graph = profile_workload(
                spec,
                training=training,
                device=loaded.fingerprint.get("device", "cpu"),
                gpu=loaded.workload.get("gpu"),
                seed=seed,
                progress=progress,
            )
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
            "plain PyTorch cannot rebuild single ops as the plan does: printing the"
        )
        print_message("nearest plan, with its own peak and overhead at the top")
    return as_code(plain, __version__)


def _setting(graph: Graph, plan: Plan, tool: str) -> str:
    from ckplan.ejecting.settings import setting_for

    setting = setting_for(graph, plan, tool)
    for line in setting.about():
        print_message(line)
    return setting.text
