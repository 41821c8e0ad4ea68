"""The moments of a step that a plot shows: a few, including every peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.simulating.alive import Held, held_at
from ckplan.simulating.allocations import Level
from ckplan.simulating.curve import PHASES, predicted_curve
from ckplan.simulating.effect import ENCODED
from ckplan.simulating.simulate import Timeline

_PER_PHASE = 90
_MOST_ALIVE = 24
_OF_STEP = ("parameter", "buffer", "gradient", "optimizer", "input")


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


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a step, as plots show it."""

    place: float  # 0 to 3: every phase is 1 wide
    seconds: float  # since the step began
    where: str
    by_kind: dict[str, int]
    alive: tuple[Alive, ...]  # the largest ones
    reserved_bytes: int | None  # by PyTorch's allocator, on a GPU

    @property
    def live_bytes(self) -> int:
        """Total live bytes."""
        return sum(self.by_kind.values())


def sample_moments(timeline: Timeline, per_phase: int = _PER_PHASE) -> list[int]:
    """Half moments in order: the one with most live bytes in each part of a phase."""
    found: dict[int, int] = {}
    live = timeline.live_bytes
    for moment, (place, _) in enumerate(predicted_curve(timeline).placed()):
        part = min(int(place * per_phase), per_phase * len(PHASES) - 1)
        if part not in found or live[moment] > live[found[part]]:
            found[part] = moment
    return sorted({*found.values(), timeline.peak_moment} if live else found.values())


def sample(timeline: Timeline, levels: Sequence[Level] = ()) -> list[Sample]:
    """The moments that a plot shows, with the tensors alive at each.

    Args:
        timeline: The step, planned or not.
        levels: Levels of PyTorch's allocator at each half moment, if known.
    """
    curve = predicted_curve(timeline)
    placed = curve.placed()
    return [
        Sample(
            placed[moment][0],
            curve.points[moment][0],
            timeline.graph.place(moment // 2),
            timeline.bytes_by_kind(moment),
            largest_alive(timeline, moment),
            levels[moment].reserved_bytes if levels else None,
        )
        for moment in sample_moments(timeline)
        if moment < len(placed)
    ]


def largest_alive(timeline: Timeline, moment: int) -> tuple[Alive, ...]:
    """The tensors alive at a half moment, the largest first."""
    found: dict[Maker, list[int]] = {}
    for held in held_at(timeline, moment):
        found.setdefault(_maker(timeline.graph, held), []).append(held.bytes)
    rows = [Alive(maker, len(sizes), sum(sizes)) for maker, sizes in found.items()]
    rest = timeline.live_bytes[moment] - sum(row.bytes for row in rows)
    if rest > 0:
        rows.append(Alive(_REST, 1, rest))
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:_MOST_ALIVE])


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
