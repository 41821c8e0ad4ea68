"""Slow and simple reference simulators, independent of the package's code.

``walk`` simulates a step event by event. Every block of bytes has a set of holders and
is freed when the set is empty. ``walk_plan`` simulates the regions of a plan.
``every_plan.py`` enumerates and walks all plans.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as concatenate

from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Op
from ckplan.plan.region import PROGRAM, RERUN, Region

Span = tuple[int, int]  # first and last of a run of sibling calls; twice the same: one
Kept = frozenset[tuple[int, int]]  # (op, output)
Content = tuple[int, int]  # (storage, times written since the region began)
Nest = Mapping[Span, "tuple[Kept, Nest]"]  # regions inside: what they keep, and theirs


STATE_BYTES = 5056
"""Bytes of the state of torch's random generator on CPU."""


class CannotRebuildError(Exception):
    """Inputs that a region needs to recompute are overwritten."""


@dataclass
class Walk:
    """Results of a walk."""

    live_bytes: list[int] = field(default_factory=list)  # in gaps and ops, alternating
    again: dict[Span, list[int]] = field(default_factory=dict)  # recomputed ops
    dropped: set[int] = field(default_factory=set)  # saved tensors
    seconds: float = 0.0  # of the recomputed ops

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)


def walk(  # noqa: C901 - one loop over moments, told in order
    graph: Graph,
    programs: Mapping[Span, Kept] | None = None,
    reruns: Iterable[Span] = (),
    *,
    encoded: Mapping[Span, Kept] | None = None,
    inner: Mapping[Span, Nest] | None = None,
    memory: Memory | None = None,
) -> Walk:
    """Walk forward and backward with regions of programs and regions that rerun.

    Args:
        graph: The step.
        programs: Regions that recompute op by op, and the outputs that they keep.
        reruns: Regions that rerun as a whole.
        encoded: Outputs that regions of programs keep in encoded form.
        inner: Regions inside regions of programs.
        memory: Memory model that observes blocks.

    Raises:
        CannotRebuildError: A region lost inputs that it needs.
    """
    memory = Memory() if memory is None else memory
    seen = Walk()
    regions: list[_Program | _Rerun] = [
        *(
            _Program(
                graph,
                memory,
                span,
                kept,
                (encoded or {}).get(span, frozenset()),
                (inner or {}).get(span, {}),
            )
            for span, kept in (programs or {}).items()
        ),
        *(_Rerun(graph, memory, span) for span in reruns),
    ]
    seen.dropped = dropped = {j for region in regions for j in region.dropped}
    made_by = _grouped(storage.maker for storage in graph.storages)
    gone_after = _grouped(storage.last for storage in graph.storages)
    saved_at = _grouped(saved.packed_at for saved in graph.saved)
    done_after = _grouped(saved.last_held for saved in graph.saved)

    def make(maker: int) -> None:
        for s in made_by[maker]:
            memory.make(s, graph.storages[s].bytes, "step")

    def enter(at: int) -> None:
        """Acquire all holds that start after ``at`` ops."""
        for j in saved_at[at]:
            if j not in dropped:
                memory.hold(graph.saved[j].storage, ("saved", j))
        for region in regions:
            region.hold(at)

    def leave(done: int) -> None:
        """Release all holds that end with op ``done``."""
        for s in gone_after[done]:
            memory.let_go(s, "step")
        for j in done_after[done]:
            memory.let_go_all(("saved", j))
        for region in regions:
            region.let_go(done)

    make(-1)
    enter(0)
    for now, op in enumerate(graph.ops):
        memory.begin(2 * now)
        most = memory.bytes
        for region in regions:
            most = max(most, region.rebuild(now))
        seen.live_bytes.append(most)
        memory.begin(2 * now + 1)
        make(now)
        workspace = max(op.workspace.bytes, *(r.encode(now) for r in regions), 0)
        seen.live_bytes.append(memory.bytes + workspace)
        enter(now + 1)
        leave(now)
    memory.begin(2 * len(graph.ops))
    seen.live_bytes.append(memory.bytes)
    seen.again = {region.span: region.again for region in regions}
    ran = concatenate.from_iterable(seen.again.values())
    seen.seconds = graph.engine.again * sum(graph.ops[op].seconds for op in ran)
    seen.seconds += sum(region.coding_seconds for region in regions)
    if not any(op.launch_seconds for op in graph.ops):  # else the CPU is no device
        for region in regions:
            seen.seconds += graph.engine.watch_seconds * len(region.saves)
            seen.seconds += graph.engine.rerun_seconds * len(region.again)
            seen.seconds += graph.engine.region_seconds
            if not isinstance(region, _Program):
                more = graph.engine.module_seconds * len(region.again)
                seen.seconds += more * _compared(graph, region)
    return seen


