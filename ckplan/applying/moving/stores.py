"""Where tensors of a device move to: a file, the host, or a file behind the host."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from ckplan.applying.moving.file_behind_host import FileBehindHost
from ckplan.applying.moving.host_memory import HostMemory
from ckplan.applying.moving.spill_file import SpillFile
from ckplan.errors import ApplyError

HOST = "host"
"""In place of a folder: the host memory of a GPU."""

Store: TypeAlias = SpillFile | HostMemory | FileBehindHost


def new_store(place: Path | str, device_type: str, num_bytes: int) -> Store:
    """Create a file or pin memory for tensors.

    Args:
        place: A folder, or ``HOST``.
        device_type: Of the tensors, such as ``cuda``.
        num_bytes: Bytes of the tensors that will move, if known.

    Raises:
        ApplyError: The folder cannot be written, there is no GPU, or too little room.
    """
    if place == HOST:
        return HostMemory(num_bytes)
    if device_type == "cpu":
        return SpillFile(Path(place), num_bytes)
    if device_type == "cuda":
        return FileBehindHost(Path(place), num_bytes)
    raise elsewhere(device_type, place)


def elsewhere(device_type: str, place: Path | str | None) -> ApplyError:
    """What is said of a tensor that cannot move there."""
    where = "the host" if place == HOST else "a file"
    return ApplyError(
        f"cannot move a tensor of {device_type} to {where}",
        needed="a model on a GPU" if place == HOST else "a model on the CPU or a GPU",
        hint=f"ckplan.apply(model, plan, spill='/tmp'), or spill='{HOST}' on a GPU",
    )
