"""Most bytes of the passes over the tiles of a row-wise call, moment by moment.

A tile runs the ops of the call in the order of the trace, so what is alive in it is
known: see ``applying/tiling/row_passes.py``, and change both together. Scratch memory
of products is in proportion to what they read and make; that of heads is of one head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckplan.graph.attentions import SOFTMAX
from ckplan.graph.graph import Graph
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.row_ops import RowOps
from ckplan.simulating.row_parts import CONVOLUTION, CONVOLUTION_BACKWARD, PRODUCTS
from ckplan.simulating.tiling import kept_by_kernels


@dataclass(frozen=True)
class _Tile:
    """The largest tile of a pass."""

    graph: Graph
    found: RowOps
    cut: int  # rows or columns of it
    size: int  # of all
    whole: frozenset[int]  # storages that are not cut
    weight: int = 0  # bytes: of a convolution's weight that is cut, and so copied

    def part(self, num_bytes: int) -> int:
        """Bytes in the tile, of those of a tensor that is cut."""
        return -(-num_bytes * self.cut // self.size)

    @property
    def hidden(self) -> int:
        """Bytes of a hidden value."""
        return self.part(self.found.tensor_bytes)

    def scratch(self, numbers: Iterable[int], *, both: bool = False) -> int:
        """Most bytes of scratch memory of any op.

        Args:
            numbers: The ops.
            both: Whether backward of a convolution makes gradients of weights.
        """
        if self.found.spatial:
            return max((self._copies(n, both) for n in numbers), default=0)
        return max(map(self._scratch_of, numbers), default=0)

    def _scratch_of(self, number: int) -> int:
        op = self.graph.ops[number]
        drawn = self.found.drawn
        if drawn is not None and number == drawn.op:
            return drawn.unpacked_bytes(self.cut)
        if op.name in SOFTMAX:  # the safe one compares all scores
            return self.part(op.workspace.bytes)
        if op.name not in PRODUCTS or not op.workspace.bytes:
            return op.workspace.bytes
        sizes = {s: self.graph.storages[s].bytes for s in (*op.reads, *op.outputs)}
        here = sum(n if s in self.whole else self.part(n) for s, n in sizes.items())
        return -(-op.workspace.bytes * here // (sum(sizes.values()) or 1))

    def _copies(self, number: int, both: bool) -> int:
        """Copies that a convolution makes of its operands, in another layout.

        Kernels of oneDNN copy both operands to make the gradient of a weight, and the
        larger one to make that of the input.
        """
        op = self.graph.ops[number]
        bytes_ = op.workspace.bytes
        if not bytes_ or op.name not in (CONVOLUTION, CONVOLUTION_BACKWARD):
            return bytes_
        read = {s: self.graph.storages[s] for s in op.reads}
        sizes = {s: one.bytes for s, one in read.items() if s not in self.found.weights}
        here = [n if s in self.whole else self.part(n) for s, n in sizes.items()]
        rest = bytes_ - sum(sizes.values())
        if op.name == CONVOLUTION or rest < 0:
            whole = sum(one.bytes for s, one in read.items() if s in self.whole)
            return min(bytes_, self.part(bytes_) + whole)
        return rest + (sum(here) if both else max(here))

    def moments(
        self, steps: tuple[int, ...], until: Mapping[int, int]
    ) -> Iterator[int]:
        """Bytes at every step."""
        begin: dict[int, int] = {}
        for step, number in enumerate(steps):
            for storage in self.found.interior.intersection(
                self.graph.ops[number].outputs
            ):
                begin.setdefault(storage, step)
        for step, number in enumerate(steps):
            alive = sum(
                self.part(self.graph.storages[s].bytes)
                for s in begin
                if begin[s] <= step <= until[s]
            )
            weight = self.weight if number == self.found.inner_gradient else 0
            yield alive + self.scratch([number]) + weight

    def tracked(self) -> Iterator[int]:
        """Bytes at every op that autograd follows, and on the way back."""
        until, kept = _until(self.graph, self.found), self.kept
        yield from (kept + one for one in self.moments(_steps(self.found), until))

    @property
    def kept(self) -> int:
        """Bytes that kernels keep beyond their outputs."""
        numbers = kept_by_kernels(self.graph, self.found.forward)
        return sum(self.graph.storages[one].bytes for one in numbers)


def forward_bytes(graph: Graph, found: RowOps, tiles: RowTiles) -> int:
    """Most bytes of the forward pass, without the output."""
    tile = _of_rows(graph, found, tiles)
    until = _last_reads(graph, found, found.forward)
    moments = [*tile.moments(found.forward[:-1], until)]
    copied = graph.ops[found.product].outputs[0] if found.spatial else None
    made = 0 if copied is None else tile.part(graph.storages[copied].bytes)
    return max([*moments, tile.hidden + made + tile.scratch([found.product])])


def rows_bytes(graph: Graph, found: RowOps, tiles: RowTiles) -> int:
    """Most bytes of the pass that makes the input's gradient, without that one."""
    tile = _of_rows(graph, found, tiles)
    more = tile.part(found.gradient_bytes)
    scratch = tile.scratch(found.hidden_gradients)
    number = len(found.leaf_gradients)  # the last one first
    ends = [
        n * tile.hidden + (n < number or bool(found.spatial)) * more + scratch
        for n in range(1, number + 1)
    ]
    if found.heads is not None:  # the gradient of values is made first
        ends.append(_held_by_scores(tile) + scratch)
    return max([*tile.tracked(), *ends])


