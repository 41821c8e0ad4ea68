"""The records of a step: ops, storages, saved tensors, calls, encodings, hazards.

Time is counted in ops: *moment* ``t`` is the run of op ``t``. Views are not ops; a view
counts as its storage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_PRINTED = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")  # of an element, in the name of its type
MEASURED = "measured"
"""Default source of the seconds of a step (``RecordedStep.costs``)."""

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
    "buffer",  # forward changes a tensor that exists after it
    "random",  # random numbers from a generator that no rerun restores
    "state",  # forward changes attributes, arguments or hidden state
    "shapes",  # output shapes depend on data: bytes differ per batch
    "backward",  # a backward pass inside forward, such as a gradient penalty
    "unseen",  # a kernel that torch does not report writes a tensor
    "chance",  # a nondeterministic op: equal inputs, other outputs
    "again",  # the model itself reruns it in backward
)
OWN_GENERATOR = "draws from a generator of its own"
"""End of the hazard's reason for an op with its own generator."""

BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Batch norms. In training mode they normalize by batch statistics and update running
statistics without an in-place op. In evaluation mode they return empty batch
statistics."""

MULTIPLIES = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm"}
    | {"addmv", "mv", "dot", "vdot"}
)
"""Ops that call cuBLAS, which allocates a workspace at its first call per thread."""

GATHER = "all_gather"
"""Op that gathers the parameters of a unit, which are freed after their use."""
BEFORE_STEP = -1
"""Maker of a storage that exists when the step begins."""
OUTSIDE_CALLS = -1
"""Call of an op outside all module calls: the loss function, the optimizer."""


class Workspace(NamedTuple):
    """Bytes of the blocks that a kernel allocates together and frees when it ends."""

    before: tuple[int, ...] = ()  # before its outputs, such as copies of inputs
    after: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Sum of all blocks."""
        return sum(self.before) + sum(self.after)

    def map(self, change: Callable[[int], int]) -> Workspace:
        """The workspace with ``change`` applied to the size of every block."""
        return Workspace(*(tuple(map(change, blocks)) for blocks in self))


NO_WORKSPACE = Workspace()


class TensorType(NamedTuple):
    """Element type and shape of a tensor; prints as ``float32[8,1024]``."""

    dtype: str  # of torch, without "torch."
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element, by the name of its type.

        >>> types = "bool", "int64", "bfloat16", "float8_e4m3fn"
        >>> [TensorType(one, ()).item_bytes for one in types]
        [1, 8, 2, 1]
        """
        bits = _BITS.search(self.dtype)
        return max(int(bits.group()) // 8, 1) if bits else 1

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes

    @classmethod
    def parse(cls, text: str) -> TensorType | None:
        """Read what ``str`` printed; None if it did not.

        >>> TensorType.parse("float32[8,1024]"), TensorType.parse("8 x 1024")
        (TensorType(dtype='float32', shape=(8, 1024)), None)
        """
        found = _PRINTED.fullmatch(text)
        if found is None:
            return None
        return cls(found[1], tuple(map(int, filter(None, found[2].split(",")))))


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
    seconds: float  # device time
    random: bool
    launch_seconds: float = 0.0  # CPU time to launch it on a GPU
    line: str = ""  # "gpt2/modeling_gpt2.py:312", which ran it; "" if not known
    is_inside: bool = False  # of a function of torch that returns none of its outputs

    @property
    def creates(self) -> tuple[int, ...]:
        """Storages that this op allocates, each once."""
        old = {*self.reads, *self.writes}
        return tuple(s for s in dict.fromkeys(self.outputs) if s not in old)


FUNCTIONS_PER_OP = 2  # of torch, in most models: views and others that run no op


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """CPU time of the engine that carries out a plan, besides the ops themselves.

    A rerun compares each function of torch that is called. Most ops come with two of
    these, and ``module_seconds`` is for both. A function may also run many ops, as that
    of an LSTM does: ``FUNCTIONS_PER_OP`` says which number counts.
    """

    watch_seconds: float = 0.0  # per tensor that a region's forward saves
    rerun_seconds: float = 0.0  # per op that reruns
    module_seconds: float = 0.0  # more per op that reruns with its module
    region_seconds: float = 0.0  # per region
    again: float = 1.0  # seconds of an op in backward, as a factor of its own
    path_seconds: float = 0.0  # per call that is followed to tell whose ops run
    record_seconds: float = 0.0  # per op that each step records, or writes code for

    def times(self, factor: float) -> EngineCosts:
        """The costs of an engine that takes ``factor`` times as long."""
        return EngineCosts(
            factor * self.watch_seconds,
            factor * self.rerun_seconds,
            factor * self.module_seconds,
            factor * self.region_seconds,
            self.again,
            factor * self.path_seconds,
            factor * self.record_seconds,
        )


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that are allocated and freed together; all views share them."""

    bytes: int
    kind: str  # one of KINDS
    maker: int  # op, or BEFORE_STEP
    last: int  # last moment that it is held other than as a saved tensor
    tensor: TensorType | None = None  # its first tensor; None if not known


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd keeps from forward to backward."""

    storage: int
    call: int  # innermost call when it was saved
    packed_at: int  # number of ops that had run when autograd saved it
    unpacked_at: int  # backward op before which it is unpacked; -1: never
    last_held: int  # last moment that autograd holds it
    last_used: int  # last moment that the autograd node itself holds it
    # (unpacked at, last used) in each backward that takes it anew, if several do.
    uses: tuple[tuple[int, int], ...] = ()

    @property
    def every_use(self) -> tuple[tuple[int, int], ...]:
        """(unpacked at, last used) in each backward that takes it anew."""
        one = ((self.unpacked_at, self.last_used),) if self.unpacked_at >= 0 else ()
        return self.uses or one

    def is_used_at(self, moment: int) -> bool:
        """Whether a backward uses it at an op."""
        return any(begin <= moment <= end for begin, end in self.every_use)


@dataclass(frozen=True, slots=True)
class Encoding:
    """A lossless smaller form of an op's output."""

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
        """Time to encode and decode."""
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
    arguments: tuple[int, ...] = ()  # storages
    state: tuple[int, ...] = ()  # storages of its module's buffers and other tensors
    functions: int | None = None  # of torch that it calls itself; None: not counted

    def __str__(self) -> str:
        return f"{self.fqn or '.'}#{self.number}"


