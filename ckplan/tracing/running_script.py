"""Run a training script as ``python`` would: as ``__main__``, with its arguments."""

from __future__ import annotations

import runpy
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch

from ckplan.applying.tensors.compiled import uncompiled
from ckplan.training.script import Script


class ScriptEnd(BaseException):
    """Ends the script; no ``except Exception`` of it stops this."""


def run_script(
    script: Script, scope: AbstractContextManager[object]
) -> BaseException | None:
    """Run a script in a scope.

    Returns:
        What it ended with, if not by itself or by ``ScriptEnd``.
    """
    with scope, script.as_python_runs():
        try:
            if script.is_module:
                runpy.run_module(script.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script.name, run_name="__main__")
        except ScriptEnd:
            return None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a script may end with
            return error
    return None


def exit_code(ended: SystemExit | None) -> int:
    """The exit code, as Python makes it of an argument of ``sys.exit``."""
    code = ended.code if ended else 0
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


OP_BY_OP = "what the script compiles ran op by op"


class OpByOp:
    """A scope in which what a script compiles runs op by op, until it is told to stop.

    Dynamo cannot trace hooks of all modules. To import it takes seconds, so that is
    left to scripts that compile.
    """

    def __init__(self) -> None:
        self.is_used = False  # whether the script compiles something
        self._is_over = False
        self._scope = ExitStack()
        self._compile = torch.compile
        self._patch = mock.patch.object(torch, "compile", self._compiled)

    def __enter__(self) -> OpByOp:
        self._patch.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(None, None, None)
        self.stop()

    def stop(self) -> None:
        """Let compiled code run from here on."""
        self._is_over = True
        self._scope.close()

    def _compiled(self, *args: Any, **how: Any) -> Any:
        made = self._compile(*args, **how)
        if not (self.is_used or self._is_over):
            self.is_used = True
            hooks = "Using `torch.compile.module.` when there are global hooks"
            warnings.filterwarnings("ignore", hooks)
            self._scope.enter_context(uncompiled())
        return made