def _held_by_scores(tile: _Tile) -> int:
    """Bytes of a tile when its probabilities are made, as autograd follows."""
    graph, found = tile.graph, tile.found
    until, end = _until(graph, found), len(found.forward) - 2
    made = {s for n in found.forward[:-1] for s in graph.ops[n].outputs}
    made &= found.interior
    last = {*graph.ops[found.product].reads}
    kept = (s for s in made if until[s] > end or s in last)
    return tile.kept + sum(tile.part(graph.storages[s].bytes) for s in kept)


def columns_bytes(graph: Graph, found: RowOps, tiles: RowTiles) -> int:
    """Most bytes of the pass over columns, without the gradients that it makes."""
    cuts = tiles.of_columns(found.width)
    whole = found.copies | {found.hidden, found.given}
    tile = _Tile(graph, found, _longest(cuts), found.width, whole)
    if found.spatial and len(cuts) > 1:
        read = (graph.storages[s].bytes for s in graph.ops[found.product].reads[1:])
        tile = replace(tile, weight=tile.part(max(read)))
    scratch = tile.scratch(found.weight_gradients, both=True) + tile.weight
    steps = found.forward[:-1]
    until = _until(graph, found)
    last = {*graph.ops[found.product].reads}
    held = sum(
        graph.storages[s].maker in steps and (until[s] >= len(steps) or s in last)
        for s in until
    )
    ends = [n * tile.hidden + scratch for n in (held, len(found.leaf_gradients))]
    return max([*tile.tracked(), *ends])


def _of_rows(graph: Graph, found: RowOps, tiles: RowTiles) -> _Tile:
    cut = _longest(found.cut_rows(tiles))
    return _Tile(graph, found, cut, found.rows, found.weights)


def _longest(cuts: list[slice]) -> int:
    lengths: list[int] = [one.stop - one.start for one in cuts]
    return max(lengths)


def _steps(found: RowOps) -> tuple[int, ...]:
    return (*found.forward[:-1], found.inner_gradient, *found.elementwise)


def _until(graph: Graph, found: RowOps) -> dict[int, int]:
    """Storage -> the last step of a tile at which it is alive, as autograd follows."""
    steps = _steps(found)
    end = len(steps) - 1
    until = _last_reads(graph, found, steps)
    for number in found.elementwise:
        for storage in graph.ops[number].outputs:
            last = graph.storages[storage].last
            until[storage] = max(until[storage], _step_before(found, last, steps))
    for number in found.first:  # leaves
        until[graph.ops[number].outputs[0]] = end
    for storage in (*found.leaf_gradients, found.inner):
        until[storage] = end
    for one in graph.saved:
        if one.storage in found.interior:
            last = _freed_at(found, one.unpacked_at, one.last_held, steps)
            until[one.storage] = max(until[one.storage], last)
    return until


def _freed_at(
    found: RowOps, unpacked_at: int, last_held: int, steps: tuple[int, ...]
) -> int:
    """The step at which autograd frees a saved value, -1 if a tile does not save it."""
    if unpacked_at == -1:
        return len(steps) - 1
    if unpacked_at not in found.elementwise:
        return -1  # of a product
    return _step_before(found, last_held, steps)


def _step_before(found: RowOps, moment: int, steps: tuple[int, ...]) -> int:
    """The last step of a tile that has run when an op of backward has."""
    begin = len(steps) - len(found.elementwise)
    return begin - 1 + sum(number <= moment for number in found.elementwise)


def _last_reads(graph: Graph, found: RowOps, steps: tuple[int, ...]) -> dict[int, int]:
    """Storage -> the last step that makes, changes or reads it."""
    until: dict[int, int] = {}
    for step, number in enumerate(steps):
        op = graph.ops[number]
        for storage in {*op.reads, *op.outputs} & found.interior:
            until[storage] = step
    return until
