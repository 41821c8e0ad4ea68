"""What torch cannot compile, and what it lacks for that, in three lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ckplan.compiling import torch_names
from ckplan.compiling.nodes import line_of
from ckplan.compiling.torch_names import (
    EXAMPLE,
    BackendCompilerFailed,
    CppCompileError,
    FailOnRecompileLimitHit,
    InvalidCxxCompiler,
    ShortenTraceback,
    TorchDynamoException,
    free_unbacked_symbols,
    get_cpp_compiler,
)
from ckplan.errors import ApplyError, CkplanError, GraphBreakError
from ckplan.training.failures import first_line

ALLOWS_RECURRENT = "torch._dynamo.config.allow_rnn = True, where the model is built"
"""What lets Dynamo compile functions that use nn.LSTM, nn.GRU or nn.RNN."""
_BREAKS = """in Python, ckplan.compile(model, budget, fullgraph=False), where the \
graph breaks; TORCH_LOGS=graph_breaks shows the place"""

_SIZED = torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool
_NOT_COMPILED = "found no compiled frames"  # others have used up what torch allows


def require_hook() -> None:
    """Raise an ``ApplyError`` unless torch has what plans in compiled code need."""
    missing = torch_names.MISSING
    if isinstance(missing, OSError):
        raise _cache_fails("cannot plan compiled code", str(missing))
    if missing is not None:
        raise ApplyError(
            f"cannot plan compiled code with torch {torch.__version__}: {missing}",
            needed="a torch whose Inductor takes a custom partitioner (2.11 to 2.14)",
            hint="another torch, or ckplan.apply, which plans uncompiled code",
        )


def require_compiler() -> None:
    """Raise an ``ApplyError`` unless Inductor finds a C++ compiler."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as missing:
        raise _no_compiler() from missing


def _no_compiler() -> ApplyError:
    return ApplyError(
        "cannot compile for the CPU: Inductor finds no C++ compiler",
        needed="g++ 10 or later, or clang++, on PATH or named by CXX",
        hint="apt-get install g++, or ckplan.apply, which plans uncompiled code",
    )


@contextmanager
def errors_pass() -> Iterator[None]:
    """Let an error of ckplan reach the user as it is, through Dynamo.

    Dynamo wraps what a backend raises, except errors of its own. So the error becomes
    one of those, too.
    """
    try:
        yield
    except CkplanError as error:
        if isinstance(error, ShortenTraceback):
            raise
        raise _passing(error).with_traceback(error.__traceback__) from None


@contextmanager
def compile_errors(what: str) -> Iterator[None]:
    """Say in three lines what torch cannot compile.

    Raises:
        ApplyError: Inductor failed, such as at a file of its cache.
        GraphBreakError: Dynamo refused it.
    """
    try:
        yield
    except CkplanError:
        raise
    except BackendCompilerFailed as error:
        raise _inductor_failed(what, error.inner_exception) from error
    except FailOnRecompileLimitHit as error:
        raise _too_often(what) from error
    except TorchDynamoException as error:
        raise GraphBreakError(
            f"cannot compile {what} as one graph: {first_line(error)}",
            needed="a model and a loss that compile with fullgraph=True",
            hint=ALLOWS_RECURRENT if "allow_rnn" in str(error) else _BREAKS,
        ) from error
    except RuntimeError as error:
        if _NOT_COMPILED not in str(error):
            raise
        raise _too_often(what) from error


def refuse_read_values(graph: fx.GraphModule) -> None:
    """Refuse a graph whose code goes by values of tensors: no replay has any.

    Args:
        graph: As Dynamo gives it, under ``fullgraph=True``; else it breaks there.

    Raises:
        GraphBreakError: It reads a number, or makes as much as values decide.
    """
    for node in graph.graph.nodes:
        made = pytree.tree_leaves(node.meta.get(EXAMPLE))
        if free_unbacked_symbols([one for one in made if isinstance(one, _SIZED)]):
            line = line_of(node)
            raise GraphBreakError(
                "cannot compile the step as one graph: it goes by values of a tensor"
                + (f", at '{line}'" if line else ""),
                needed="ops whose sizes and numbers are known before they run",
                hint=_BREAKS,
            )


def _too_often(what: str) -> ApplyError:
    most = torch._dynamo.config.recompile_limit
    return ApplyError(
        f"cannot compile {what} again: torch compiles a function at most {most} times, "
        "for other shapes, modes or models",
        needed=f"batches of at most {most} different shapes",
        hint="dynamic=True, batches padded to fewer lengths, or "
        f"torch._dynamo.config.recompile_limit = {8 * most}",
    )


def _inductor_failed(what: str, error: BaseException) -> ApplyError:
    if isinstance(error, InvalidCxxCompiler):
        return _no_compiler()
    said = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, CppCompileError):  # what is cached may not suit this CPU
        lines = str(error).splitlines()
        said = next((line for line in lines if " error: " in line), said)
    if isinstance(error, OSError | ImportError | CppCompileError):
        return _cache_fails(f"cannot compile {what}", said)
    return ApplyError(
        f"cannot compile {what}: Inductor fails: {said}",
        needed="a model that torch.compile(model) compiles on its own",
        hint="ckplan.apply, which plans uncompiled code",
    )


def _cache_fails(what: str, said: str) -> ApplyError:
    return ApplyError(
        f"{what}: a file of Inductor's cache fails: {said}",
        needed="a cache that this machine wrote, with this torch and compiler",
        hint="TORCHINDUCTOR_CACHE_DIR=EMPTY_FOLDER, not /tmp/torchinductor_USER",
    )


def _passing(error: CkplanError) -> CkplanError:
    """The same error as one that Dynamo does not wrap."""

    def copy_fields(self: Any) -> None:
        Exception.__init__(self, error.what)
        self.what, self.needed, self.hint = error.what, error.needed, error.hint
        self.first_useful_frame = None  # keep the whole traceback

    kind = type(error)
    bases = (kind, ShortenTraceback)
    body = {"__init__": copy_fields, "__module__": kind.__module__}
    passing = type(kind.__name__, bases, body)
    found: CkplanError = passing()
    return found


def with_short_errors(
    call: Callable[..., Any],
    prepare: Callable[..., None] | None = None,
    settle: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """A compiled model whose errors are short.

    Args:
        call: Runs it.
        prepare: Called with its arguments before every run.
        settle: Called once with them, when the graph breaks; then it is run again.
    """

    def attempt(args: Any, kwargs: Any) -> Any:
        with compile_errors("the model"):
            if prepare is not None:
                prepare(args, kwargs)
            return call(*args, **kwargs)

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal settle
        once, settle = settle, None
        try:
            return attempt(args, kwargs)
        except GraphBreakError:
            if once is None:
                raise
        once(args, kwargs)
        return attempt(args, kwargs)

    return checked
