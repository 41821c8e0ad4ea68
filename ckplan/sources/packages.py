"""Import optional packages, and explain how to get those that are missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from ckplan.errors import WorkloadError


def require(package: str, what: str) -> ModuleType:
    """Import a package that ``what`` needs.

    Raises:
        WorkloadError: It is not installed, or fails on import.
    """
    if importlib.util.find_spec(package) is None:
        raise missing(package, what)
    try:
        return importlib.import_module(package)
    except Exception as error:
        raise WorkloadError(
            f"cannot use {what}: {package} fails on import "
            f"({type(error).__name__}: {first(error)})",
            needed=f"a build of {package} that fits this torch",
            hint=f"python -c 'import {package}'",
        ) from None


def missing(package: str, what: str) -> WorkloadError:
    """The error for a package that is not installed."""
    return WorkloadError(
        f"cannot use {what}: the package {package} is not installed",
        needed=package,
        hint=f"pip install {package}",
    )


def first(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]
