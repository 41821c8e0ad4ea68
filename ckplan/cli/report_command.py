"""The command that writes the HTML report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckplan.cli.inputs import check_page_output, is_trace, load_step
from ckplan.cli.options import Force, ShardOptions
from ckplan.cli.terminal import print_message


def report(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TRACE] [PLAN]...",
            help="A trace, and plans of it.  [default: newest of traces/]",
        ),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("-o", help="The page to write.")] = Path(
        "report.html"
    ),
    chrome_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write live bytes for Perfetto."),
    ] = None,
    rank: ShardOptions,
    force: Force = False,
) -> None:
    """Write one HTML page about a step and its plans; it works offline."""
    check_page_output(output, force)
    if chrome_trace is not None:
        check_page_output(chrome_trace, force)
    sharding = rank.sharding()
    from ckplan import files
    from ckplan.plan import file as plan_file
    from ckplan.plan.plan import check_model
    from ckplan.report.html import check_report, save_report
    from ckplan.report.progress import ProgressLine

    check_report()
    traces = []
    plans = {}
    for path in inputs or []:
        if is_trace(files.read_bytes(path, "trace or plan")):
            traces.append(path)
        else:
            name = path.stem if path.stem not in plans else str(path)
            plans[name] = plan_file.load(path)
    if len(traces) > 1:
        raise typer.BadParameter(f"only one trace is possible: {traces[1]}")
    graph = load_step(traces[0] if traces else None, sharding)
    for plan in plans.values():
        check_model(plan, graph.fingerprint)
    with ProgressLine(sys.stderr) as progress:
        progress("solving", 0, 0)
        save_report(graph, plans, output, chrome_trace=chrome_trace, force=force)
    print_message(f"wrote {output}")
    if chrome_trace is not None:
        print_message(f"wrote {chrome_trace}")
