"""The answer of ``tune``, as records."""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.tuning.settings import Setting
from ckplan.units import format_bytes


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
    notes: tuple[str, ...] = ()
    tokens_per_sample: int | None = None


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
    """Whether a setting is faster than the one without its lever."""
    if one is None or without is None:
        return one is not None
    return one.seconds_per_sample < without.seconds_per_sample


def nothing_fits(graph: Graph, limit: MemoryLimit) -> InfeasibleError:
    """The error for a step of one row that no plan fits into a limit."""
    floor = Planner(graph).floor
    return InfeasibleError(
        f"no batch fits {format_bytes(limit.bytes)}: the floor of {graph.model} at one "
        f"sample is {format_bytes(floor.peak_bytes)}",
        needed=f"at least {floor.peak_bytes} bytes, most of them of kind "
        f"'{floor.owner}', in {floor.peak_at}",
        hint="a larger card, --allow bf16,adafactor, or a smaller model",
    )
