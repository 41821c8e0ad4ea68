"""``--compile`` of profile, compare and verify: what they take and print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckplan.cli.inputs import check_plan_output
from ckplan.cli.terminal import print_message, print_report

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.remembered import Remembered


def check_alone(others: Iterable[object], rest_is_default: bool) -> None:
    """Refuse options that compiled steps do not have."""
    if not rest_is_default or any(one is not None for one in others):
        raise typer.BadParameter(
            "--compile takes --set, --input, --amp, --seed and --json; verify also "
            "a plan or --budget, --device, --steps and --save, compare --budget, and "
            "profile --generate, -o, --gpu, --device and --host"
        )


def is_compiled(asked: bool, plan: Plan | None) -> bool:
    """Whether a step is to be compiled: as asked, or since its plan is for that."""
    return asked or (plan is not None and "compiled" in plan.fingerprint)


def profile_in_compiled(
    spec: WorkloadSpec,
    amp: str | None,
    seed: int,
    generate: bool,
    place: tuple[str | None, str | None, float],
    others: Iterable[object],
    rest_is_default: bool,
) -> Graph:
    """Trace the compiled step of a workload; ``others`` are options it cannot have.

    ``place`` is the device, the card and the speed of the processor beside it.
    """
    check_alone(others, rest_is_default)
    device, gpu, host = place
    if generate and (gpu is not None or (device or "cpu") != "cpu"):
        raise typer.BadParameter("--generate runs on the CPU, for which code it is")
    from ckplan.compiling.step import profile_compiled
    from ckplan.report.progress import ProgressLine

    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        return profile_compiled(
            spec,
            seed=seed,
            amp=amp,
            generate=generate,
            device=device,
            gpu=gpu,
            host=host,
            progress=progress,
        )


def compare_in_compiled(
    target: Path | None,
    settings: list[str] | None,
    budget: str | None,
    amp: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Compare a plan for a compiled step with torch's own choices there."""
    if target is None:
        raise typer.BadParameter("--compile takes a target, as for profile")
    from ckplan.report.compiled import compared_report
    from ckplan.report.progress import ProgressLine
    from ckplan.training.loading import WorkloadSpec, parse_options
    from ckplan.verifying.compiled_comparison import compare_compiled

    spec = WorkloadSpec(str(target), parse_options(settings or ()))
    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        found = compare_compiled(
            spec, budget or "80%", amp=amp, seed=seed, progress=progress
        )
    print_report(found.as_json() if as_json else compared_report(found))


def verify_in_compiled(
    known: Remembered,
    plan: Plan | None,
    budget: str | None,
    device: str | None,
    steps: int,
    save: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare compiled steps with a plan and without; write the plan if wanted."""
    wanted, eager = _wanted(plan, budget)
    if save is not None:
        check_plan_output(save, force)
    from ckplan.plan import file as plan_file
    from ckplan.report.compiled import compiled_error, compiled_report
    from ckplan.report.progress import ProgressLine
    from ckplan.verifying.compiled_steps import verify_compiled

    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        found, used = verify_compiled(
            known.spec,
            wanted,
            eager=eager,
            amp=known.training.amp,
            device=device,
            steps=steps,
            seed=known.seed,
            progress=progress,
        )
    print_report(found.as_json() if as_json else compiled_report(found))
    if save is not None:
        plan_file.save(used, save, force=force)
        print_message(f"wrote {save}")
    if not found.passed:
        raise compiled_error(found)


def _wanted(plan: Plan | None, budget: str | None) -> tuple[Plan | str, Plan | None]:
    """The plan or the budget; and with both, a plan for what runs uncompiled."""
    from ckplan.plan.plan import COMPILED

    if plan is None:
        if budget is None:
            raise typer.BadParameter("--compile takes a plan or --budget")
        return budget, None
    if budget is None:
        return plan, None
    if plan.code == COMPILED:
        raise typer.BadParameter(
            "--compile takes a plan for compiled code, or --budget, not both; beside "
            "--budget, a plan is for code that runs uncompiled"
        )
    return budget, plan