def walk_plan(graph: Graph, regions: Sequence[Region]) -> Walk:
    """Walk a step under a plan."""
    programs = {span_of(region): region for region in regions if region.by == PROGRAM}
    return walk(
        graph,
        {span: region.save for span, region in programs.items()},
        [span_of(region) for region in regions if region.by == RERUN],
        encoded={span: region.encode for span, region in programs.items()},
        inner={span: _nest(region.inner) for span, region in programs.items()},
    )


def span_of(region: Region) -> Span:
    """First and last call of a region."""
    return region.call, region.call if region.last is None else region.last


def _nest(inner: Iterable[Region]) -> Nest:
    return {span_of(one): (one.save, _nest(one.inner)) for one in inner}


def _compared(graph: Graph, region: _Region) -> float:
    """Half of the functions of torch for each op, of which most come with two."""
    inside = members(graph, region.span)
    counts = [graph.calls[number].functions for number in inside]
    if None in counts or not any(counts):
        return 1.0
    return min(1.0, sum(filter(None, counts)) / 2 / len(region.ops()))


def _grouped(keys: Iterable[int]) -> defaultdict[int, list[int]]:
    """Places by what stands there."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return found


class Memory:
    """Blocks, each alive while it has a holder."""

    def __init__(self) -> None:
        self.bytes = 0
        self._size: dict[Hashable, int] = {}
        self._holders: dict[Hashable, set[Hashable]] = {}
        self._held_by: defaultdict[Hashable, dict[Hashable, None]] = defaultdict(dict)

    def begin(self, moment: int) -> None:
        """Start a half moment; blocks released before it are freed."""

    def make(self, block: Hashable, num_bytes: int, holder: Hashable) -> None:
        assert block not in self._holders, f"{block} is made twice"
        self._size[block], self._holders[block] = num_bytes, {holder}
        self._held_by[holder][block] = None
        self.bytes += num_bytes

    def make_state(self, block: Hashable, graph: Graph) -> None:
        on_cpu = graph.fingerprint["device"] == "cpu"
        self.make(block, STATE_BYTES if on_cpu else 0, "random")

    def hold(self, block: Hashable, holder: Hashable) -> None:
        self._holders[block].add(holder)  # a KeyError: it is gone already
        self._held_by[holder][block] = None

    def let_go(self, block: Hashable, holder: Hashable) -> None:
        self._held_by[holder].pop(block, None)
        holders = self._holders.get(block, set())
        holders.discard(holder)
        if not holders and block in self._holders:
            del self._holders[block]
            self.bytes -= self._size.pop(block)

    def is_there(self, block: Hashable) -> bool:
        return block in self._holders

    def let_go_all(self, holder: Hashable) -> None:
        for block in list(self._held_by[holder]):
            self.let_go(block, holder)

    def held_by_others(self, block: Hashable, holder: Hashable) -> bool:
        return bool(self._holders[block] - {holder})


# -- regions ---------------------------------------------------------------------------


def members(graph: Graph, span: Span) -> set[int]:
    """The calls of a run of siblings, and all calls inside them."""
    parent = graph.calls[span[0]].parent
    found = {
        call
        for call in range(span[0], span[1] + 1)
        if graph.calls[call].parent == parent
    }
    for call, record in enumerate(graph.calls):  # parents come first
        if record.parent in found:
            found.add(call)
    return found


def saves_of(graph: Graph, span: Span) -> list[int]:
    """The saved tensors of a region, with those of parent ops inside a run."""
    first, last = (graph.calls[call] for call in span)
    inside = members(graph, span)
    return [
        j
        for j, saved in enumerate(graph.saved)
        if saved.call in inside
        or (
            span[0] != span[1]
            and saved.call == first.parent
            and first.stop <= saved.packed_at <= last.start
        )
    ]


class _Region:
    def __init__(self, graph: Graph, memory: Memory, span: Span) -> None:
        self.graph, self.memory, self.span = graph, memory, span
        self.start = graph.calls[span[0]].start
        self.stop = graph.calls[span[1]].stop
        self.saves = saves_of(graph, span)
        self.again: list[int] = []
        self.coding_seconds = 0.0

    def encode(self, now: int) -> int:
        """Make the smaller forms of what op ``now`` made; returns the workspace."""
        del now
        return 0

    def ops(self) -> range:
        return range(self.start, self.stop)

    def is_inside(self, storage: int) -> bool:
        return self.graph.storages[storage].maker in self.ops()

    def inputs(self, op: int) -> set[int]:
        return {*self.graph.ops[op].reads, *self.graph.ops[op].writes}

    def is_written(self, storage: int, start: int, stop: int) -> bool:
        return any(storage in self.graph.ops[op].writes for op in range(start, stop))

    def size(self, storage: int) -> int:
        return self.graph.storages[storage].bytes

    def first_and_last(self, saves: Iterable[int]) -> tuple[int, int, int]:
        """First and last op that needs one of the saves, and last op that holds one."""
        saved = [self.graph.saved[j] for j in saves]
        wanted = [s.unpacked_at for s in saved if s.unpacked_at >= 0]
        done = max((s.last_held for s in saved), default=-1)
        return min(wanted, default=-1), max(wanted, default=-1), done


class _Program(_Region):
    """Recomputes needed tensors on demand, each op once."""

    outer: _Program | None = None

    def __init__(
        self,
        graph: Graph,
        memory: Memory,
        span: Span,
        kept: Kept,
        encoded: Kept,
        inner: Nest,
        *,
        strict: bool = True,
    ) -> None:
        super().__init__(graph, memory, span)
        self._forms = {(e.op, e.output): e for e in graph.encodings}
        self._encodings: dict[Content, Encoding] = {}
        written: Counter[int] = Counter()
        self._made_by: dict[Content, int] = {}
        self._reads: dict[int, set[Content]] = {}
        self._makes: dict[int, set[Content]] = {}
        self._keeps: dict[int, list[Content]] = {}
        self.outputs: dict[int, list[Content]] = {}
        self._content: dict[int, Content] = {}  # saved tensor -> what it shows
        self._running: dict[Content, int] = {}  # statistics -> first norm that needs it
        for now in (*self.ops(), self.stop):
            for j in self.saves:
                if graph.saved[j].packed_at == now:
                    storage = graph.saved[j].storage
                    self._content[j] = (storage, written[storage])
            if now == self.stop:
                break
            op = graph.ops[now]
            self._reads[now] = {(s, written[s]) for s in self.inputs(now)}
            self._note_running(now, [(s, written[s]) for s in op.reads[-2:]])
            written.update(set(op.writes))
            made = {s for s in op.outputs if graph.storages[s].maker == now}
            self._makes[now] = {(s, written[s]) for s in made | set(op.writes)}
            self._made_by.update(dict.fromkeys(self._makes[now], now))
            outputs = self.outputs[now] = [(s, written[s]) for s in op.outputs]
            self._keeps[now] = [outputs[m] for at, m in sorted(kept) if at == now]
            for at, m in encoded:
                if at == now:
                    self._encodings[outputs[m]] = self._forms[at, m]
        self._final = written
        keeps = concatenate.from_iterable(self._keeps.values())
        self._kept = {(s, n) for s, n in keeps if written[s] == n}
        self.dropped = {
            j
            for j, (s, n) in self._content.items()
            if self.is_inside(s) and (s, n) not in self._kept
        }
        self._level: dict[int, _Program] = {}  # saved tensor -> who rebuilds it
        self._inner = [_Inner(self, *one) for one in inner.items()]
        self._present: dict[Content, Hashable] = {}  # content -> block
        self._num_blocks = 0
        self._find_uses(sorted(self.dropped), set(self._kept), self._level)
        self._runs = self._all_needed()
        _, last, self._done = self.first_and_last(self.dropped)
        for storage, number in self._held if strict else ():
            if self._final[storage] != number:
                raise CannotRebuildError(f"storage {storage}, in the region")
            if self.is_written(storage, self.stop, last):
                raise CannotRebuildError(f"storage {storage}, after the region")

    def _find_uses(
        self, saves: list[int], there: set[Content], level: dict[int, _Program]
    ) -> None:
        """Who rebuilds which of the saves; ``there`` is what this one need not."""
        level.update(dict.fromkeys(saves, self))
        below: list[Content] = []
        for one in self._inner:
            lost = [
                j
                for j in saves
                if j in one.saves
                and self._made_by.get(self._content[j]) in one.ops()
                and self._content[j] not in one._kept
                and self._content[j] not in self._encodings
            ]
            one._find_uses(lost, there | one._kept | {*self._encodings}, level)
            below += sorted(one._held)
            saves = [j for j in saves if j not in lost]
        wanted = [self._content[j] for j in saves] + below
        self._uses = Counter(wanted)
        self._held: set[Content] = set()
        self._decodes: set[Content] = set()
        needed = self._needed = set[int]()

        def need(content: Content) -> None:
            maker = self._made_by.get(content)
            if maker not in self.ops() or content in there:
                self._held.add(content)
            elif content in self._encodings:
                self._decodes.add(content)
            elif maker not in needed:
                needed.add(maker)
                for read in self._reads[maker]:
                    self._uses[read] += 1
                    need(read)

        for content in wanted:
            need(content)

    def _note_running(self, now: int, read: list[Content]) -> None:
        op = self.graph.ops[now]
        if op.name == "native_batch_norm" and self.size(op.outputs[1]) == 0:
            for content in read:
                if content not in self._made_by:
                    self._running.setdefault(content, now)

    def encode(self, now: int) -> int:
        workspace = 0
        for content, form in self._encodings.items():
            if form.op == now:
                self.memory.make(("coded", self.span, content), form.bytes, "coded")
                self.coding_seconds += form.encode_seconds
                workspace = max(workspace, form.encode_workspace_bytes)
        if self._runs[now] and self.graph.ops[now].random:
            self.memory.make_state(("drawn", self.span, now), self.graph)
        for content, norm in self._running.items():
            if norm == now and content in self._held:
                copy = "copied", self.span, content
                self.memory.make(copy, self.size(content[0]), "copied")
        return workspace

    def hold(self, at: int) -> None:
        """Watch forward; hold all inputs and what is kept until it is over."""
        if at - 1 in self.ops():
            op = at - 1
            mine = {s for s in self.inputs(op) if not self.is_inside(s)}
            mine |= {s for s, n in self._keeps[op] if (s, n) in self._held}
            for storage in mine:
                if self.graph.storages[storage].maker >= 0:
                    self.memory.hold(storage, ("watch", self.span))
        if at == self.stop:
            for content in self._held:
                self._present[content] = content[0]
                self.memory.hold(content[0], self._holder(content))

    def let_go(self, done: int) -> None:
        if done == self.stop - 1:
            self.memory.let_go_all(("watch", self.span))
            for content in self._encodings.keys() - self._decodes:
                self._drop_code(content)
        if done == self._done:
            self._end()
            for content in self._decodes:
                self._drop_code(content)
            for op in self._runs:
                self.memory.let_go(("drawn", self.span, op), "random")

    def _end(self) -> None:
        for one in self._inner:
            one._end()
        for content in list(self._present):
            _Program._release(self, content)

    def _drop_code(self, content: Content) -> None:
        self.memory.let_go(("coded", self.span, content), "coded")

    def rebuild(self, now: int) -> int:
        """Recompute tensors that op ``now`` needs; returns the peak bytes meanwhile."""
        most = 0
        for j in sorted(self.dropped):
            if self.graph.saved[j].unpacked_at == now:
                level, content = self._level[j], self._content[j]
                most = max(most, level._provide(content))
                self.memory.let_go(("as found", self.span), "random")
                self.memory.hold(level._present[content], ("saved", j))
                level._use(content)
        return most

    def _provide(self, content: Content) -> int:
        """Recompute a content; returns the peak bytes meanwhile."""
        most = 0
        codes, ops, asked = self._missing(content)
        for other in asked:
            assert self.outer
            most = max(most, self.outer._provide(other))
            self._present[other] = self.outer._present[other]
            self.memory.hold(self._present[other], self._holder(other))
        for op in self.ops():
            for code in (c for c in codes if self._made_by[c] == op):
                most = max(most, self._decode(code))
            if op in ops:
                most = max(most, self._run(op))
        return most

    def _decode(self, content: Content) -> int:
        block = self._new_block(content[0])
        self._present[content] = block
        self.memory.hold(block, self._holder(content))
        most = self.memory.bytes + self._encodings[content].decode_workspace_bytes
        self.memory.let_go_all("running")
        self._drop_code(content)
        self.coding_seconds += self._encodings[content].decode_seconds
        return most

    def _missing(
        self, content: Content
    ) -> tuple[set[Content], set[int], list[Content]]:
        """What to decode, to run and to ask of the outer region, for a content."""
        codes: set[Content] = set()
        ops: set[int] = set()
        asked: set[Content] = set()

        def need(content: Content) -> None:
            if content in self._present:
                return
            if content in self._held:
                asked.add(content)
                return
            if content in self._decodes:
                codes.add(content)
                return
            if self._made_by[content] in ops:
                return
            ops.add(self._made_by[content])
            for read in self._reads[self._made_by[content]]:
                need(read)

        need(content)
        return codes, ops, sorted(asked, key=lambda c: (self._made_by.get(c, -1), c))

    def _run(self, op: int) -> int:
        memory, record = self.memory, self.graph.ops[op]
        drawn_bytes = self._ran(op)
        made: dict[Content, Hashable] = {}
        for storage in set(record.writes):
            (old,) = (c for c in self._reads[op] if c[0] == storage)
            new = (storage, old[1] + 1)
            block = self._present[old]
            shared = memory.held_by_others(block, self._holder(old))
            if old in self._held or shared or self._uses[old] > 1:
                made[new] = self._new_block(storage)
            else:  # in place
                made[new] = block
                memory.hold(block, "running")
        for content in self._makes[op] - made.keys():
            made[content] = self._new_block(content[0])
        most = max(drawn_bytes, memory.bytes + record.workspace.bytes)
        for content, block in made.items():
            known = content in self._present or content in self._held
            if self._uses[content] and not known:
                self._present[content] = block
                memory.hold(block, self._holder(content))
        for content in self._reads[op]:
            self._use(content)
        memory.let_go_all("running")
        return most

    def _new_block(self, storage: int) -> Hashable:
        self._num_blocks += 1
        block = ("again", self.span, self._num_blocks)
        self.memory.make(block, self.size(storage), "running")
        return block

    def _use(self, content: Content) -> None:
        self._uses[content] -= 1
        if not self._uses[content]:
            self._release(content)

    def _release(self, content: Content) -> None:
        self.memory.let_go(self._present.pop(content), self._holder(content))
        self.memory.let_go(("copied", self.span, content), "copied")

    def _ran(self, op: int) -> int:
        """Note that an op runs again; returns the bytes alive while it gets ready."""
        self.again.append(op)
        if not self.graph.ops[op].random:
            return 0
        if not self.memory.is_there(("as found", self.span)):
            self.memory.make_state(("as found", self.span), self.graph)
        alive_bytes = self.memory.bytes
        self._runs[op] -= 1
        if not self._runs[op]:
            self.memory.let_go(("drawn", self.span, op), "random")
        return alive_bytes

    def _all_needed(self) -> Counter[int]:
        """How often every op will be recomputed, including in inner regions."""
        found = Counter(self._needed)
        for one in self._inner:
            found += one._all_needed()
        return found

    def _holder(self, content: Content) -> Hashable:
        return "region", self.span, content


class _Inner(_Program):
    """A region inside: what it is given, and what it keeps, are the outer one's."""

    def __init__(self, outer: _Program, span: Span, what: tuple[Kept, Nest]) -> None:
        kept, inner = what
        _Region.__init__(self, outer.graph, outer.memory, span)
        self.outer = outer
        self.outputs = outer.outputs
        self._reads, self._makes = outer._reads, outer._makes
        self._made_by, self._content = outer._made_by, outer._content
        self._kept = {self.outputs[op][m] for op, m in kept}
        self._encodings = {}
        self._inner = [_Inner(self, *one) for one in inner.items()]
        self._present = {}
        self._num_blocks = 0

    def _release(self, content: Content) -> None:
        super()._release(content)
        if content in self._held and self.outer:
            self.outer._use(content)

    def _ran(self, op: int) -> int:
        assert self.outer
        return self.outer._ran(op)


