"""What ``verify`` compares: a workload or a script, a plan, and the trace of both."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckplan.cli.inputs import trace_for_plan, trace_of_plan
from ckplan.cli.terminal import print_message

if TYPE_CHECKING:
    from ckplan.cli.options import StepOptions
    from ckplan.cli.source_options import SourceOptions
    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.remembered import ScriptSpec
    from ckplan.training.step import Training


class Verified(NamedTuple):
    """A workload or a script, and how its step trains."""

    spec: WorkloadSpec | ScriptSpec
    training: Training
    seed: int


def workload_or_script(
    step: StepOptions,
    target: str | None,
    source: SourceOptions,
    seed: int,
    plan: Plan | None,
    is_of_workload: bool,
) -> Verified:
    """The workload to train, or the script that the plan was made for.

    Args:
        step: Options of workloads, which a script does not take.
        target: The workload or the script; by default that of the plan.
        source: Options of workloads without a file.
        seed: Seed of all random numbers.
        plan: The plan, if there is one.
        is_of_workload: Whether something else is wanted that scripts do not have.

    Raises:
        WorkloadError: A script is told how to train.
    """
    from ckplan.plan.workload import as_arguments
    from ckplan.training.remembered import script_of, untold

    script = script_of(target, plan)
    if script is None or plan is None:
        return Verified(*step.completed(target, source, seed, plan))
    source.settings(script.script.name)
    if is_of_workload:
        raise untold("run dry, or calibrate")
    if step.of_workload or not step.is_default:
        raise untold("choose the model, its batch or its training")
    print_message(f"runs {as_arguments(plan.workload)}, without the plan and with it")
    return Verified(script, step.training(), seed)


def plan_and_trace(
    workload: Verified,
    wanted: Plan | str | None,
    chosen: Path | None,
    device: str | None,
    path: Path | None,
) -> tuple[Plan, Graph | None]:
    """The plan, or one for a budget, and the trace of the workload, if there is one.

    A budget takes a trace: that of the path, or a new one.
    """
    from ckplan.graph import file as trace_file
    from ckplan.plan.plan import Plan

    spec, training, seed = workload
    if isinstance(wanted, Plan):
        if path is not None:
            return wanted, trace_file.load(path)
        usual = trace_of_plan(spec, training, seed, wanted)
        return wanted, trace_for_plan(wanted, usual, chosen)
    from ckplan.report.progress import ProgressLine
    from ckplan.solving.solve import solve_plan
    from ckplan.tracing.profile import profile_workload
    from ckplan.training.loading import WorkloadSpec

    assert isinstance(spec, WorkloadSpec), "internal error: a script without a plan"

    # Output of the workload does not belong on stdout.
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        if path is None:
            how: Any = {"training": training, "device": device, "seed": seed}
            graph = profile_workload(spec, **how, progress=progress)
        else:
            graph = trace_file.load(path)
        progress("solving", 0, 0)
        return solve_plan(graph, wanted), graph
