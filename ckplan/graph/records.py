"""What a recorded step consists of: ops, storages, saved tensors, calls and the rest.

Time is counted in ops: *moment* ``t`` is while op ``t`` runs. Views are no ops; a view
is its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MEASURED = "measured"
"""Where the seconds of a step come from, unless it says otherwise."""

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
    "unseen",  # a kernel that no op stands for fills what an op made
    "chance",  # the same op on the same tensors gives other values
    "again",  # the model itself runs it again in backward: what it saves is not seen
)
OWN_GENERATOR = "draws from a generator of its own"
"""What hazards say of an op that does."""

BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Ops that normalize by statistics of the batch, and move running ones past all notice
of torch; or by the running ones, and then they return empty ones of the batch."""

MULTIPLIES = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm"}
    | {"addmv", "mv", "dot", "vdot"}
)
"""Ops that go to cuBLAS, which takes a workspace in each thread with its first."""

GATHER = "all_gather"
BEFORE_STEP = -1
"""Maker of a storage that exists when the step begins."""
OUTSIDE_CALLS = -1
"""Call of an op that no module call ran: the loss function, the optimizer."""


class Workspace(NamedTuple):
    """Blocks that a kernel takes, all there at once, and gives back as it returns."""

    before: tuple[int, ...] = ()  # its outputs, as copies of what it reads
    after: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(self.before) + sum(self.after)

    def map(self, change: Callable[[int], int]) -> Workspace:
        """The same with every block of another size."""
        return Workspace(*(tuple(map(change, blocks)) for blocks in self))


NO_WORKSPACE = Workspace()


@dataclass(frozen=True, slots=True)
class Op:
    """One op that makes or changes bytes."""

    name: str  # "addmm", without namespace and overload
    call: int  # index of the innermost call, or of the call this is the backward of
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]  # storages changed in place; they are read too
    outputs: tuple[int, ...]  # storage of every tensor returned, in order
    workspace: Workspace
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
class EngineCosts:
    """What carrying out a plan takes of the CPU, beside the ops themselves."""

    watch_seconds: float = 0.0  # for every tensor that a region's forward saves
    rerun_seconds: float = 0.0  # for every op that runs again


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
    used: int  # last moment that the node does; the engine may yet cast what it gives


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
    given: tuple[int, ...] = ()  # storages of the step that it was given
    state: tuple[int, ...] = ()  # storages of buffers of its module, and the like

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
class RecordedStep:
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
    engine: EngineCosts = field(default_factory=EngineCosts)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def backward_stop(self) -> int:
        """First op of the optimizer."""
        return self.num_forward + self.num_backward