class _Rerun(_Region):
    """Reruns the region from its start when the first of its saves is needed."""

    def __init__(self, graph: Graph, memory: Memory, span: Span) -> None:
        super().__init__(graph, memory, span)
        self._given = {*graph.calls[span[0]].arguments}
        read = {s for op in self.ops() for s in self.inputs(op)}
        casts = {s for s in read - self._given if self._is_cast(s)}
        self._casts = {s for s in casts if not self.is_inside(s)}
        self.dropped = {
            j
            for j in self.saves
            for s in [graph.saved[j].storage]
            if self.is_inside(s) or s in self._casts
        }
        self._first, _, self._done = self.first_and_last(self.saves)
        stop = max((graph.saved[j].packed_at for j in self.saves), default=self.start)
        self._ops = range(self.start, stop)
        self._running = "running", span
        self._buffers = graph.calls[span[0]].state
        for storage in {s for op in self.ops() for s in self.inputs(op)}:
            inside = self.is_inside(storage)
            given = graph.storages[storage].maker < 0
            read_again = not inside and not given and self._first >= 0
            if read_again and self.is_written(storage, self.start, self._first):
                raise CannotRebuildError(f"storage {storage}, to be run again")

    def encode(self, now: int) -> int:
        if now == self.start:
            self._copy_world("before")
        return 0

    def _is_cast(self, storage: int) -> bool:
        """Whether it is another type's copy of a weight, as autocast has at hand."""
        maker = self.graph.storages[storage].maker
        if maker < 0 or self.graph.ops[maker].name != "_to_copy":
            return False
        kinds = {self.graph.storages[s].kind for s in self.inputs(maker)}
        written = self.is_written(storage, 0, len(self.graph.ops))
        return kinds == {"parameter"} and not written

    @property
    def _draws(self) -> bool:
        return any(self.graph.ops[op].random for op in self.ops())

    def _copy_world(self, when: str) -> None:
        """The random state, if it is drawn from again, and all buffers."""
        if when == "before" or self._draws:
            self.memory.make_state((when, self.span), self.graph)
        for buffer in self._buffers:
            block = when, self.span, buffer
            self.memory.make(block, self.size(buffer), "world")

    def _drop_world(self, when: str, *, random: bool, buffers: Iterable[int]) -> None:
        if random:
            self.memory.let_go((when, self.span), "random")
        for buffer in buffers:
            self.memory.let_go((when, self.span, buffer), "world")

    def hold(self, at: int) -> None:
        if self.saves and at - 1 in self.ops():
            for storage in self.inputs(at - 1):
                given = self.graph.storages[storage].maker < 0
                made_again = self.is_inside(storage) or storage in self._casts
                if not given and not made_again:
                    self.memory.hold(storage, ("region", self.span))
        if self.saves and at - 1 == self.start:
            for storage in self._given:
                self.memory.hold(storage, ("region", self.span))

    def let_go(self, done: int) -> None:
        for j in self.dropped:
            if self.graph.saved[j].last_used == done:
                self.memory.let_go_all(("again", j))
        if done == self._done:
            self.memory.let_go_all(("region", self.span))
        if done == self.stop - 1:  # what is as it was need not be put back
            same = [b for b in self._buffers if not self._changes(b)]
            self._drop_world("before", random=not self._draws, buffers=same)
        if done == max(self._done, self.stop - 1):
            self._drop_world("before", random=True, buffers=self._buffers)

    def _changes(self, storage: int) -> bool:
        return self.is_written(storage, self.start, self.stop) or (
            self.graph.fingerprint["device"] == "cpu"
            and any(self._moves(self.graph.ops[op], storage) for op in self.ops())
        )

    def _moves(self, op: Op, storage: int) -> bool:
        """Whether it is a norm that trains, and the storage its running statistics."""
        norm = op.name == "native_batch_norm" and self.size(op.outputs[1]) > 0
        return norm and storage in op.reads[-2:]

    def rebuild(self, now: int) -> int:
        if now != self._first:
            return 0
        self._copy_world("again")
        most = [self.memory.bytes]
        for at in self._ops:
            most += map(self._run, [*self._casts_of(at), at])
        stop = self._ops.stop
        saved = {self.graph.saved[j].storage for j in self._saved_at(stop)}
        if stop < self.stop and saved & {*self.graph.ops[stop].reads}:
            most += map(self._run, self._casts_of(stop))  # before it would run
        self.memory.let_go_all(self._running)
        self._drop_world("again", random=True, buffers=self._buffers)
        return max(most)

    def _casts_of(self, op: int) -> list[int]:
        """The casts before an op, each at its first read."""
        reads = [s for s in self.graph.ops[op].reads if s in self._casts]
        casts = [self.graph.storages[s].maker for s in reads]
        return [cast for cast in casts if cast not in self.again]

    def _saved_at(self, at: int) -> list[int]:
        return [j for j in self.saves if self.graph.saved[j].packed_at == at]

    def _run(self, at: int) -> int:
        """Recompute an op; returns the peak bytes."""
        self.again.append(at)
        for storage in self._created(at):
            block = "again", self.span, storage
            self.memory.make(block, self.size(storage), self._running)
        most = self.memory.bytes + self.graph.ops[at].workspace.bytes
        inside = at in self.ops()
        for j in self.dropped:
            saved = self.graph.saved[j]
            made = saved.packed_at == at + 1 and saved.storage not in self._casts
            if not inside:
                made = saved.storage in self._created(at)
            if made and saved.last_used >= self._first:
                self.memory.hold(("again", self.span, saved.storage), ("again", j))
        for s, one in enumerate(self.graph.storages):
            if one.last == at and inside:
                self.memory.let_go(("again", self.span, s), self._running)
        return most

    def _created(self, op: int) -> list[int]:
        return [s for s, made in enumerate(self.graph.storages) if made.maker == op]
