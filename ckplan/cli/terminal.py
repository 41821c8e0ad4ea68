"""Terminal behaviour of commands: streams, messages and exit codes."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

TRACEBACK = "--traceback"
BROKEN_PIPE = 141  # 128 + SIGPIPE


@contextmanager
def fewer_collections() -> Iterator[None]:
    """A scope of a search: its many records live on, so looking for cycles is waste."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(4_000_000, 50, 50)
    try:
        yield
    finally:
        if not frozen:  # makes all objects old ones, at which nobody looks now
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)


class Commands(TyperGroup):
    """Accepts ``--traceback`` before and after the command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move ``--traceback`` to the front, where program options stand."""
        if args[:1] == ["record"]:  # what follows its script is the script's
            own = 2 if args[1:2] == [TRACEBACK] else 1
            return super().parse_args(ctx, [*args[1:own], "record", *args[own:]])
        traceback_flags = [arg for arg in args if arg == TRACEBACK]
        others = [arg for arg in args if arg != TRACEBACK]
        return super().parse_args(ctx, [*traceback_flags[:1], *others])


class Command(TyperCommand):
    """A command that ends every error with an exit code and a short message."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; map exceptions to exit codes."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BaseException as error:
            with_traceback = ctx.parent is not None and ctx.parent.params["traceback"]
            raise typer.Exit(_explain(error, with_traceback)) from None


def write(text: str) -> None:
    """Write a result to stdout."""
    if sys.stdout is None:  # closed by `>&-`
        raise CkplanError(
            "cannot write the output: the standard output is closed",
            needed="an open standard output",
            hint="redirect it to /dev/null if it is not needed",
        )
    sys.stdout.write(text)
    sys.stdout.flush()


def print_report(product: RenderableType | dict[str, Any]) -> None:
    """Write a report as text, or a dict as JSON, to stdout."""
    if isinstance(product, dict):
        import json

        write(json.dumps(product, indent=2) + "\n")
    else:
        from ckplan.report.tables import render

        write(render(product))


def print_message(text: str) -> None:
    """Write a message, a warning or a tip to stderr."""
    print(text, file=sys.stderr)


def _explain(error: BaseException, with_traceback: bool) -> int:
    """Print an error in a few lines; return the exit code."""
    if isinstance(error, OSError):
        _drop_what_cannot_be_written()
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if with_traceback:
        traceback.print_exception(error)
    if not isinstance(error, CkplanError):
        error = _unexpected(error)
    print_message(str(error))
    return error.exit_code


def _drop_what_cannot_be_written() -> None:
    """Leave nothing to flush when Python ends: it would change the exit code."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:  # the reader closed the pipe, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: BaseException) -> CkplanError:
    if isinstance(error, SystemExit):
        return CkplanError(
            f"cannot use the workload: it called sys.exit({error.code!r})",
            needed="a file that can be imported, and a model that runs to its end",
            hint="put code that runs the file under `if __name__ == '__main__':`",
        )
    if isinstance(error, KeyboardInterrupt):
        exec("")  # else Python can end by the signal instead of the exit code
        return CkplanError(
            "interrupted",
            needed="time to finish; files are written whole or not at all",
            hint="the same command again",
        )
    if isinstance(error, OSError) and error.errno == ENOSPC:
        return CkplanError(
            f"cannot write all of the output: {str(error.strerror).lower()}",
            needed="free space for the output and for temporary files",
            hint="free some space, or redirect the output to another disk",
        )
    if isinstance(error, MemoryError):
        return CkplanError(
            "ran out of memory",
            needed="more memory than this machine has left",
            hint="close other programs, or plan for a smaller model or batch",
        )
    message = str(error).strip() or "no message"
    if not isinstance(error, Exception):
        return CkplanError(
            f"cannot use the workload: it raised {type(error).__name__}: {message}",
            needed="a model that runs to its end",
            hint=f"the same command with {TRACEBACK} shows where",
        )
    return CkplanError(
        f"ckplan failed: {type(error).__name__}: {message}",
        needed="nothing from you: this is a bug in ckplan",
        hint=f"the same command with {TRACEBACK}, and report its output",
    )
