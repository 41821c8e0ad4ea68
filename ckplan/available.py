"""Memory of this machine that a process can still have, in a container, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MEMINFO, _OWN_GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Where control groups are, and what they say of memory."""

    root: Path
    limit: str
    used: str
    cached: tuple[str, ...]  # of ``memory.stat``: files, which make room if need be


_GROUPS = Path("/sys/fs/cgroup")
_VERSION_1 = _Files(
    _GROUPS / "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Files(
    _GROUPS, "memory.max", "memory.current", ("inactive_file", "active_file")
)


def available_bytes() -> int:
    """Bytes that a process can allocate without swapping others out.

    Of Linux, the least of what the machine and each control group of the process have
    left: containers and jobs of a cluster are such groups, and a process beyond their
    limits is killed. Elsewhere, it is the physical memory; 4 EiB if that is not known.
    """
    return min(_left_in_machine(), *_left_in_groups(), 1 << 62)


def _left_in_machine() -> int:
    with suppress(OSError, ValueError, KeyError):
        return _numbers(_MEMINFO)["MemAvailable:"] << 10
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62


def _left_in_groups() -> Iterator[int]:
    """Of the groups that the process is in, and of those around them."""
    with suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                files = _VERSION_2
            elif "memory" in controllers.split(","):
                files = _VERSION_1
            else:
                continue
            own = files.root / name.lstrip("/")
            for group in (own, *own.parents):
                if group.is_relative_to(files.root):
                    yield from _left_in(group, files)


def _left_in(group: Path, files: _Files) -> Iterator[int]:
    with suppress(OSError, ValueError):  # it is not there, or "max"
        limit = int((group / files.limit).read_text())
        used = int((group / files.used).read_text())
        known = _numbers(group / "memory.stat")
        cached = sum(known.get(name, 0) for name in files.cached)
        yield max(limit - used + cached, 0)


def _numbers(path: Path) -> dict[str, int]:
    """What a file of the kernel says, by name."""
    pairs = (line.split()[:2] for line in path.read_text().splitlines())
    return {name: int(number) for name, number in pairs}
