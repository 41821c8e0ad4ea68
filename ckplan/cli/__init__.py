"""The command line: parse, call, print.

Commands import their dependencies in their bodies, so ``ckplan --help`` is fast and
``show`` and ``solve`` do not import torch. ``terminal.py`` defines exit codes.
"""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from ckplan.cli.compare_command import compare
from ckplan.cli.eject_command import eject
from ckplan.cli.fit_command import fit
from ckplan.cli.inspect_commands import gpus, profile, show
from ckplan.cli.options import with_blocks
from ckplan.cli.plan_commands import frontier, solve
from ckplan.cli.record_command import record
from ckplan.cli.report_command import report
from ckplan.cli.terminal import TRACEBACK, Command, Commands, write
from ckplan.cli.tune_command import tune
from ckplan.cli.verify_command import verify

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OF_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
commands = (
    *(profile, solve, frontier, compare, fit, tune),
    *(show, report, gpus, verify, eject),
)
for command in commands:
    app.command(cls=Command)(with_blocks(command))
app.command(cls=Command, context_settings=OF_A_SCRIPT)(with_blocks(record))


def main() -> None:
    """Run the command line: the entry point of the program ``ckplan``."""
    try:
        app(prog_name="ckplan")
    finally:
        gc.freeze()  # the end of the process frees more quickly than the collector


def _version(show: bool) -> None:
    if show:
        from ckplan import __version__

        write(f"ckplan {__version__}\n")
        raise typer.Exit


@app.callback()
def _ckplan(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="Show the version."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="On an error, show the traceback.")
    ] = False,
) -> None:
    """Plan activation checkpointing: the fastest training step that fits in memory.

    Profile a model once, solve for a budget, apply the plan in Python with
    ckplan.apply(model, "plan.yaml"), and verify its peak and its results.

    Exit codes: 0 done, 1 bad input, 2 usage, 3 no plan fits, 4 verification failed.
    """
