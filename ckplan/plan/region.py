"""A region: a call, or a run of calls, whose activations are dropped after forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Call, SavingRegion
from ckplan.plan.tiles import RowTiles, Tiles

PROGRAM, RERUN, TILES = "program", "rerun", "tiles"
"""Rebuild single ops, or rerun the whole module; or run in tiles: a head and its loss,
without the logits, or an MLP, without its hidden values."""


@dataclass(frozen=True, slots=True)
class Region:
    """A call whose activations are dropped after forward, except saved outputs."""

    call: int  # index in Graph.calls
    by: str = PROGRAM  # or RERUN, which runs the whole module again
    save: frozenset[tuple[int, int]] = frozenset()  # (op, output) kept
    last: int | None = None  # last of a run of sibling calls that begins at `call`
    encode: frozenset[tuple[int, int]] = frozenset()  # (op, output) kept encoded
    # Regions inside; they save their outputs only while this one is rebuilt.
    inner: tuple[Region, ...] = ()
    tiles: Tiles | RowTiles | None = None  # of a region by TILES
    offload: frozenset[tuple[int, int]] = frozenset()  # (op, output) kept elsewhere

    @classmethod
    def of(cls, saving: SavingRegion) -> Region:
        """The region of a record of a trace."""
        return cls(saving.call, save=frozenset(saving.save), last=saving.last)

    @property
    def saving(self) -> SavingRegion:
        """The same as a record of a trace."""
        return SavingRegion(self.call, self.last, tuple(sorted(self.save)))

    @property
    def named(self) -> Iterator[tuple[int, int]]:
        """Every (op, output) that it, or a region inside, keeps in some form."""
        yield from (*self.save, *self.encode, *self.offload)
        for one in self.inner:
            yield from one.named

    def moved(self, calls: int, ops: int) -> Region:
        """The same region on a later call: shift all indices."""
        return Region(
            self.call + calls,
            self.by,
            frozenset([(op + ops, output) for op, output in self.save]),
            None if self.last is None else self.last + calls,
            frozenset([(op + ops, output) for op, output in self.encode]),
            tuple([inner.moved(calls, ops) for inner in self.inner]),
            self.tiles,
            frozenset([(op + ops, output) for op, output in self.offload]),
        )


def check_apart(graph: Graph, regions: Iterable[Region]) -> None:
    """Refuse regions that overlap.

    Raises:
        PlanError: Two of them overlap.
    """
    calls = graph.calls
    for first, second in pairwise(sorted(regions, key=lambda region: region.call)):
        last = first.call if first.last is None else first.last
        inside = graph.is_within(second.call, first.call)
        if inside or calls[second.call].start < calls[last].stop:
            raise overlap_error(calls[second.call], calls[first.call], "is inside")


def overlap_error(second: Call, first: Call, how: str) -> PlanError:
    """Return the error for two regions that share a call, or are nested wrongly."""
    return PlanError(
        f"regions overlap: {second} {how} {first}",
        needed="regions that do not overlap, or one as an inner region of the other",
        hint="remove one of the two",
    )
