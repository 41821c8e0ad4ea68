"""The command that searches the setting with the most samples per second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckplan.cli.inputs import (
    check_page_output,
    check_plan_output,
    check_plot_output,
    is_trace_file,
)
from ckplan.cli.options import Force, Json, Seed, StepOptions
from ckplan.cli.source_options import SourceOptions
from ckplan.cli.terminal import fewer_collections, print_message, print_report

if TYPE_CHECKING:
    from ckplan.tuning.tuned import Tuned


def tune(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE [TRACE]",
            help="A workload, as for `ckplan profile`: model.py, hf:ID_OR_FOLDER and "
            "more; or two traces of it, of two batches.",
        ),
    ],
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
        list[str] | None,
        typer.Option(
            metavar="LEVERS",
            help="What else may be tried, joined by commas: bf16, fp16, pure-bf16, "
            "adafactor, adamw8bit, lora; with --gpu: compile; in plans: tiles, "
            "close, offload; with --world-size: ddp, zero1, zero2, zero3, fsdp2.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Ranks to shard over."),
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
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw samples per second by batch: .png or .svg."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page about the answer."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="Write the plan with its setting here.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Search batch, accumulation, plan and more for the most samples per second."""
    _check(budget, gpu, expandable, total_batch, step)
    if output is not None:
        check_plan_output(output, force)
    if plot is not None:
        check_plot_output(plot, force)
    if report is not None:
        _check_report(report, force)
    from ckplan.plan import file as plan_file
    from ckplan.report.tuning import save_tuned_plot, tuned_json, tuned_report
    from ckplan.tuning.answer import plan_of
    from ckplan.tuning.settings import Way, levers_of

    levers_of(Way(), allow or (), world_size or 1)
    limit: dict[str, Any] = {
        "budget": budget,
        "gpu": gpu,
        "expandable": expandable,
        "total_batch": total_batch,
        "tokens": tokens,
    }
    traced = _are_traces(sources, step, source, allow)
    with fewer_collections():
        if traced:
            found = _of_traces(sources, limit)
        else:
            limit |= {"accumulate": step.accumulate, "allow": allow or ()}
            limit["ranks"] = world_size or 1
            found = _of_workload(sources[0], step, source, seed, limit)
    print_report(tuned_json(found) if as_json else tuned_report(found))
    if plot is not None:
        save_tuned_plot(plot, found, force=force)
        print_message(f"wrote {plot}")
    if report is not None:
        from ckplan.report.tuned_page import save_tuned_report

        save_tuned_report(found, report, force=force)
        print_message(f"wrote {report}")
    if output is not None:
        plan_file.save(plan_of(found), output, force=force)
        print_message(f"wrote {output}")


def _check(
    budget: str | None,
    gpu: str | None,
    expandable: bool,
    total_batch: int | None,
    step: StepOptions,
) -> None:
    """Refuse options that exclude each other."""
    if budget is None and gpu is None:
        raise typer.BadParameter("one is needed: --gpu or --budget")
    if expandable and (gpu is None or budget is not None):
        raise typer.BadParameter("--expandable-segments needs --gpu, and no --budget")
    if total_batch is not None and step.accumulate > 1:
        raise typer.BadParameter("only one is possible: --total-batch or --accumulate")


def _check_report(path: Path, force: bool) -> None:
    """Raise early if the page cannot be made or written."""
    from ckplan.report.html import check_report

    check_report()
    check_page_output(path, force)


def _are_traces(
    sources: Sequence[str],
    step: StepOptions,
    source: SourceOptions,
    allowed: list[str] | None,
) -> bool:
    """Whether the sources are traces, which take no options of the step."""
    if all(map(is_trace_file, sources)):
        plain = step.is_default and not step.of_workload
        if not plain or source.settings(sources[0]) or allowed:
            raise typer.BadParameter("options of the step are for a workload")
        return True
    if len(sources) > 1:
        raise typer.BadParameter(f"two sources are two traces: {' '.join(sources)}")
    return False


def _of_traces(paths: Sequence[str], limit: dict[str, Any]) -> Tuned:
    from ckplan.graph import file as trace_file
    from ckplan.tuning.recorded import tune_traces

    return tune_traces([trace_file.load(Path(one)) for one in paths], **limit)


def _of_workload(
    target: str,
    step: StepOptions,
    source: SourceOptions,
    seed: int,
    limit: dict[str, Any],
) -> Tuned:
    from ckplan.autotune import recorder_of_spec
    from ckplan.report.progress import ProgressLine
    from ckplan.tuning.recorded import tune_recorded

    spec = step.workload(target, source)
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):
        how = {"gpu": limit["gpu"], "seed": seed, "progress": progress}
        record, rows, way = recorder_of_spec(spec, step.training(), **how)
        tell: Callable[[str], None] = lambda what: progress(what, 0, 0)  # noqa: E731
        return tune_recorded(record, rows, way, **limit, tell=tell)
