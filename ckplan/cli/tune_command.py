"""The command that searches the setting with the most samples per second."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ckplan.cli.inputs import check_output
from ckplan.cli.options import Force, Json, Seed, StepOptions, Target
from ckplan.cli.source_options import SourceOptions
from ckplan.cli.terminal import print_message, print_report


def tune(
    target: Target,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A card of `ckplan gpus`: its memory and its seconds."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Limit on the peak: 12GB, 12GiB, or 80% of the unplanned peak at the "
            "workload's own batch.",
        ),
    ] = None,
    total_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Samples per step of the optimizer, to be kept: micro-batches divide "
            "it.  [default: any; as many micro-batches as --accumulate]",
        ),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show tokens per second.")
    ] = False,
    allow: Annotated[
        str | None,
        typer.Option(
            metavar="LEVERS",
            help="What may change the results of training, joined by commas: bf16, "
            "fp16, pure-bf16, adafactor, adamw8bit, lora.",
        ),
    ] = None,
    expandable: Annotated[
        bool,
        typer.Option(
            "--expandable-segments",
            help="With --gpu: train with PYTORCH_ALLOC_CONF=expandable_segments:True.",
        ),
    ] = False,
    step: StepOptions,
    source: SourceOptions,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option("-o", help="Write the plan with its setting here.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Search batch, accumulation, plan and more for the most samples per second."""
    if budget is None and gpu is None:
        raise typer.BadParameter("one is needed: --gpu or --budget")
    if expandable and gpu is None:
        raise typer.BadParameter("--expandable-segments needs --gpu")
    if total_batch is not None and step.accumulate > 1:
        raise typer.BadParameter("only one is possible: --total-batch or --accumulate")
    if output is not None:
        check_output(output, force)
    from ckplan.autotune import recorder_of_spec, tune_recorded
    from ckplan.plan import file as plan_file
    from ckplan.report.progress import ProgressLine
    from ckplan.report.tuning import tuned_json, tuned_report
    from ckplan.tuning.answer import plan_of
    from ckplan.tuning.settings import Way, levers_of

    allowed = [name.strip() for name in (allow or "").split(",") if name.strip()]
    levers_of(Way(), allowed)
    spec = step.workload(target, source)
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        how = {"gpu": gpu, "seed": seed, "progress": progress}
        record, rows, way = recorder_of_spec(spec, step.training(), **how)
        found = tune_recorded(
            record,
            rows,
            way,
            budget=budget,
            gpu=gpu,
            expandable=expandable,
            accumulate=step.accumulate,
            total_batch=total_batch,
            allow=allowed,
            tokens=tokens,
            tell=lambda what: progress(what, 0, 0),
        )
    print_report(tuned_json(found) if as_json else tuned_report(found))
    if output is not None:
        plan_file.save(plan_of(found), output, force=force)
        print_message(f"wrote {output}")
