"""Joules of steps with a plan and without, read from the hardware's own counters.

Both sides run in turns, each in windows that are long against the counters' update
period. Zeus reads the counters: J.-W. Chung et al., "Zeus: Understanding and Optimizing
GPU Energy Consumption of DNN Training", NSDI 2023. Nothing is derived from a power
limit: without counters there are no joules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ckplan.errors import CkplanError
from ckplan.tracing.costs.spread import Quartiles, quartiles
from ckplan.verifying.compare_steps import StepPair
from ckplan.verifying.step_process import Steps

if TYPE_CHECKING:
    from ckplan.tracing.costs.calibrate import Progress

WINDOWS = 5
WINDOW_SECONDS = 5.0  # at least; counters are updated every 20 to 100 ms
_KEY, _WHAT = "ckplan", "measuring energy"


class Measured(Protocol):
    """What ends a window of Zeus: joules by device."""

    @property
    def gpu_energy(self) -> Mapping[int, float]:
        """Joules of every GPU by its index."""

    @property
    def cpu_energy(self) -> Mapping[int, float] | None:
        """Joules of every package of processors."""

    @property
    def dram_energy(self) -> Mapping[int, float] | None:
        """Joules of the memory beside every package."""


class Monitor(Protocol):
    """The part of ``zeus.monitor.ZeusMonitor`` that is used."""

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        """Read the counters, and remember them under a name."""

    def end_window(self, key: str, sync_execution: bool = True) -> Measured:
        """Read them again; returns what was used since."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of the device that steps run on."""

    name: str  # of what they count
    monitor: Monitor


@dataclass(frozen=True, slots=True)
class Window:
    """Steps of one side, one after the other."""

    steps: int
    seconds: float
    joules: float

    @property
    def joules_per_step(self) -> float:
        """Joules of a step of the optimizer."""
        return self.joules / self.steps


@dataclass(frozen=True, slots=True)
class Energy:
    """Measured joules of both sides; unplanned ones are None if it does not fit."""

    counters: str  # what was counted: all of it, idle power and other programs included
    windows: int  # of each side
    shortest_window_seconds: float
    planned_joules_per_step: Quartiles
    unplanned_joules_per_step: Quartiles | None = None
    added: Quartiles | None = None  # planned / unplanned - 1, of windows side by side
    samples_per_step: int | None = None


def energy_counters(device: str) -> Counters:
    """The counters of a device.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        CkplanError: Zeus is not installed, or the device has no counters.
    """
    try:
        from zeus.monitor import ZeusMonitor
    except ImportError:
        raise CkplanError(
            "cannot measure energy: the package zeus is not installed",
            needed="zeus, which reads the energy counters of GPUs and processors",
            hint="pip install 'ckplan[energy]'",
        ) from None
    kind, _, number = device.partition(":")
    index = int(number or 0)
    try:
        if kind == "cuda":
            return Counters(f"GPU {index}", ZeusMonitor([index], cpu_indices=[]))
        monitor = ZeusMonitor(gpu_indices=[])
    except Exception as error:  # of the driver, in whatever words
        raise _no_counters(device, str(error) or type(error).__name__) from None
    if not monitor.cpu_indices:
        raise _no_counters(device, "no package of processors has counters to read")
    return Counters("the processors and their memory", monitor)


def measure_energy(
    counters: Counters,
    pair: StepPair,
    samples_per_step: int | None,
    tell: Progress,
    clock: Callable[[], float] = time.perf_counter,
) -> Energy:
    """Measure both sides in turns.

    Args:
        counters: Of the device that the steps run on.
        pair: Both sides, after their first steps.
        samples_per_step: Rows of a step of the optimizer, if known.
        tell: Told which window is measured.
        clock: Seconds that pass.

    Raises:
        CkplanError: The counters stood still.
    """
    window = partial(_window, counters, clock=clock)
    unplanned, planned = pair.in_turns(window, WINDOWS, tell, _WHAT)
    if not planned:  # both do not fit in memory together; now the planned one is alone
        unplanned, planned = pair.in_turns(window, WINDOWS, tell, _WHAT)
    per_step = quartiles([one.joules_per_step for one in planned])
    assert per_step is not None, "internal error: no window was measured"
    added = [
        b.joules_per_step / a.joules_per_step - 1
        for a, b in zip(unplanned, planned, strict=False)
    ]
    return Energy(
        counters.name,
        len(planned),
        min(one.seconds for one in (*unplanned, *planned)),
        per_step,
        quartiles([one.joules_per_step for one in unplanned]),
        quartiles(added),
        samples_per_step or None,
    )


def _window(counters: Counters, steps: Steps, *, clock: Callable[[], float]) -> Window:
    """Take steps until a window is long enough; its joules."""
    begin, taken, seconds = clock(), 0, 0.0
    # Each step ends when the device is idle, and this process has no work on it.
    counters.monitor.begin_window(_KEY, sync_execution=False)
    try:
        while seconds < WINDOW_SECONDS:
            steps.step()
            taken += 1
            seconds = clock() - begin
    finally:
        found = counters.monitor.end_window(_KEY, sync_execution=False)
    parts = (found.gpu_energy, found.cpu_energy, found.dram_energy)
    joules = sum(sum(part.values()) for part in parts if part)
    if joules <= 0.0:
        raise CkplanError(
            f"cannot measure energy: the counters of {counters.name} stood still for "
            f"{seconds:.1f} s",
            needed="counters that move while steps run",
            hint="leave out --energy; `ckplan solve` prints the extra work of a plan",
        )
    return Window(taken, seconds, joules)


def _no_counters(device: str, why: str) -> CkplanError:
    return CkplanError(
        f"cannot measure energy on {device}: {why}",
        needed="a GPU whose driver counts energy (NVML), or processors with RAPL that "
        "may be read",
        hint="sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj, if it is there"
        if device == "cpu"
        else "nvidia-smi --query-gpu=power.draw --format=csv, which must print watts",
    )
