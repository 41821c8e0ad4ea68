"""Import a user's file or module, and explain errors in it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from ckplan import files
from ckplan.errors import WorkloadError
from ckplan.training.failures import wants_gpu
from ckplan.training.workload import CONTRACT

_PLAN = "a plan, not a Python file", "ckplan verify {0}, or ckplan show {0}"
_TRACE = (
    "a trace, not a Python file",
    "ckplan solve {0} --budget 80%, or ckplan fit {0}",
)
_OTHER_FILES = {".yaml": _PLAN, ".yml": _PLAN, ".json": _TRACE, ".gz": _TRACE}
_NOT_PYTHON = "not a Python file", "give the file a name that ends in .py"


def import_location(location: str) -> ModuleType:
    """Import a file by its path, or a module by its dotted name.

    Raises:
        WorkloadError: It does not exist, is not Python, or raises.
    """
    if location.endswith(".py") or "/" in location or Path(location).exists():
        return _import_file(Path(location))
    here = str(Path.cwd())
    if not {here, ""} & {*sys.path}:
        sys.path.insert(0, here)  # as ``python -m`` has it
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if not f"{location}.".startswith(f"{error.name}."):  # another module is missing
            raise workload_error(location, error) from error
        raise WorkloadError(
            f"cannot import the workload: {location} ({error})",
            needed="a path to a Python file, or package.module:factory",
            hint="ckplan profile path/to/model.py",
        ) from None
    except Exception as error:
        raise workload_error(location, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = files.nearest(path, "*.py")
        raise WorkloadError(
            f"cannot read the workload: {path} is "
            + ("a folder" if path.is_dir() else "not there"),
            needed="a Python file with a function build()",
            hint=f"did you mean '{near.name}'?"
            if near
            else f"a path from {Path.cwd()}",
        )
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"ckplan_workload_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        kind, hint = _OTHER_FILES.get(path.suffix, _NOT_PYTHON)
        raise WorkloadError(
            f"cannot read the workload: {path} is {kind}",
            needed="a Python file with a function build(), or hf:FOLDER",
            hint=hint.format(path),
        )
    _check_is_python(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if "no known parent package" in str(error) and not path.is_absolute():
            dotted = ".".join(path.with_suffix("").parts)
            raise WorkloadError(
                f"cannot import the workload: {path} is part of a package ({error})",
                needed="a file outside of any package, or package.module:factory",
                hint=f"ckplan profile {dotted}:build",
            ) from None
        raise workload_error(str(path), error) from error
    finally:
        with suppress(ValueError):  # the file may have changed the path
            sys.path.remove(folder)
    return module


def _check_is_python(path: Path) -> None:
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # or it has null bytes
        raise WorkloadError(
            f"cannot read the workload: {path} is not valid Python ({error})",
            needed="a Python file with a function build()",
            hint=f"python -m py_compile {path}",
        ) from None


def workload_error(name: str, error: BaseException) -> WorkloadError:
    """Convert an exception of the user's code to a ``WorkloadError``."""
    lines = str(error).strip().splitlines() or [""]
    needed, hint = f"a factory that returns {CONTRACT}", _where(error)
    if wants_gpu(error):
        needed = "a GPU; with --device cuda none, if only the factory asks for one"
    if "UninitializedParameter" in lines[0]:
        needed = "parameters with shapes: fake tensors cannot initialize lazy ones"
        hint = "nn.Linear(...) in place of nn.LazyLinear(...); verify without --fake"
    return WorkloadError(
        f"cannot build the workload: {name} raised {type(error).__name__}: {lines[0]}",
        needed=needed,
        hint=hint,
    )


def _where(error: BaseException) -> str:
    """A hint with the innermost line of the traceback in the user's file."""
    trace = error.__traceback__
    found = "run the factory alone in Python"
    while trace is not None:
        code = trace.tb_frame.f_code
        if "ckplan_workload_" in str(trace.tb_frame.f_globals.get("__name__")):
            found = f"look at {code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found
