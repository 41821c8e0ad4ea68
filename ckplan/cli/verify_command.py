"""Commands that use a plan: verify it, or export it as plain PyTorch."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.cli import inputs
from ckplan.cli.compiled import check_alone, is_compiled, verify_in_compiled
from ckplan.cli.inputs import (
    check_page_output,
    check_plot_output,
)
from ckplan.cli.options import (
    Force,
    Json,
    Seed,
    Spill,
    StepOptions,
    TargetAndPlan,
)
from ckplan.cli.source_options import SourceOptions
from ckplan.cli.terminal import print_message, print_report
from ckplan.cli.verified import plan_and_trace, workload_or_script
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.remembered import ScriptSpec
    from ckplan.verifying.dry_run import DryRun
    from ckplan.verifying.verify import Verification


def verify(
    target_and_plan: TargetAndPlan,
    *,
    step: StepOptions,
    source: SourceOptions,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda.  [default: the device of the plan]"),
    ] = None,
    cap: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="On a GPU: limit its memory to this size."),
    ] = None,
    spill: Spill = None,
    steps: Annotated[int, typer.Option(min=0, help="Number of steps to time.")] = 5,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Keep what the engine took, for the next profiles."
        ),
    ] = False,
    energy: Annotated[
        bool,
        typer.Option(
            "--energy", help="Measure joules, where the hardware counts them (Zeus)."
        ),
    ] = False,
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
        typer.Option(metavar="SIZE", help="Instead of a plan: make one for this."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan that --budget makes here."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Predicts the timeline.  [default: traces/NAME.json.gz, or beside the "
            "plan]"
        ),
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
    """Train with a plan and without it, and compare the two.

    A plan of a script, from `ckplan record`, is verified in that script.
    """
    from ckplan.plan import file as plan_file
    from ckplan.report import verification

    target, chosen = inputs.target_and_wish(target_and_plan, budget)
    if not compiled:
        inputs.check_wish(chosen, budget, save, force)
    given = None if chosen is None else plan_file.load(chosen)
    if is_compiled(compiled, given):
        workload = step.completed(target, source, seed, given)
        others = (cap, spill, trace, plot, report)
        check_alone(others, step.is_plain and not (fake or energy or calibrate))
        verify_in_compiled(workload, given, budget, device, steps, save, force, as_json)
        return
    if plot is not None:
        check_plot_output(plot, force)
    _check_wishes(calibrate, fake, energy, report, force)
    no_script = fake or calibrate
    verified = workload_or_script(step, target, source, seed, given, no_script)
    spec, training, seed = verified
    loaded, known = plan_and_trace(verified, given or budget, chosen, device, trace)
    _check_trace(known, steps if calibrate else None, report)
    if save is not None:
        plan_file.save(loaded, save, force=force)
        print_message(f"wrote {save}")
    options: dict[str, Any] = {
        **asdict(training),
        "device": device,
        "seed": seed,
        "trace": known,
    }
    real = {**options, "spill": spill, "energy": energy}
    found = (
        _dry_run(spec, loaded, options)
        if fake
        else _real(spec, loaded, steps, cap, real)
    )
    shown, error = _report_and_error(found)
    print_report(found.as_json() if as_json else shown)
    if calibrate and error is None and known is not None:
        error = _calibrate(found, known, device, loaded)
    for remark in verification.remarks(found, has_trace=known is not None):
        print_message(remark)
    if plot is not None:
        _save_timeline(plot, loaded.model or spec.name, found, known, loaded, force)
    if report is not None and known is not None:
        from ckplan.report.html import save_report

        plans = {(chosen or save or Path("plan")).stem: loaded}
        save_report(known, plans, report, seen=found.curves, force=force)
        print_message(f"wrote {report}")
    if error is not None:
        raise error


def _save_timeline(
    path: Path,
    name: str,
    found: DryRun | Verification,
    trace: Graph | None,
    plan: Plan,
    force: bool,
) -> None:
    from ckplan.report.timeline import save_timeline

    owners = _owners(trace, plan)
    save_timeline(
        path, name, found.curves, found.budget_bytes, owners=owners, force=force
    )
    print_message(f"wrote {path}")


def _check_wishes(
    calibrate: bool, fake: bool, energy: bool, report: Path | None, force: bool
) -> None:
    """Raise early if what is wanted beside the comparison cannot be had."""
    if energy and fake:
        raise CkplanError(
            "cannot measure the energy of a dry run: it runs nothing",
            needed="steps on the device itself",
            hint="ckplan verify --energy without --fake",
        )
    if calibrate and fake:
        raise CkplanError(
            "cannot calibrate a dry run: it has no seconds",
            needed="steps on the device itself",
            hint="ckplan verify --calibrate without --fake",
        )
    if report is not None:
        from ckplan.report.html import check_report

        check_report()
        check_page_output(report, force)


def _calibrate(
    found: DryRun | Verification, trace: Graph, device: str | None, plan: Plan
) -> CkplanError | None:
    """Keep what the engine took and say it; the error if it cannot be told."""
    from ckplan.verifying.calibrating import calibrate
    from ckplan.verifying.verify import Verification, step_device

    assert isinstance(found, Verification), "internal error: calibrated a dry run"
    try:
        low, median, high = calibrate(found, trace, step_device(device, plan)).factor
    except CkplanError as error:
        return error
    print_message(
        f"calibrated: the engine takes {median:.2f} times what the trace says "
        f"(quartiles {low:.2f} to {high:.2f})"
    )
    print_message("ckplan profile and solve again use that on this machine")
    return None


def _owners(trace: Graph | None, plan: Plan) -> dict[str, str]:
    """Step -> predicted place of its peak, where known."""
    from ckplan.simulating.curve import PLANNED, UNPLANNED
    from ckplan.simulating.simulate import simulate

    found = {PLANNED: plan.predicted.peak_at} if plan.predicted else {}
    return found if trace is None else {UNPLANNED: simulate(trace).peak_at, **found}


def _check_trace(
    trace: Graph | None, calibrated_steps: int | None, report: Path | None
) -> None:
    """Raise if there is no trace for what is wanted, or none that can be used."""
    if calibrated_steps is not None:
        from ckplan.verifying.calibrating import check_calibration

        check_calibration(trace, calibrated_steps)
    if report is not None and trace is None:
        raise CkplanError(
            f"cannot write '{report}': there is no trace of this workload",
            needed="the trace that the plan was made from",
            hint="--trace FILE, from `ckplan profile`",
        )


def _dry_run(
    spec: WorkloadSpec | ScriptSpec, plan: Plan, options: dict[str, Any]
) -> DryRun:
    from ckplan.report.progress import ProgressLine
    from ckplan.training.loading import WorkloadSpec
    from ckplan.verifying.dry_run import dry_run

    assert isinstance(spec, WorkloadSpec), "internal error: a dry run of a script"
    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        return dry_run(spec, plan, progress=progress, **options)


def _real(
    spec: WorkloadSpec | ScriptSpec,
    plan: Plan,
    steps: int,
    cap: str | None,
    options: dict[str, Any],
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
