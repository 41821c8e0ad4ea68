"""Counts the bytes of a rebuild, where the engine would run kernels.

``Rebuild`` decides which op reruns and which value is freed. Here, every value is an
interval of time and a number of bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from itertools import count

from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Workspace
from ckplan.simulating.effect import (
    AFTER_MOMENT,
    COPIED,
    ENCODED,
    NO_STORAGE,
    REBUILT,
    RETURNED,
    Effect,
    Interval,
)
from ckplan.simulating.moving import Returns
from ckplan.simulating.program import Program
from ckplan.simulating.view import MovedForm, RegionView

RANDOM_STATE_BYTES = 5056
"""Size of torch's CPU generator state, which is kept to rerun a random op on CPU."""


def random_state_bytes(graph: Graph) -> int:
    """Bytes of a generator state in the memory of the graph's device."""
    return (
        RANDOM_STATE_BYTES if is_on_cpu(graph) else 0
    )  # a GPU's state is in CPU memory


def is_on_cpu(graph: Graph) -> bool:
    """Whether the step runs on the CPU."""
    return bool(graph.fingerprint.get("device", "cpu") == "cpu")


class Ledger:
    """Records the allocations of one rebuild in the ``Effect`` of its region."""

    def __init__(
        self,
        view: RegionView,
        program: Program,
        effect: Effect,
        encodings: Mapping[int, Encoding],
    ) -> None:
        self.flow = program.flow
        self.effect = effect
        self.moment = 0
        self.keeps_graph = False  # the backward that runs: all is used again after it
        self._view = view
        self._runs_left = program.runs()  # step -> runs left
        self._to_free: list[tuple[int, int]] = []  # (half moment, bytes), a heap
        self._bytes = 0
        self._ticks = count()
        self._state_bytes = random_state_bytes(view.graph)
        self._original_state: Interval | None = None  # restored after the steps
        self._random_states = {  # random step -> generator state before it
            step: self._allocate(self._state_bytes, 2 * (view.start + step) + 1)
            for step in self._runs_left
            if view.graph.ops[view.start + step].random
        }
        self._copies = {  # value of running statistics -> its copy
            value: self._allocate_value(value, 2 * (view.start + step) + 1, COPIED)
            for value, step in view.statistics.items()
            if value in program.retained
        }
        self._encoded: dict[int, tuple[Encoding, Interval]] = {}
        for value, encoding in encodings.items():
            self._encode(encoding)
            moment = 2 * encoding.op + 1
            if value in program.decodes:
                storage = self.flow.storage_of[value]
                form = self._allocate(encoding.bytes, moment, storage, ENCODED)
                self._encoded[value] = encoding, form
            else:  # never decoded: freed when forward ends
                form = Interval(
                    moment,
                    2 * view.stop - 1,
                    encoding.bytes,
                    storage=self.flow.storage_of[value],
                    form=ENCODED,
                )
                effect.allocated.append(form)
        moved = {
            value: one
            for value, (one, _) in self._encoded.items()
            if isinstance(one, MovedForm)
        }
        storage_of = self.flow.storage_of
        for value, one in moved.items():
            effect.moved[storage_of[value]] = one.op
            if one.small_bytes:
                effect.small[storage_of[value]] = one.small_bytes
        by_op = sorted(moved, key=lambda value: moved[value].op)
        self._returns = Returns(effect, [(value, storage_of[value]) for value in by_op])
        self._returned: dict[int, Interval] = {}  # on their way back

    def ask(self) -> None:
        """Backward asks for a dropped tensor: moved values may begin to come back."""
        for value in self._returns.ask(self.moment):
            self._begin_return(value)

    def fetch(self, value: int) -> Interval | None:
        """Wait for a moved value; None if there is none, or its encoded form came."""
        encoding, form = self._encoded.get(value, (None, None))
        if not isinstance(encoding, MovedForm) or form is None:
            return None
        was_exhausted = self.effect.exhausted >= 0
        for begins in self._returns.want(value, self.moment):
            self._begin_return(begins)
        if self.effect.exhausted >= 0 and not was_exhausted:
            self.effect.exhausted_tick = next(self._ticks)
        self._record_alive(self._bytes)
        returned = self._returned.pop(value)
        if encoding.small_bytes:
            self.free(form, self.moment)
            self._encoded[value] = encoding, returned
            return None
        self.decoded(value)
        return returned

    def _begin_return(self, value: int) -> None:
        storage = self.flow.storage_of[value]
        size = self.effect.small.get(storage, self._bytes_of(value))
        self._returned[value] = self._allocate(size, self.moment, storage, RETURNED)

    def enter_gap(self, moment: int) -> None:
        """Enter the gap at half moment ``moment``, in which steps now run."""
        self.moment = moment
        while self._to_free and self._to_free[0][0] < moment:
            self._bytes -= heappop(self._to_free)[1]

    def allocate(self, value: int) -> Interval:
        """Allocate a value from now on."""
        return self._allocate_value(value, self.moment, REBUILT)

    def free(self, interval: Interval, stop: int) -> None:
        """Free a value at half moment ``stop``, now or later."""
        freed_tick = AFTER_MOMENT
        if stop > self.moment or self.moment % 2:
            heappush(self._to_free, (stop, interval.bytes))
        else:
            self._bytes -= interval.bytes
            freed_tick = next(self._ticks)
        self.effect.allocated.append(interval._replace(stop=stop, stop_tick=freed_tick))

    def free_retained(self, value: int, stop: int) -> None:
        """Free a value that the region holds since forward."""
        if value in self._copies:
            self.free(self._copies.pop(value), stop)
        storage = self.flow.storage_of[value]
        if stop > self.moment or self.moment % 2:
            self.effect.hold(storage, stop)
        else:
            self.effect.free_in_gap(storage, stop, next(self._ticks), self._bytes)

    def record_run(self, step: int) -> Workspace:
        """Record that a step runs; returns its workspace."""
        number = self._view.start + step
        op = self._view.graph.ops[number]
        self.effect.steps.append(number)
        self.effect.gaps.append(self.moment)
        if not self.keeps_graph:
            self._runs_left[step] -= 1
        if op.random:
            self._replay_random_op(step)
        return op.workspace

    def _replay_random_op(self, step: int) -> None:
        if self._original_state is None:
            self._original_state = self._allocate(self._state_bytes, self.moment)
            self._record_alive(self._bytes)
        if not self._runs_left[step]:
            self.free(self._random_states.pop(step), self.moment)

    def restore_random_state(self) -> None:
        """Restore the random state from before the steps ran."""
        if self._original_state is not None:
            self.free(self._original_state, self.moment)
            self._original_state = None

    def decode(self, value: int) -> Workspace:
        """Begin to decode a value; returns the workspace."""
        encoding, _ = self._encoded[value]
        self.effect.coded.append((self.moment, encoding.decode_seconds))
        return Workspace(after=(encoding.decode_workspace_bytes,))

    def decoded(self, value: int) -> None:
        """Free the encoded form of a value."""
        if self.keeps_graph:
            return
        _, form = self._encoded.pop(value)
        self.free(form, self.moment)

    def tick(self) -> int:
        """Return the next tick."""
        return next(self._ticks)

    def record_peak(self, workspace: Workspace, begun: int) -> None:
        """Record the bytes alive while a step runs that began at tick ``begun``."""
        self._record_alive(self._bytes + workspace.bytes)
        allocated, over = next(self._ticks), next(self._ticks)
        for since, blocks in zip((begun, allocated), workspace, strict=True):
            self.effect.workspaces += (
                Interval(self.moment, self.moment, size, since, over) for size in blocks
            )

    def close(self) -> None:
        """Free encoded forms and random states that were not used."""
        forms = (form for _, form in self._encoded.values())
        returned = self._returned.values()
        for left in (*forms, *self._random_states.values(), *returned):
            self.free(left, self.moment)

    def _encode(self, encoding: Encoding) -> None:
        """Encode right after the op, while the op's inputs are still alive."""
        op = self._view.graph.ops[encoding.op]
        beyond = encoding.encode_workspace_bytes - op.workspace.bytes
        moment, most = 2 * encoding.op + 1, self.effect.encoding
        most[moment] = max(most.get(moment, 0), beyond)
        self.effect.coded.append((moment, encoding.encode_seconds))

    def _record_alive(self, alive_bytes: int) -> None:
        parts = self.effect.gap_peaks.setdefault(self.moment, [0])
        parts[-1] = max(parts[-1], alive_bytes)

    def _bytes_of(self, value: int) -> int:
        return self._view.graph.storages[self.flow.storage_of[value]].bytes

    def _allocate_value(self, value: int, moment: int, form: str) -> Interval:
        storage = self.flow.storage_of[value]
        return self._allocate(self._bytes_of(value), moment, storage, form)

    def _allocate(
        self, num_bytes: int, moment: int, storage: int = NO_STORAGE, form: str = ""
    ) -> Interval:
        self._bytes += num_bytes
        tick = next(self._ticks)
        return Interval(moment, moment, num_bytes, tick, storage=storage, form=form)


