"""The command that says on which cards a step fits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckplan.cli.inputs import is_trace_file
from ckplan.cli.options import Json, Seed, StepOptions
from ckplan.cli.source_options import SourceOptions
from ckplan.cli.terminal import fewer_collections, print_report

if TYPE_CHECKING:
    from ckplan.fitting.fit import Fit
    from ckplan.graph.graph import Graph
    from ckplan.tuning.known_batches import KnownBatches

DOES_NOT_FIT = 3


def fit(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE [TRACE]",
            help="A trace, or two of two batches; or a workload, as for `ckplan "
            "profile`: model.py, hf:ID_OR_FOLDER and more.",
        ),
    ],
    *,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="A card of `ckplan gpus`; repeatable, and then every one must fit.  "
            "[default: all; one must fit]",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Instead of cards: a limit on the bytes of tensors, such as 12GiB.",
        ),
    ] = None,
    step: StepOptions,
    source: SourceOptions,
    seed: Seed = 0,
    as_json: Json = False,
    sarif: Annotated[
        bool, typer.Option("--sarif", help="Print SARIF 2.1.0 for code hosts.")
    ] = False,
) -> None:
    """Say which cards a step fits on: as it is, with a plan, at which batch.

    Exit code 3 if it does not fit.
    """
    if gpu and budget is not None:
        raise typer.BadParameter("only one is possible: --gpu or --budget")
    if as_json and sarif:
        raise typer.BadParameter("only one is possible: --json or --sarif")
    from ckplan import __version__
    from ckplan.report.fit import fit_json, fit_report
    from ckplan.report.sarif import fit_sarif

    traces = [Path(one) for one in sources if is_trace_file(one)]
    if len(traces) == len(sources):
        from ckplan.fitting.fit import fit as fit_traces

        plain = step.is_default and not step.of_workload
        if not plain or source.settings(sources[0]):
            raise typer.BadParameter("options of the step are for a workload")
        with fewer_collections():
            found = fit_traces(*traces, gpu=gpu, budget=budget)
    elif len(sources) > 1:
        raise typer.BadParameter(f"two sources are two traces: {' '.join(sources)}")
    else:
        with fewer_collections():
            found = _fit_workload(sources[0], step, source, seed, gpu, budget)
    if sarif:
        print_report(fit_sarif(found, _file_of(sources[0]), __version__))
    else:
        shown = fit_json(found, sources[0]) if as_json else fit_report(found)
        print_report(shown)
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _file_of(source: str) -> str:
    """The file of a source, which results are shown at."""
    file, _, name = source.rpartition(":")
    return file if file.endswith(".py") and name.isidentifier() else source


def _fit_workload(
    target: str,
    step: StepOptions,
    source: SourceOptions,
    seed: int,
    gpu: Sequence[str] | None,
    budget: str | None,
) -> Fit:
    """Profile at the batch and at half of it, for every card that is named."""
    from ckplan import gpus
    from ckplan.fitting.fit import fit_batches, together

    cards = [gpus.find(name).name for name in gpu or ()]
    if budget is not None:
        return fit_batches(_profiled(target, step, source, seed, None), budget=budget)
    if not cards:
        return fit_batches(_profiled(target, step, source, seed, gpus.DEFAULT))
    return together(
        [
            fit_batches(_profiled(target, step, source, seed, card), gpu=card)
            for card in cards
        ]
    )


def _profiled(
    target: str,
    step: StepOptions,
    source: SourceOptions,
    seed: int,
    gpu: str | None,
) -> KnownBatches:
    from ckplan.errors import CkplanError
    from ckplan.report.progress import ProgressLine
    from ckplan.tracing.profile import profile_workload
    from ckplan.tracing.rows import spec_rows
    from ckplan.tuning.batches import probe_rows
    from ckplan.tuning.known_batches import KnownBatches, batches_of

    spec, training = step.workload(target, source), step.training()
    with ProgressLine(sys.stderr) as progress, redirect_stdout(sys.stderr):

        def profiled(rows: int | None) -> Graph:
            return profile_workload(
                spec if rows is None else replace(spec, rows=rows),
                training=training,
                gpu=gpu,
                seed=seed,
                replay=rows is None,
                check=rows is None,
                progress=progress,
            )

        graph, rows = profiled(None), spec.rows
        try:
            rows = rows or spec_rows(spec)
            first, other = probe_rows(rows)
            return batches_of((graph, profiled(other if first == rows else first)))
        except CkplanError as error:
            return KnownBatches(graph, rows, why_one=f"other batches: {error.what}")
