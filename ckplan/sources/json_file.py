"""Read a configuration that a library wrote as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckplan.errors import WorkloadError
from ckplan.sources.packages import first


def read_json(path: Path, *, written_by: str) -> Any:
    """Read a configuration.

    Args:
        path: The file, which is there.
        written_by: What writes such files.

    Raises:
        WorkloadError: It is not readable as JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(
            f"cannot read the configuration '{path}': {first(error)}",
            needed=f"a JSON file, as {written_by} writes it",
            hint=f"python -m json.tool {path}",
        ) from None
