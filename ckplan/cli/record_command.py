"""The command that records a step of a script."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.cli.inputs import check_output, trace_of_script
from ckplan.cli.options import Force, Fresh, TraceOutput
from ckplan.cli.terminal import print_message

if TYPE_CHECKING:
    from ckplan.tracing.script import ScriptRecorder
    from ckplan.training.script import Script


def record(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="A Python file that trains a model, or with -m a module.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]", help="Its own arguments."),
    ] = None,
    *,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="SCRIPT is a module, as for `python -m`."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the model, if there are several.  [default: the one with "
            "most parameters]",
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps to record; the one with the largest batch is kept."
        ),
    ] = 1,
    reduce: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="For a script that does not fit: record it at one row of N of its "
            "batches, and at half of that, and extrapolate.",
        ),
    ] = None,
    goes_on: Annotated[
        bool,
        typer.Option("--continue", help="Let the script go on after the second step."),
    ] = False,
    fresh: Fresh = False,
    output: TraceOutput = None,
    force: Force = False,
) -> None:
    """Run a training script and trace its second step.

    The script runs as `python SCRIPT ARGS` would run it, and ends after its second
    step. Options of ckplan stand before SCRIPT. Standard output is the script's own.
    """
    from ckplan.training.script import Script

    run = Script(script, tuple(arguments or ()), module)
    path = output or trace_of_script(run)
    check_output(path, force, hint=f"ckplan record --force {run} ..., or -o NAME")
    if output is None and "-o" in run.arguments:
        print_message(f"-o is given to {script}: options of ckplan stand before it")
    from ckplan.report.progress import ProgressLine
    from ckplan.tracing.script import record_script

    with ProgressLine(sys.stderr) as progress:
        code = record_script(
            run,
            model=model,
            num_steps=steps,
            reduce=reduce,
            goes_on=goes_on,
            fresh=fresh,
            progress=progress,
            recorded=lambda watch: _write(watch, run, path, force),
        )
    if code:
        raise typer.Exit(code)


def _write(watch: ScriptRecorder, script: Script, path: Path, force: bool) -> None:
    """Write the trace and tell what it is of, on the standard error."""
    if os.environ.get("RANK", "0") != "0":
        return  # the first of several ranks writes
    from ckplan.graph import file as trace_file
    from ckplan.report.step import step_report
    from ckplan.report.tables import render
    from ckplan.simulating.simulate import simulate
    from ckplan.tracing.running_script import OP_BY_OP

    recorder, names = watch.recorder, [type(one).__name__ for one in watch.optimizers]
    assert recorder is not None, "internal error: nothing is recorded"
    graph = recorder.graph
    workload: dict[str, Any] = {"script": script.command}
    if recorder.number != 2:
        workload["step"] = recorder.number
    if recorder.beside_bytes:
        workload["beside_bytes"] = recorder.beside_bytes
    options: dict[str, Any] = {**graph.options, "workload": workload}
    notes = graph.notes
    if watch.num_alike > 1:
        notes = (
            *notes,
            f"the script runs {watch.num_alike} models of type {graph.model}: recorded "
            "is that with most parameters, of equal ones that which ran first, and a "
            "plan is for it alone; for another one, ckplan.record(model, optimizer) in "
            "Python",
        )
    if watch.compiles:
        notes = (
            *notes,
            f"{OP_BY_OP}, and a plan of this trace is for that: compiled code takes "
            "other bytes, see ckplan.compile(model, budget)",
        )
    graph = replace(graph, options=options, notes=notes)
    trace_file.save(graph, path, force=force)
    given = graph.fingerprint["batch"]
    batch = ", ".join(f"{key} {shape}" for key, shape in given.items())
    batch = batch or "not known, as the model itself is not called"
    print_message(render(step_report(graph, simulate(graph))))
    print_message(f"recorded {graph.model}, stepped by {' and '.join(names)}")
    print_message(f"its batch: {batch}")
    print_message(f"wrote {path}")
