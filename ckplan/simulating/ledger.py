"""What a rebuild does to the step: bytes in place of kernels.

``program.Rebuild`` decides which op runs again and which value is let go, for the
engine and here alike. Here every value is an interval of time and a number of bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from itertools import count

from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Workspace
from ckplan.simulating.effect import LATER, Effect, Interval
from ckplan.simulating.program import Program
from ckplan.simulating.view import RegionView

RANDOM_STATE_BYTES = 5056
"""What replaying a random op on CPU keeps: torch's whole generator state."""


def random_state_bytes(graph: Graph) -> int:
    """What replaying a random op keeps in the memory of the graph's device."""
    return RANDOM_STATE_BYTES if is_on_cpu(graph) else 0  # else small, and on the CPU


def is_on_cpu(graph: Graph) -> bool:
    """Whether no other device takes the step."""
    return bool(graph.fingerprint.get("device", "cpu") == "cpu")


class Ledger:
    """What a rebuild does to the step: bytes in place of kernels."""

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
        self._view = view
        self._runs = program.runs()  # still to come
        self._leaving: list[tuple[int, int]] = []  # (half moment, bytes), a heap
        self._bytes = 0
        self._ticks = count()
        self._state_bytes = random_state_bytes(view.graph)
        self._as_found: Interval | None = None  # random state that is to be put back
        self._states = {  # before random steps
            step: self._begin(self._state_bytes, 2 * (view.start + step) + 1)
            for step in self._runs
            if view.graph.ops[view.start + step].random
        }
        self._copies = {  # of running statistics, before norms
            value: self._begin(self._bytes_of(value), 2 * (view.start + step) + 1)
            for value, step in view.statistics.items()
            if value in program.retained
        }
        self._encoded: dict[int, tuple[Encoding, Interval]] = {}
        for value, encoding in encodings.items():
            self._encode(encoding)
            moment = 2 * encoding.op + 1
            if value in program.decodes:
                form = self._begin(encoding.bytes, moment)
                self._encoded[value] = encoding, form
            else:  # nobody will want it: gone when forward is over
                form = Interval(moment, 2 * view.stop - 1, encoding.bytes)
                effect.made.append(form)

    def enter(self, moment: int) -> None:
        """Enter the gap in which steps now run."""
        self.moment = moment
        while self._leaving and self._leaving[0][0] < moment:
            self._bytes -= heappop(self._leaving)[1]

    def allocate(self, value: int) -> Interval:
        """Make room for a value, which lives from now on."""
        return self._begin(self._bytes_of(value), self.moment)

    def let_go(self, born: Interval, stop: int) -> None:
        """A value lives until a half moment, now or later."""
        died = LATER
        if stop > self.moment or self.moment % 2:
            heappush(self._leaving, (stop, born.bytes))
        else:
            self._bytes -= born.bytes
            died = next(self._ticks)
        self.effect.made.append(born._replace(stop=stop, died=died))

    def let_go_held(self, value: int, stop: int) -> None:
        """The same of a value that is held since forward."""
        if value in self._copies:
            self.let_go(self._copies.pop(value), stop)
        storage = self.flow.storage_of[value]
        if stop > self.moment or self.moment % 2:
            self.effect.hold(storage, stop)
        else:
            self.effect.let_go(storage, stop, next(self._ticks), self._bytes)

    def note(self, step: int) -> Workspace:
        """A step runs; returns the workspace that it needs."""
        number = self._view.start + step
        op = self._view.graph.ops[number]
        self.effect.steps.append(number)
        self._runs[step] -= 1
        if op.random:
            self._draw_again(step)
        return op.workspace

    def _draw_again(self, step: int) -> None:
        if self._as_found is None:
            self._as_found = self._begin(self._state_bytes, self.moment)
            self._see(self._bytes)
        if not self._runs[step]:
            self.let_go(self._states.pop(step), self.moment)

    def put_back(self) -> None:
        """The random state is again as it was before steps ran."""
        if self._as_found is not None:
            self.let_go(self._as_found, self.moment)
            self._as_found = None

    def decode(self, value: int) -> Workspace:
        """Begin to decode; returns the workspace that it needs."""
        encoding, _ = self._encoded[value]
        self.effect.seconds += encoding.decode_seconds
        return Workspace(after=(encoding.decode_workspace_bytes,))

    def decoded(self, value: int) -> None:
        """The encoded form goes."""
        _, form = self._encoded.pop(value)
        self.let_go(form, self.moment)

    def begin(self) -> int:
        """When a step begins, in ticks."""
        return next(self._ticks)

    def spike(self, workspace: Workspace, begun: int) -> None:
        """What is alive while a step runs, that began at a tick."""
        self._see(self._bytes + workspace.bytes)
        made, over = next(self._ticks), next(self._ticks)
        for since, blocks in zip((begun, made), workspace, strict=True):
            self.effect.workspaces += (
                Interval(self.moment, self.moment, size, since, over) for size in blocks
            )

    def close(self) -> None:
        """What was never decoded, or run again, goes."""
        forms = (form for _, form in self._encoded.values())
        for left in (*forms, *self._states.values()):
            self.let_go(left, self.moment)

    def _encode(self, encoding: Encoding) -> None:
        """Right after its op, while what the op read is still there."""
        op = self._view.graph.ops[encoding.op]
        beyond = encoding.encode_workspace_bytes - op.workspace.bytes
        moment, most = 2 * encoding.op + 1, self.effect.encoding
        most[moment] = max(most.get(moment, 0), beyond)
        self.effect.seconds += encoding.encode_seconds

    def _see(self, alive_bytes: int) -> None:
        parts = self.effect.spikes.setdefault(self.moment, [0])
        parts[-1] = max(parts[-1], alive_bytes)

    def _bytes_of(self, value: int) -> int:
        return self._view.graph.storages[self.flow.storage_of[value]].bytes

    def _begin(self, num_bytes: int, moment: int) -> Interval:
        self._bytes += num_bytes
        return Interval(moment, moment, num_bytes, next(self._ticks))


