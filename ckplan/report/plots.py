"""Plots, with matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckplan import files
from ckplan.errors import CkplanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise early if a plot cannot be made.

    Raises:
        CkplanError: The format is not supported, or matplotlib is missing.
    """
    if path.suffix.lower() not in _FORMATS:
        raise CkplanError(
            f"cannot draw '{path}': its format is not known",
            needed=" or ".join(f"NAME{suffix}" for suffix in _FORMATS),
            hint=f"--plot {path.with_suffix(_FORMATS[0])}",
        )
    try:
        import matplotlib  # noqa: F401 - checks availability only
    except ImportError:
        raise CkplanError(
            "cannot draw: matplotlib is not installed",
            needed="the extra 'plot'",
            hint="pip install 'ckplan[plot]'",
        ) from None


def save_figure(path: Path, figure: Figure, *, force: bool) -> None:
    """Write a plot in the format of its file extension."""
    from io import BytesIO

    content = BytesIO()
    figure.savefig(content, format=path.suffix.lower().lstrip("."), dpi=150)
    files.write_bytes(path, content.getvalue(), force=force)
