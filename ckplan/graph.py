"""The first waist: what one training step costs, as data.

A ``Graph`` is a recorded step: ops in execution order, the storages they read and
make, what autograd saves, and the module calls that ran the ops. Time is counted in
ops: *moment* ``t`` is while op ``t`` runs. Views are no ops; a view is its storage.

Its file is read and written by ``trace_file.py``.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckplan.consistency import contradictions
from ckplan.errors import GraphError
from ckplan.names import relative_path

if TYPE_CHECKING:
    import networkx

FORMAT_VERSION = 4
MEASURED = "measured"
"""Where the seconds of a graph come from, unless it says otherwise."""
KINDS = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer",
    "input",
    "activation",
    "temporary",
)
HAZARDS = (
    "statistics",  # running statistics that a kernel updates
    "buffer",  # forward changes a tensor that outlives it
    "random",  # random numbers of no generator that is put back
    "state",  # forward changes attributes or arguments, or hidden state
    "shapes",  # shapes depend on values: another batch needs other bytes
    "backward",  # a backward in the middle of forward, as of a gradient penalty
    "chance",  # the same op on the same tensors gives other values
)
_MOST = 1 << 63  # of bytes
_MOST_SECONDS = 1e9  # of an op; in nanoseconds, sums of them are exact enough

BEFORE_STEP = -1
"""Maker of a storage that exists when the step begins."""
OUTSIDE_CALLS = -1
"""Call of an op that no module call ran: the loss function, the optimizer."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op that makes or changes bytes."""

    name: str  # "addmm", without namespace and overload
    call: int  # index of the innermost call, or of the call this is the backward of
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]  # storages changed in place; they are read too
    outputs: tuple[int, ...]  # storage of every tensor returned, in order
    workspace_bytes: int  # allocated inside the kernel and gone when it returns
    flops: int
    moved_bytes: int  # read and written, every tensor once
    seconds: float  # that the device works
    random: bool
    launch_seconds: float = 0.0  # that the CPU needs to hand it to a device of its own

    @property
    def creates(self) -> tuple[int, ...]:
        """Storages that this op allocates, each once."""
        old = {*self.reads, *self.writes}
        return tuple(s for s in dict.fromkeys(self.outputs) if s not in old)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that live and die together, whatever views them."""

    bytes: int
    kind: str  # one of KINDS
    maker: int  # op, or BEFORE_STEP
    last: int  # last moment that anything but autograd's saved tensors holds it


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd keeps from forward to backward."""

    storage: int
    call: int  # innermost call when it was saved
    at: int  # number of ops that had run
    wanted: int  # backward op before which it is unpacked; -1: never
    done: int  # last moment that autograd holds it


@dataclass(frozen=True, slots=True)
class Encoding:
    """A lossless smaller form in which what an op makes can be kept."""

    op: int
    output: int
    name: str  # "bits"
    bytes: int
    encode_workspace_bytes: int  # beyond the encoded form, while it is made
    decode_workspace_bytes: int  # beyond both forms, while the tensor is made again
    encode_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """What keeping the encoded form costs."""
        return self.encode_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a module's forward; ``FQN#number``."""

    fqn: str  # "" is the model itself
    number: int
    parent: int  # index of the enclosing call, or OUTSIDE_CALLS
    start: int  # its ops are [start, stop)
    stop: int
    module: str  # type name

    def __str__(self) -> str:
        return f"{self.fqn or '.'}#{self.number}"


@dataclass(frozen=True, slots=True)
class Hazard:
    """Why running a call, or its ops, a second time may give something else."""

    call: int  # the innermost that has it
    kind: str  # one of HAZARDS
    reason: str  # for people
    guarded_by: tuple[str, ...]  # ways to recompute that take care of it


