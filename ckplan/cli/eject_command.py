"""``ckplan eject``: a plan in plain PyTorch, or as a setting of another tool."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckplan.cli import inputs
from ckplan.cli.inputs import (
    check_output,
)
from ckplan.cli.options import (
    EjectFormat,
    Force,
    StepOptions,
    TargetAndPlan,
)
from ckplan.cli.source_options import SourceOptions
from ckplan.cli.terminal import print_message, write

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.loading import WorkloadSpec
    from ckplan.training.step import Training


def eject(
    target_and_plan: TargetAndPlan,
    step: StepOptions,
    source: SourceOptions,
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
    from ckplan.plan.plan import check_model
    from ckplan.sources.source import parse_source

    target, plan = inputs.target_and_plan(target_and_plan)
    loaded = plan_file.load(plan)
    is_trace = target is not None and target.endswith((".json", ".json.gz"))
    if target is not None and is_trace and parse_source(target) is None:
        graph = trace_file.load(Path(target))
        check_model(loaded, graph.fingerprint)
    else:
        graph = _step_of(plan, loaded, target, step, source)
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


def _step_of(
    path: Path, plan: Plan, target: str | None, step: StepOptions, source: SourceOptions
) -> Graph:
    """The step that a plan was made for, of its trace if that is found."""
    from ckplan.training.remembered import script_of

    script, workload = script_of(target, plan), None
    if script is None:
        workload = step.completed(target, source, 0, plan)
        usual = inputs.trace_of_plan(*workload, plan)
    else:
        usual = inputs.trace_of_script(script.script)
    is_own = script is not None or target is None
    as_planned = is_own and step.is_default and not step.of_workload
    known = inputs.trace_for_plan(plan, usual, path if as_planned else None)
    if known is not None:
        return known  # the plan was made from these seconds
    return _profiled(*(workload or step.completed(target, source, 0, plan)), plan)


def _profiled(spec: WorkloadSpec, training: Training, seed: int, plan: Plan) -> Graph:
    from ckplan.report.progress import ProgressLine
    from ckplan.tracing.profile import profile_workload

    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        return profile_workload(
            spec,
            training=training,
            device=plan.fingerprint.get("device", "cpu"),
            gpu=plan.workload.get("gpu"),
            seed=seed,
            progress=progress,
        )


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
