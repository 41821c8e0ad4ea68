"""Measured costs, kept on disk between profiles.

There is one file per machine: a device, a version of torch and a number of threads.
The file has the bytes of each measured op and the seconds of its last few runs. The
median of these runs is the cost. Old runs expire, so a noisy run does not count for
ever, and those taken while other programs ran count for an hour. Each new measurement
adds a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from ckplan import files
from ckplan.errors import CkplanError
from ckplan.graph.records import Workspace

FORMAT_VERSION = 1
FOLDER_VARIABLE = "CKPLAN_CACHE"
MOST_RUNS = 5
LONGEST_SECONDS = 30 * 24 * 3600.0
BRIEF_SECONDS = 3600.0
_MOST_ENTRIES = 50_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes of one op."""

    seconds: float
    peak_bytes: int  # allocated at once, outputs included
    held_bytes: int  # still allocated when it has returned, outputs included
    measured: bool
    launch_seconds: float = 0.0  # CPU time to launch it on a GPU, not in seconds
    workspace: Workspace | None = None  # predicted workspace, None if it is not known


@dataclass(frozen=True, slots=True)
class _Entry:
    peak_bytes: int
    held_bytes: int
    runs: tuple[tuple[float, float], ...]  # (Unix time, seconds), oldest first

    def __post_init__(self) -> None:
        numbers = (self.peak_bytes, self.held_bytes, *(n for r in self.runs for n in r))
        if not self.runs or not all(number >= 0 for number in numbers):
            raise ValueError("a cost below zero, or of no run")

    @property
    def cost(self) -> Cost:
        seconds = median_low(seconds for _, seconds in self.runs)
        return Cost(seconds, self.peak_bytes, self.held_bytes, measured=True)

    def since(self, oldest: float) -> _Entry | None:
        runs = tuple(run for run in self.runs if run[0] >= oldest)
        if len(runs) == len(self.runs):
            return self
        return replace(self, runs=runs) if runs else None


@dataclass
class CostCache:
    """The costs of one machine; the file is read once and written with new costs."""

    path: Path | None  # None: no folder was found
    fresh: bool = False  # measure known ops again
    now: float = field(default_factory=time.time)
    notes: list[str] = field(default_factory=list)  # problems with the file
    _entries: dict[str, _Entry] | None = None

    def known(self, keys: Collection[str]) -> dict[str, Cost]:
        """The costs of ops that need no measurement."""
        if self.fresh:
            return {}
        entries = self._read()
        found = {key: entries.get(_digest(key)) for key in keys}
        return {key: entry.cost for key, entry in found.items() if entry is not None}

    def learn(
        self, costs: Mapping[str, Cost], *, busy: bool = False
    ) -> dict[str, Cost]:
        """Store measured costs; return them combined with earlier runs.

        Args:
            costs: By key.
            busy: Whether other programs ran meanwhile: the costs are kept briefly.
        """
        if not costs:
            return {}
        self._entries = None  # another process may have written to the file
        entries, found = self._read(), {}
        for key, cost in costs.items():
            run = (self._made(busy), cost.seconds)
            before = entries.pop(_digest(key), None)
            runs = (*(before.runs if before else ()), run)[-MOST_RUNS:]
            entry = _Entry(cost.peak_bytes, cost.held_bytes, runs)
            entries[_digest(key)], found[key] = entry, entry.cost
        for digest in [*entries][: max(0, len(entries) - _MOST_ENTRIES)]:
            del entries[digest]
        self._write(entries)
        return found

    def known_runs(self, key: str) -> tuple[float, ...]:
        """Seconds of the last few runs, oldest first; none if it must be measured."""
        entry = None if self.fresh else self._read().get(_digest(key))
        return tuple(seconds for _, seconds in entry.runs) if entry else ()

    def learn_runs(
        self, runs: Mapping[str, Sequence[float]], *, busy: bool = False
    ) -> None:
        """Store seconds of several runs each, in place of earlier ones.

        Args:
            runs: By key.
            busy: As of ``learn``.
        """
        self._entries = None  # another process may have written to the file
        entries = self._read()
        made = self._made(busy)
        for key, found in runs.items():
            kept = tuple((made, seconds) for seconds in found[-MOST_RUNS:])
            entries[_digest(key)] = _Entry(0, 0, kept)
        self._write(entries)

    def _made(self, busy: bool) -> float:
        """When a run was made; longer ago than it was, if it is to expire soon."""
        return self.now - (LONGEST_SECONDS - BRIEF_SECONDS if busy else 0.0)

    def _read(self) -> dict[str, _Entry]:
        if self._entries is None:
            self._entries = {}
            with suppress(FileNotFoundError):
                try:
                    if self.path is not None:
                        self._entries = _entries_of(self.path)
                except FileNotFoundError:
                    raise
                except (OSError, ValueError, TypeError, KeyError, AttributeError):
                    self._note(
                        f"the kept costs in {self.path} could not be read: made anew"
                    )
            oldest = self.now - LONGEST_SECONDS
            young = ((k, entry.since(oldest)) for k, entry in self._entries.items())
            self._entries = {key: entry for key, entry in young if entry is not None}
        return self._entries

    def _write(self, entries: Mapping[str, _Entry]) -> None:
        if self.path is None:
            self._note(
                "measured costs are not kept: no home folder was found; "
                f"{FOLDER_VARIABLE} may name one"
            )
            return
        rows = {k: [e.peak_bytes, e.held_bytes, e.runs] for k, e in entries.items()}
        content = {"ckplan_costs": FORMAT_VERSION, "costs": rows}
        text = json.dumps(content, separators=(",", ":"))
        try:
            files.write_text(self.path, text, force=True)
            _parsed[self.path] = _stamp(self.path), dict(entries)
        except CkplanError as error:
            self._note(f"measured costs are not kept: {error.what}")

    def _note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)


