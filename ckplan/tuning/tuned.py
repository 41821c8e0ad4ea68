"""The answer of ``tune``, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckplan.errors import CkplanError, InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.simulating.alive import Alive
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.tuning.settings import Setting
from ckplan.units import format_bytes

_WORTH = 0.01  # of the most bytes that a lever saves
_LEAST_GAIN = 1.001  # seconds without a lever over those with it: less is noise


@dataclass(frozen=True, slots=True)
class LeverRow:
    """What one lever does to this model, alone and on top of the best setting."""

    name: str
    bits: str
    saved_bytes: int | None  # of the unplanned peak, at the batch of the base
    seconds_per_sample: float | None  # of its best setting; None if nothing fits
    pays: bool  # fewer seconds per sample than without it
    crossover: int | None  # smallest batch from which on it pays; None: at none
    on_best_seconds_per_sample: float | None  # the best setting with it, or without it
    in_best: bool
    refused: str | None = None  # why it cannot be pulled


@dataclass(frozen=True, slots=True)
class Alternative:
    """A setting that is not the best, and what it gives up."""

    setting: Setting
    gives_up: str


@dataclass(frozen=True)
class Tuned:
    """The answer of ``tune``."""

    best: Setting
    graph: Graph  # recorded at the best batch
    limit: MemoryLimit
    base: Setting | None  # the best without any lever
    next: tuple[Alternative, ...]
    levers: tuple[LeverRow, ...]
    largest_unplanned: int
    largest_planned: int
    curve: tuple[tuple[int, Setting | None, Setting | None], ...]
    peak_at: str
    peak_owner: str  # kind of tensor
    at_peak: tuple[Alive, ...] = ()  # the largest tensors then
    notes: tuple[str, ...] = ()
    tokens_per_sample: int | None = None
    batch_dims: Mapping[str, int] = field(default_factory=dict)  # tensor -> its rows

    @property
    def movers(self) -> tuple[LeverRow, ...]:
        """The levers that save bytes worth naming, the one that saves most first."""
        saved = {one.name: one.saved_bytes or 0 for one in self.levers}
        worth = max(_WORTH * max(saved.values(), default=0), 1)
        saving = (one for one in self.levers if saved[one.name] >= worth)
        return tuple(sorted(saving, key=lambda one: -saved[one.name]))


def gives_up(one: Setting, best: Setting) -> str:
    """What a setting gives up against the best one, in words."""
    slower = 1 - one.samples_per_second / best.samples_per_second
    parts = [f"{100 * slower:.1f} % of the samples per second"]
    more = one.peak_bytes - best.peak_bytes
    if more:
        word = "more" if more > 0 else "less"
        parts.append(f"needs {format_bytes(abs(more))} {word}")
    return "; ".join(parts)


def pays_over(one: Setting | None, without: Setting | None) -> bool:
    """Whether a setting is faster than the one without its lever, by 0.1 % or more."""
    if one is None or without is None:
        return one is not None
    return _LEAST_GAIN * one.seconds_per_sample < without.seconds_per_sample


def nothing_fits(graph: Graph, limit: MemoryLimit) -> InfeasibleError:
    """The error for a step of one row that no plan fits into a limit."""
    planner, size = Planner(graph), format_bytes(limit.bytes)
    least_bytes = planner.least.peak_bytes
    what = f"no batch fits {size}: the floor of {graph.model} at one sample is "
    if least_bytes <= limit.bytes:
        reserved = limit.reserved_bytes(planner.least) or least_bytes
        return InfeasibleError(
            f"{what}{format_bytes(least_bytes)}, and gaps of the allocator come on top",
            needed=f"at least {format_bytes(reserved)} ({reserved} B) reserved",
            hint="--expandable-segments leaves fewer gaps; or a larger card"
            if not limit.expandable
            else "a larger card",
        )
    hints = planner.remedies_within(limit.bytes) or "a smaller model"
    return InfeasibleError(
        f"{what}{format_bytes(least_bytes)}",
        needed=planner.needed(),
        hint=f"{hints}; or a larger card",
    )


def all_refused(
    graph: Graph, refused: Mapping[int, str], total: int | None
) -> CkplanError:
    """The error for a model that refuses every batch that is chosen.

    Args:
        graph: A step that was recorded.
        refused: Batch -> why.
        total: Rows per step of the optimizer, if they are given.
    """
    listed = "; ".join(f"{n} ({why})" for n, why in sorted(refused.items()))
    if total is None:
        return CkplanError(
            f"cannot tune {graph.model}: it refuses every batch that fits: {listed}",
            needed="memory for a batch that the model accepts",
            hint="a larger card or budget, or a model that runs at smaller batches",
        )
    return CkplanError(
        f"no micro-batch that fits divides the total batch {total}: the model refuses "
        f"{listed}",
        needed="a total batch with more divisors",
        hint=f"--total-batch {2 ** total.bit_length()}",
    )