@dataclass(frozen=True, slots=True)
class Hazard:
    """A reason why recomputing a call can give a different result."""

    call: int  # innermost call that has it
    kind: str  # one of HAZARDS
    reason: str  # in words
    guarded_by: tuple[str, ...]  # ways to recompute that take care of it


RUNS_WHOLE = 1e30
"""Difference of a call that ckplan does not run in tiles: its code is not followed."""


@dataclass(frozen=True, slots=True)
class TiledBits:
    """What a test of a call in tiles found, on random values of its shape and dtype."""

    call: int  # of a head, an MLP or an attention
    rows: int  # tiles; of a head, of tokens
    columns: int  # tiles; of a head, of the vocabulary
    # Largest, relative to the largest of its tensor; 0: same bits; RUNS_WHOLE.
    difference: float
    threads: int  # of the CPU that the test ran with
    share: float = 0.0  # seconds in tiles, of those whole; 0: not timed


class SavingRegion(NamedTuple):
    """Calls of a compiled step of which forward saves the outputs named."""

    call: int
    last: int | None  # of a run of sibling calls; None: the call alone
    save: tuple[tuple[int, int], ...]  # (op, output), in order


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """A plan of a compiled step, and the peak of what it gives.

    On a CPU its generated code was replayed; for a card, for which none is generated,
    the joint graph was divided and simulated.
    """

    regions: tuple[SavingRegion, ...]  # in order of call; none: without a plan
    simulated_peak_bytes: int  # of the ops; of a step that was changed it differs
    peak_bytes: int
    peak_at: str
    overhead: float  # estimated, as a fraction of the step without a plan


@dataclass(frozen=True, repr=False)
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
    notes: tuple[str, ...] = ()  # for the reader: fallbacks, conversions
    costs: str = MEASURED  # source of the seconds, or "roofline RTX 4090"
    engine: EngineCosts = field(default_factory=EngineCosts)
    options: Mapping[str, str] = field(default_factory=dict)
    tiled: tuple[TiledBits, ...] = ()  # tests; none if no call can run in tiles
    generated: tuple[GeneratedCode, ...] = ()  # of a compiled step, the cheapest first
    # Ops [start, stop) of backwards with retain_graph=True, after which more may come.
    kept_backwards: tuple[tuple[int, int], ...] = ()

    def __repr__(self) -> str:
        """One line: a step has thousands of records."""
        sizes = f"{len(self.ops)} ops, {len(self.storages)} tensors"
        return f"<step of {self.model}: {sizes}, {len(self.calls)} calls>"

    @property
    def backward_stop(self) -> int:
        """First op of the optimizer."""
        return self.num_forward + self.num_backward

    @property
    def num_batches(self) -> int:
        """Forwards and backwards per step of the optimizer; one is recorded."""
        given = self.options.get("accumulate", 1)
        return given if isinstance(given, int) and given > 0 else 1