def cost_cache(device: torch.device, *, fresh: bool = False) -> CostCache:
    """The cost cache of a local device under this process's settings."""
    machine = json.dumps(machine_of(device), sort_keys=True)
    name = f"costs-{device.type}-{_digest(machine)[:16]}.json"
    folder = cache_folder()
    return CostCache(folder and folder / name, fresh)


def cache_folder() -> Path | None:
    """The cache folder; None if the home folder is not known."""
    named = os.environ.get(FOLDER_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "ckplan"
    except RuntimeError:  # pathlib finds no home folder
        return None


def machine_of(device: torch.device) -> dict[str, Any]:
    """Settings that seconds and workspaces depend on, besides the op."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": _processor()}
    found["matmul"] = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["tf32"] = torch.backends.cuda.matmul.allow_tf32
    else:
        found["threads"] = torch.get_num_threads()
        found["capability"] = torch.backends.cpu.get_cpu_capability()
        found["mkldnn"] = torch.backends.mkldnn.enabled
        if sums := os.environ.get("MKL_CBWR"):  # the order in which oneMKL sums
            found["sums"] = sums
    found["inputs"] = "cold"  # earlier versions measured warm inputs
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return found


def _processor() -> str:
    import platform

    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Entries of each file that was read, and the state of the file then.
_parsed: dict[Path, tuple[tuple[int, ...], dict[str, _Entry]]] = {}


def _entries_of(path: Path) -> dict[str, _Entry]:
    """The entries of a file, which is parsed once for each of its states."""
    stamp = _stamp(path)  # before it is read: a later state is read again
    before, entries = _parsed.get(path, ((), {}))
    if before != stamp:
        entries = _parse(path.read_bytes())
        _parsed[path] = stamp, entries
    return dict(entries)


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _parse(data: bytes) -> dict[str, _Entry]:
    content = json.loads(data)
    if content["ckplan_costs"] != FORMAT_VERSION:
        raise ValueError("another format")
    return {
        key: _Entry(peak, held, tuple((when, seconds) for when, seconds in runs))
        for key, (peak, held, runs) in content["costs"].items()
    }
