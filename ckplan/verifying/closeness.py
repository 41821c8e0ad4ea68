"""How far results are from the plain ones, where a plan states close bits.

Differences are those of the first step, which starts from equal parameters: of the loss
and of every gradient, each relative to the largest value of its tensor. The unplanned
process leaves its results in a file, the planned one compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from ckplan.plan.tiles import CLOSE_BITS, RowTiles, Tiles

if TYPE_CHECKING:
    from ckplan.plan.plan import Plan

Tensors = Mapping[str, "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class Reference:
    """The file with the results of the unplanned step."""

    path: Path
    compares: bool  # with what is there, in place of writing it

    def meet(self, results: Tensors) -> dict[str, float]:
        """Write results, or return the difference of each from those in the file."""
        plain = {k: None if v is None else _plain(v) for k, v in results.items()}
        if not self.compares:
            torch.save(plain, self.path)
            return {}
        if not self.path.exists():  # the unplanned step does not fit in memory
            return {}
        others = torch.load(self.path, mmap=True)
        keys = {**others, **plain}
        return {k: difference(others.get(k), plain.get(k)) for k in keys}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().cpu()


def difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Largest difference of two tensors, relative to the largest value of the first.

    It is infinite for other shapes, dtypes, and numbers that are not finite.
    """
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return math.inf
    if torch.equal(one, other):
        return 0.0
    exact = one.double()
    far = float((exact - other.double()).abs().max() / exact.abs().max())
    return far if math.isfinite(far) else math.inf


@contextmanager
def file_for_results(plan: Plan | None) -> Iterator[Path | None]:
    """A file that is removed at the end; None for a plan without close bits."""
    if not any(close_tiles(plan)):
        yield None
        return
    with TemporaryDirectory(prefix="ckplan-") as folder:
        yield Path(folder) / "results.pt"


def close_tiles(plan: Plan | None) -> Iterator[tuple[str, Tiles | RowTiles]]:
    """Calls of which a plan states close bits, and their tiles."""
    for one in plan.regions if plan is not None else ():
        if one.tiles is not None and one.tiles.bits == CLOSE_BITS:
            yield one.calls, one.tiles


def stated_difference(plan: Plan | None) -> float | None:
    """The most that a plan with close bits allows; None if it states nothing."""
    found = [tiles.difference for _, tiles in close_tiles(plan)]
    return max(found) if found and all(found) else None


def is_within(found: Mapping[str, float], stated: float | None) -> bool:
    """Whether differences were measured, and are all at most the stated one."""
    return stated is not None and bool(found) and max(found.values()) <= stated


def bits_notes(
    plan: Plan | None, differ: bool | None, found: Mapping[str, float]
) -> Iterator[str]:
    """Notes on the bits that a plan states for its tiles, and whether they were so.

    Args:
        plan: The plan.
        differ: Whether any bit does; None if nothing was compared.
        found: Difference of each result of the first step.
    """
    for one in plan.regions if plan is not None else ():
        if one.tiles is None:
            continue
        states = f"{one.calls} runs in tiles, the plan states bits: {one.tiles.bits}"
        if differ is None:
            yield f"{states}; not compared"
        elif not differ:
            yield f"{states}; all results have the same"
        elif one.tiles.bits != CLOSE_BITS and any(close_tiles(plan)):
            yield f"{states}; what differs can come from calls with close bits"
        elif one.tiles.bits != CLOSE_BITS:
            yield f"{states}, but results differ: do not train with this plan"
        elif not found:
            yield f"{states}; results differ, how far is not known"
        else:
            stated = one.tiles.difference
            most = f"difference: {stated:.1e}" if stated else "no difference"
            far, where = max((far, name) for name, far in found.items())
            yield f"{states} with {most}; found up to {far:.1e}, in {where}"