class ByteCounter:
    """The ``AbstractMachine`` of the simulator: counts the bytes of one region."""

    def __init__(self, ledger: Ledger, retained: Collection[int]) -> None:
        self._ledger = ledger
        self._retained = set(retained)  # held since forward
        self._alive: dict[int, Interval] = {}  # value -> when it was allocated
        self._unpacked: dict[
            int, int
        ] = {}  # value -> half moment of its last use in backward
        self._inner: list[ByteCounter] = []

    def nested(self) -> ByteCounter:
        """Create the machine of an inner region, which holds nothing since forward."""
        self._inner.append(ByteCounter(self._ledger, ()))
        return self._inner[-1]

    def unpack(self, value: int, until: int) -> None:
        """Pass a value to backward, which holds it until half moment ``until``."""
        self._unpacked[value] = max(self._unpacked.get(value, 0), until)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Rerun a step; of its outputs, only ``keep`` stays."""
        ledger, flow = self._ledger, self._ledger.flow
        workspace, begun = ledger.record_run(step), ledger.tick()
        allocated = {
            new: ledger.allocate(new) if old in copies else self._alive.pop(old)
            for old, new in flow.overwrites[step].items()
        }
        for value in flow.outputs[step]:
            if value not in allocated:
                allocated[value] = ledger.allocate(value)
        ledger.record_peak(workspace, begun)
        for value, interval in allocated.items():
            if value in keep:
                self._alive[value] = interval
            else:
                ledger.free(interval, ledger.moment)

    def decode(self, value: int) -> None:
        """Decode a value and free its encoded form."""
        returned = self._ledger.fetch(value)
        if returned is not None:
            self._alive[value] = returned
            return
        workspace, begun = self._ledger.decode(value), self._ledger.tick()
        self._alive[value] = self._ledger.allocate(value)
        self._ledger.record_peak(workspace, begun)
        self._ledger.decoded(value)

    def fetch(self, value: int) -> None:
        """Do nothing: the outer region counts the value."""

    def free(self, value: int) -> None:
        """Free a value, now or after its last use in backward."""
        stop = max(self._ledger.moment, self._unpacked.get(value, 0))
        if value in self._retained:
            self._ledger.free_retained(value, stop)
            self._retained.discard(value)
        elif value in self._alive:
            self._ledger.free(self._alive.pop(value), stop)

    def close(self) -> None:
        """Free every value that the region still holds."""
        for inner in self._inner:
            inner.close()
        for value in (*self._retained, *self._alive):
            self.free(value)
