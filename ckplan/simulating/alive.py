"""What is alive at one moment of a step: storages, what regions allocate, and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckplan import units
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.simulating.effect import ENCODED, NO_STORAGE
from ckplan.simulating.simulate import Timeline

_MOST_ALIVE = 24
_LAYER = re.compile(r"\.\d+(?=[./])")  # the number of a layer
_OF_STEP = ("parameter", "buffer", "gradient", "optimizer", "input")


class Held(NamedTuple):
    """Bytes that hold the content of a storage."""

    storage: int
    bytes: int
    form: str = ""  # REBUILT, ENCODED or COPIED; "" for the storage itself


def held_at(timeline: Timeline, moment: int) -> Iterator[Held]:
    """What is alive at a half moment; in a gap, when most bytes are alive there.

    Workspaces and random states are left out: they have no content of a storage.
    """
    storages, moved = timeline.graph.storages, timeline.changed_stops
    freed = {
        storage: storages[storage].bytes
        for storage in timeline.freed_ticks
        if moved[storage] == moment
    }
    gone: set[int] = set()
    for effect in timeline.effects:
        part = effect.gap_peak(moment, freed)[1]
        went = (storage for storage, _ in effect.freed_in_gap.get(moment, ())[:part])
        gone |= freed.keys() & went
        for one in effect.allocated_at(moment, part):
            if one.storage != NO_STORAGE and one.bytes:
                yield Held(one.storage, one.bytes, one.form)
    for storage in timeline.alive(moment):
        if storage not in gone:
            yield Held(storage, storages[storage].bytes)


@dataclass(frozen=True, slots=True)
class Maker:
    """What made some tensors, and what they are; "" for what is not known."""

    name: str  # "transformer.h.0.mlp.act/tanh", in other forms "..., rebuilt"
    kind: str
    shape: str = ""  # "8,256,3072"; "-" for a number
    dtype: str = ""
    line: str = ""  # of the model's source


_REST = Maker("workspaces, random states", "temporary")


@dataclass(frozen=True, slots=True)
class Alive:
    """Tensors alive at one moment that have the same maker."""

    maker: Maker
    count: int
    bytes: int

    def __str__(self) -> str:
        """Their number and size, type and shape, maker and line, where known."""
        each = units.format_bytes(self.bytes // self.count)
        count = f"{self.count} x " if self.count > 1 else ""
        maker = self.maker
        if not maker.dtype:
            return f"{units.format_bytes(self.bytes)} {maker.name}"
        line = f", {maker.line}" if maker.line else ""
        shape = maker.shape.strip("-")
        return f"{count}{each} {maker.dtype}[{shape}] by {maker.name}{line}"


def peak_tensors(timeline: Timeline, most: int = 5) -> tuple[Alive, ...]:
    """The tensors at the peak, those of equal layers together, the largest first."""
    if not timeline.graph.ops:
        return ()
    found: dict[Maker, Alive] = {}
    for row in _all_alive(timeline, timeline.peak_moment):
        maker = replace(row.maker, name=_LAYER.sub(".*", row.maker.name))
        before = found.get(maker, Alive(maker, 0, 0))
        found[maker] = Alive(maker, before.count + row.count, before.bytes + row.bytes)
    return tuple(sorted(found.values(), key=lambda row: -row.bytes)[:most])


def largest_alive(timeline: Timeline, moment: int) -> tuple[Alive, ...]:
    """The tensors alive at a half moment, the largest first."""
    return _all_alive(timeline, moment)[:_MOST_ALIVE]


def _all_alive(timeline: Timeline, moment: int) -> tuple[Alive, ...]:
    found: dict[Maker, list[int]] = {}
    for held in held_at(timeline, moment):
        found.setdefault(_maker(timeline.graph, held), []).append(held.bytes)
    rows = [Alive(maker, len(sizes), sum(sizes)) for maker, sizes in found.items()]
    rest = timeline.live_bytes[moment] - sum(row.bytes for row in rows)
    if rest > 0:
        rows.append(Alive(_REST, 1, rest))
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _maker(graph: Graph, held: Held) -> Maker:
    one = graph.storages[held.storage]
    if held.form:
        name = f"{_name(graph, held.storage)}, {held.form}"
        return _typed(graph, held, name, "activation")
    if one.kind in _OF_STEP or one.maker == BEFORE_STEP:
        return Maker(f"all of kind {one.kind}", one.kind)
    return _typed(graph, held, _name(graph, held.storage), one.kind)


def _typed(graph: Graph, held: Held, name: str, kind: str) -> Maker:
    tensor, line = graph.storages[held.storage].tensor, graph.line_of(held.storage)
    if tensor is None or held.form == ENCODED:  # of other bytes
        return Maker(name, kind, line=line)
    shape = ",".join(map(str, tensor.shape)) or "-"
    return Maker(name, kind, shape, tensor.dtype, line)


def _name(graph: Graph, storage: int) -> str:
    one = graph.storages[storage]
    if one.maker == BEFORE_STEP:
        return one.kind
    op = graph.ops[one.maker]
    call = "" if op.call == OUTSIDE_CALLS else graph.calls[op.call].fqn
    return f"{call or '.'}/{op.name}"