class ByteCounter:
    """A machine that counts the bytes of one region."""

    def __init__(self, ledger: Ledger, retained: Collection[int]) -> None:
        self._ledger = ledger
        self._holds = set(retained)  # since forward
        self._born: dict[int, Interval] = {}  # values alive, since when
        self._unpacked: dict[int, int] = {}  # value -> half moment: backward's last
        self._inner: list[ByteCounter] = []

    def within(self) -> ByteCounter:
        """The machine of a region inside, which holds nothing since forward."""
        self._inner.append(ByteCounter(self._ledger, ()))
        return self._inner[-1]

    def unpack(self, value: int, until: int) -> None:
        """Hand a value to backward, which holds it whoever else lets it go."""
        self._unpacked[value] = max(self._unpacked.get(value, 0), until)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        """Run a step again; of what it makes, only some is kept."""
        ledger, flow = self._ledger, self._ledger.flow
        workspace, begun = ledger.note(step), ledger.begin()
        made = {
            new: ledger.allocate(new) if old in copies else self._born.pop(old)
            for old, new in flow.overwrites[step].items()
        }
        for value in flow.outputs[step]:
            if value not in made:
                made[value] = ledger.allocate(value)
        ledger.spike(workspace, begun)
        for value, born in made.items():
            if value in keep:
                self._born[value] = born
            else:
                ledger.let_go(born, ledger.moment)

    def decode(self, value: int) -> None:
        """Make a value from its smaller form, which goes."""
        workspace, begun = self._ledger.decode(value), self._ledger.begin()
        self._born[value] = self._ledger.allocate(value)
        self._ledger.spike(workspace, begun)
        self._ledger.decoded(value)

    def fetch(self, value: int) -> None:
        """It is the outer region's."""

    def free(self, value: int) -> None:
        """Let a value go, now or when backward is through with it."""
        stop = max(self._ledger.moment, self._unpacked.get(value, 0))
        if value in self._holds:
            self._ledger.let_go_held(value, stop)
            self._holds.discard(value)
        elif value in self._born:
            self._ledger.let_go(self._born.pop(value), stop)

    def close(self) -> None:
        """The region's state goes: whatever it still holds ends here."""
        for inner in self._inner:
            inner.close()
        for value in (*self._holds, *self._born):
            self.free(value)