@dataclass(frozen=True)
class Graph:
    """One training step. Ops ``[0, num_forward)`` are forward, then backward."""

    model: str
    fingerprint: Mapping[str, Any]
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[Saved, ...]
    calls: tuple[Call, ...]  # in order of start; parents first
    num_forward: int
    num_backward: int
    encodings: tuple[Encoding, ...] = ()  # in order of op and output
    hazards: tuple[Hazard, ...] = ()  # in order of call
    notes: tuple[str, ...] = ()  # what a reader must know: fallbacks, translations
    costs: str = MEASURED  # where the seconds come from: or "roofline RTX 4090"
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def backward_stop(self) -> int:
        """First op of the optimizer."""
        return self.num_forward + self.num_backward

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of the unplanned step: of the device or of launching, if longer."""
        return sum(self.busier_seconds)

    @cached_property
    def busier_seconds(self) -> tuple[float, ...]:
        """What every op adds to the step: on the device, or to launching if longer."""
        return max(self._sides, key=sum)

    @cached_property
    def other_seconds(self) -> tuple[float, ...]:
        """What every op takes on the side that waits for the busier one."""
        device, launch = self._sides
        return launch if self.busier_seconds is device else device

    @cached_property
    def _sides(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        device = tuple(op.seconds for op in self.ops)
        return device, tuple(op.launch_seconds for op in self.ops)

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Sum of storage bytes of every kind, alive together or not."""
        total = dict.fromkeys(KINDS, 0)
        for storage in self.storages:
            total[storage.kind] += storage.bytes
        return total

    @cached_property
    def encoding_of(self) -> dict[tuple[int, int], Encoding]:
        """(op, output) -> the smaller form that it can be kept in."""
        return {(one.op, one.output): one for one in self.encodings}

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Call -> calls directly inside, in order."""
        inside: dict[int, list[int]] = {OUTSIDE_CALLS: []}
        for index, call in enumerate(self.calls):
            inside[index] = []
            inside[call.parent].append(index)
        return inside

    @cached_property
    def creates(self) -> tuple[tuple[int, ...], ...]:
        """Of every op, ``Op.creates``."""
        return tuple(op.creates for op in self.ops)

    @cached_property
    def saved_of(self) -> dict[int, list[int]]:
        """Storage -> indices of the saved tensors that hold it, in order."""
        found: dict[int, list[int]] = {}
        for index, saved in enumerate(self.saved):
            found.setdefault(saved.storage, []).append(index)
        return found

    @cached_property
    def _writers(self) -> dict[int, list[int]]:
        """Storage -> ops that change it in place, in order."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            for storage in op.writes:
                found.setdefault(storage, []).append(index)
        return found

    def is_changed(self, storage: int, start: int, stop: int) -> bool:
        """Whether an op of ``[start, stop)`` changes a storage in place."""
        writers = self._writers.get(storage, ())
        place = bisect_left(writers, start)
        return place < len(writers) and writers[place] < stop

    def phase(self, moment: int) -> str:
        """``forward``, ``backward`` or ``optimizer``."""
        if moment < self.num_forward:
            return "forward"
        return "backward" if moment < self.backward_stop else "optimizer"

    def place(self, moment: int) -> str:
        """Where a moment is, for people: ``backward of transformer.h.11``."""
        phase = self.phase(moment)
        call = self.ops[moment].call if self.ops else OUTSIDE_CALLS
        if phase == "optimizer":
            return "optimizer step"
        if call == OUTSIDE_CALLS:
            return f"{phase} of the loss"
        found = self.calls[call]
        return f"{phase} of {found.fqn or found.module}"

    def relative_path(self, call: int, region: int) -> str:
        """Module path of ``call`` below ``region``; "" for the region itself."""
        return relative_path(self.calls[call].fqn, self.calls[region].fqn)

    def within(self, call: int, region: int) -> bool:
        """Whether ``call`` is ``region`` or runs inside it."""
        while call > region:
            call = self.calls[call].parent
        return call == region

    def is_inside(self, call: int, first: int, last: int | None = None) -> bool:
        """Whether ``call`` is, or runs inside, a call or one of a run of siblings."""
        parent, stop = self.calls[first].parent, first if last is None else last
        while call > stop or self.calls[call].parent != parent:
            call = self.calls[call].parent
            if call == OUTSIDE_CALLS:
                return False
        return first <= call

    def signature(self, index: int, last: int | None = None) -> str:
        """Equal for calls that do the same: same ops, sizes and saved tensors.

        With ``last``, of a run of sibling calls and what their parent does between.
        """
        call = self.calls[index]
        start, stop = call.start, self.calls[index if last is None else last].stop
        seen: dict[int, int] = {}

        def local(storage: int) -> tuple[int, int, int]:
            found = self.storages[storage]
            inside = start <= found.maker < stop
            number = seen.setdefault(storage, len(seen))
            return number, found.bytes, inside and found.last - start

        parts: list[object] = [call.module]
        for op in self.ops[start:stop]:
            where = self.relative_path(op.call, index) if last is None else ""
            ids = [[local(s) for s in group] for group in (op.reads, op.outputs)]
            parts.append((op.name, where, ids, op.writes and local(op.writes[0])))
            parts.append((op.flops, op.workspace_bytes))
        found = (self.saved[i] for i in self.saved_in(index, last))
        parts += [(local(s.storage)[0], s.at - start) for s in found]
        parts += [
            (one.op - start, one.output, one.name, one.bytes)
            for one in self.encodings_in(index, last)
        ]
        parts += [
            (max(hazard.call - index, -1), hazard.reason, hazard.guarded_by)
            for hazard in self.hazards_in(index, last)
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def saved_in(self, call: int, last: int | None = None) -> list[int]:
        """Indices of the saved tensors of a call, inner calls included, in order.

        With ``last``, of a run of sibling calls and what their parent does between.
        """
        stop_call = call if last is None else last
        first, stop = self.calls[call].start, self.calls[stop_call].stop
        parent = self.calls[call].parent

        def mine(saved: Saved) -> bool:
            if saved.call == parent:
                return call != stop_call and first < saved.at < stop
            within_last = self.within(saved.call, stop_call)
            return call <= saved.call and (within_last or saved.call < stop_call)

        low = bisect_left(self.saved, first, key=lambda saved: saved.at)
        high = bisect_right(self.saved, stop, key=lambda saved: saved.at)
        return [i for i in range(low, high) if mine(self.saved[i])]

    def encodings_in(self, call: int, last: int | None = None) -> Sequence[Encoding]:
        """The encodings of what the ops of a call, or of a run of calls, make."""
        stop_call = call if last is None else last
        start, stop = self.calls[call].start, self.calls[stop_call].stop
        low = bisect_left(self.encodings, start, key=lambda one: one.op)
        high = bisect_left(self.encodings, stop, key=lambda one: one.op)
        return self.encodings[low:high]

    def hazards_in(self, call: int, last: int | None = None) -> Sequence[Hazard]:
        """The hazards of a call, or of a run of calls; inner calls included."""
        stop = self.calls[call if last is None else last].stop
        after = bisect_left(self.calls, stop, lo=call + 1, key=lambda one: one.start)
        low = bisect_left(self.hazards, call, key=lambda one: one.call)
        high = bisect_left(self.hazards, after, key=lambda one: one.call)
        parent = self.calls[call].parent
        between = () if last is None else self._hazards_of.get(parent, ())
        return [*between, *self.hazards[low:high]]

    @cached_property
    def _hazards_of(self) -> dict[int, list[Hazard]]:
        found: dict[int, list[Hazard]] = {}
        for hazard in self.hazards:
            found.setdefault(hazard.call, []).append(hazard)
        return found

    def to_networkx(self) -> networkx.DiGraph[int]:
        """The ops as a DAG: an edge where one reads what another made or changed."""
        import networkx

        dag: networkx.DiGraph[int] = networkx.DiGraph(name=self.model)
        maker: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            dag.add_node(index, name=op.name, seconds=op.seconds)
            for storage in {*op.reads, *op.writes}:
                if storage in maker:
                    size = self.storages[storage].bytes
                    dag.add_edge(maker[storage], index, storage=storage, bytes=size)
            for storage in (*op.outputs, *op.writes):
                maker[storage] = index
        return dag


def _check(graph: Graph) -> None:
    """Every index a number in range and every moment in order."""
    num_ops = len(graph.ops)
    halves = (graph.num_forward, graph.num_backward)
    if not _within(halves, 0, num_ops + 1) or sum(halves) > num_ops:
        raise _bad(f"forward and backward are {halves} of {num_ops} ops")
    _check_ops(graph)
    for index, storage in enumerate(graph.storages):
        if storage.kind not in KINDS:
            raise _bad(f"storage {index} is of kind {storage.kind!r}")
        moments = (storage.maker, storage.last)
        sized = _within((storage.bytes,), 0, _MOST)
        if not (sized and _within(moments, BEFORE_STEP, num_ops + 1)):
            raise _bad(f"storage {index} has {storage.bytes} B, maker {storage.maker}")
    calls = range(OUTSIDE_CALLS, len(graph.calls))
    for saved in graph.saved:
        known = _within((saved.storage,), 0, len(graph.storages))
        when = (saved.at, saved.wanted, saved.done)
        if not (known and saved.call in calls and _within(when, -1, num_ops + 1)):
            raise _bad(f"a saved tensor of storage {saved.storage} is out of range")
    for index, call in enumerate(graph.calls):
        known = _within((call.parent,), OUTSIDE_CALLS, index)
        inside = _within((call.start, call.stop), 0, num_ops + 1)
        if not (known and inside and call.start <= call.stop):
            raise _bad(f"call {index} covers ops [{call.start}, {call.stop})")
    _check_encodings(graph)
    _check_hazards(graph)
    for what in contradictions(graph):
        raise _bad(what)


def _check_hazards(graph: Graph) -> None:
    numbers = [hazard.call for hazard in graph.hazards]
    if not _within(numbers, 0, len(graph.calls)) or numbers != sorted(numbers):
        raise _bad("a hazard is of a call that is not there")
    if any(hazard.kind not in HAZARDS for hazard in graph.hazards):
        raise _bad("a hazard is of an unknown kind")


def _check_encodings(graph: Graph) -> None:
    for one in graph.encodings:
        known = _within((one.op,), 0, len(graph.ops))
        outputs = graph.ops[one.op].outputs if known else ()
        sizes = (one.bytes, one.encode_workspace_bytes, one.decode_workspace_bytes)
        seconds = one.encode_seconds, one.decode_seconds
        named = _within((one.output,), 0, len(outputs))
        timed = all(0 <= one_way <= _MOST_SECONDS for one_way in seconds)
        if not (named and timed and _within(sizes, 0, _MOST)):
            raise _bad(f"an encoding of op {one.op} is out of range")


def _check_ops(graph: Graph) -> None:
    num_storages, calls = len(graph.storages), range(OUTSIDE_CALLS, len(graph.calls))
    for index, op in enumerate(graph.ops):
        if not _within((*op.reads, *op.writes, *op.outputs), 0, num_storages):
            raise _bad(f"op {index} ({op.name}) uses a storage that is not there")
        if op.call not in calls:
            raise _bad(f"op {index} ({op.name}) belongs to call {op.call}")
        costs = (op.workspace_bytes, op.flops, op.moved_bytes)
        seconds, launch_seconds = op.seconds, op.launch_seconds
        timed = 0 <= seconds <= _MOST_SECONDS and 0 <= launch_seconds <= _MOST_SECONDS
        if not (timed and _within(costs, 0, _MOST)):
            raise _bad(f"op {index} ({op.name}) has a cost that is no natural number")


def _within(numbers: Iterable[int], low: int, high: int) -> bool:
    """Whether all are whole numbers of ``[low, high)``."""
    for number in numbers:  # a loop is twice as fast as a generator, and this is hot
        if type(number) is not int or not low <= number < high:
            return False
    return True


def _bad(what: str) -> GraphError:
    return GraphError(
        f"the trace does not hold together: {what}",
        needed=f"a graph file of format {FORMAT_VERSION} as `ckplan profile` writes it",
        hint="run `ckplan profile` again",
    )
