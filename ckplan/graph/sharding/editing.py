"""Insert ops into a recorded step and shift every moment after them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ckplan.graph.graph import Graph
from ckplan.graph.records import NO_WORKSPACE, Call, Op, Saved, Storage, Workspace


@dataclass(slots=True, eq=False)
class Insert:
    """An op to insert before op ``before`` of a step."""

    before: int
    name: str
    call: int
    new_storages: list[NewStorage] = field(default_factory=list)
    workspace: Workspace = NO_WORKSPACE

    def make(self, num_bytes: int, kind: str = "temporary") -> NewStorage:
        """Add a storage that the op allocates; by default, it is freed after the op."""
        made = NewStorage(num_bytes, kind, self, self)
        self.new_storages.append(made)
        return made


@dataclass(slots=True, eq=False)
class NewStorage:
    """A storage that an inserted op allocates."""

    bytes: int
    kind: str
    maker: Insert
    last: Insert | int  # last holder: an inserted op, or an op of the step


LastHolders: TypeAlias = dict[int, Insert]
"""Storage of a step -> inserted op that is now its last holder."""


def insert(graph: Graph, inserts: Sequence[Insert], lasts: LastHolders) -> Graph:
    """Return the step with ops inserted.

    Args:
        graph: Any step.
        inserts: The ops; those with the same ``before`` run in this order.
        lasts: The storages of the step that they hold last.
    """
    return _Edit(graph, inserts).edited(lasts) if inserts else graph


class _Edit:
    def __init__(self, graph: Graph, inserts: Sequence[Insert]) -> None:
        self._graph = graph
        self._inserts = sorted(inserts, key=lambda one: one.before)
        self._positions = [one.before for one in self._inserts]
        ranked = enumerate(self._inserts)
        self._place = {id(one): one.before + rank for rank, one in ranked}

    def edited(self, lasts: LastHolders) -> Graph:
        graph, shifted = self._graph, self._shifted
        num_update = len(graph.ops) - graph.backward_stop
        num_forward = shifted(graph.num_forward - 1) + 1
        calls = tuple(self._call(call) for call in graph.calls)
        storages = [
            replace(s, maker=shifted(s.maker), last=shifted(s.last))
            for s in graph.storages
        ]
        for number, last in lasts.items():
            storages[number] = replace(storages[number], last=self._place[id(last)])
        ops = {shifted(number): op for number, op in enumerate(graph.ops)}
        for one in self._inserts:
            place, first = self._place[id(one)], len(storages)
            storages += (self._storage(made) for made in one.new_storages)
            ops[place] = _op(one, tuple(range(first, len(storages))))
        return replace(
            graph,
            ops=tuple(ops[number] for number in range(len(ops))),
            storages=tuple(storages),
            saved=tuple(self._saved(saved, calls) for saved in graph.saved),
            calls=calls,
            encodings=tuple(replace(e, op=shifted(e.op)) for e in graph.encodings),
            num_forward=num_forward,
            num_backward=len(ops) - num_forward - num_update,
            kept_backwards=tuple(
                (shifted(start), shifted(stop - 1) + 1)
                for start, stop in graph.kept_backwards
            ),
        )

    def _shifted(self, moment: int) -> int:
        """The new number of an op of the step; negative moments stay."""
        return moment if moment < 0 else moment + bisect_right(self._positions, moment)

    def _call(self, call: Call) -> Call:
        start, stop = self._shifted(call.start), self._shifted(call.stop - 1) + 1
        return replace(call, start=start, stop=stop)

    def _saved(self, saved: Saved, calls: Sequence[Call]) -> Saved:
        """Shift a saved tensor; it is saved after the ops inserted before its call."""
        packed_at = self._shifted(saved.packed_at - 1) + 1
        if saved.call >= 0:
            packed_at = max(packed_at, calls[saved.call].start)
        return replace(
            saved,
            packed_at=packed_at,
            unpacked_at=self._shifted(saved.unpacked_at),
            last_held=self._shifted(saved.last_held),
            last_used=self._shifted(saved.last_used),
            uses=tuple((self._shifted(a), self._shifted(b)) for a, b in saved.uses),
        )

    def _storage(self, made: NewStorage) -> Storage:
        maker = self._place[id(made.maker)]
        if isinstance(made.last, Insert):
            last = self._place[id(made.last)]
        else:
            last = self._shifted(made.last)
        return Storage(made.bytes, made.kind, maker, max(maker, last))


def _op(one: Insert, outputs: tuple[int, ...]) -> Op:
    return Op(
        name=one.name,
        call=one.call,
        reads=(),
        writes=(),
        outputs=outputs,
        workspace=one.workspace,
        flops=0,
        moved_bytes=sum(made.bytes for made in one.new_storages),
        seconds=0.0,
        random=False,
    )
