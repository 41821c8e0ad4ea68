"""Find hazards in a recorded step: calls or ops that are unsafe to recompute.

Programs recompute ops with their original random numbers and run no Python. Only two
things can change their results: writes to tensors that they read, which the simulator
sees, and nondeterministic kernels. Rerunning a module also runs its Python code. The
engine then restores random numbers, buffers, plain attributes and containers of plain
values, and compares results. Only programs are safe for calls that change caches or
other objects, or that replace tensors, as the replaced tensors would stay alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ckplan.applying.tensors.op_traits import RUNNING_STATISTICS, TRAINING
from ckplan.graph.records import (
    BATCH_NORMS,
    BEFORE_STEP,
    OUTSIDE_CALLS,
    OWN_GENERATOR,
    Hazard,
)
from ckplan.plan.region import PROGRAM, RERUN
from ckplan.tracing.recording.recording import (
    STILL_ALIVE,
    RawCall,
    RawOp,
    Recording,
    TensorMeta,
)
from ckplan.training.data_dependent import has_data_dependent_shape
from ckplan.training.uninitialized import (
    ignores_old_content,
    reads_only_metadata,
    returns_uninitialized,
)

BOTH: tuple[str, ...] = (PROGRAM, RERUN)
PROGRAMS: tuple[str, ...] = (PROGRAM,)
RERUNS: tuple[str, ...] = (RERUN,)
NO_WAY: tuple[str, ...] = ()
_GUARDS = {"random": BOTH, "plain state": BOTH, "shapes": BOTH, "backward": NO_WAY}
_OBSERVERS = ("fused_moving_avg_obs_fake_quant", "_fused_moving_avg_obs_fq_helper")
_REPLACES = ("copy_", "fill_", "zero_")  # ops that ignore the old content


def find_hazards(
    recording: Recording, call_number: Mapping[int, int]
) -> tuple[Hazard, ...]:
    """The hazards of every call, each once, in order of call.

    Args:
        recording: The recorded step.
        call_number: Recorded call -> call of the graph, or ``OUTSIDE_CALLS``.
    """
    found: dict[Hazard, None] = {}
    for call, kind, reason in recording.changes:
        guard, kind = _GUARDS.get(kind, PROGRAMS), kind.rpartition(" ")[2]
        found[Hazard(call_number[call], kind, reason, guard)] = None
    for call in _of_unseen_kernels(recording):
        reason = "runs a kernel that no op stands for"
        found[Hazard(call_number[call], "unseen", reason, RERUNS)] = None
    for call, reason, guard in _of_own_checkpoints(recording):
        found[Hazard(call_number[call], "again", reason, guard)] = None
    for call, name in _of_observers(recording):
        reason = f"{name} moves the range that it quantizes to"
        found[Hazard(call_number[call], "unseen", reason, NO_WAY)] = None
    for index, raw in enumerate(recording.calls):
        ops = recording.ops[raw.start : raw.stop]
        mine = [o for o in ops if o.call == index and not _is_observer(o)]
        for kind, reason, guard in _of_ops(recording, raw, mine):
            found[Hazard(call_number[index], kind, reason, guard)] = None
    inside = (hazard for hazard in found if hazard.call != OUTSIDE_CALLS)
    return tuple(sorted(inside, key=lambda hazard: hazard.call))


def _of_unseen_kernels(recording: Recording) -> Iterator[int]:
    """Calls that allocate bytes which are used although no op fills them."""
    waiting: dict[int, int] = {}  # storage -> call
    for op in recording.ops:
        filled = {*op.writes} if ignores_old_content(op.func) else set()
        for storage in filled & waiting.keys():
            del waiting[storage]
        reads = (
            op.reads[reads_only_metadata(op.func, op.arguments[1]) :] if waiting else ()
        )
        for storage in waiting.keys() & {*reads, *op.writes}:
            yield waiting.pop(storage)
        if returns_uninitialized(op.func):
            some = (s for s in op.outputs if recording.storages[s].bytes)
            waiting.update(dict.fromkeys(some, op.call))
    for saved in recording.saved:
        if saved.storage in waiting:
            yield waiting.pop(saved.storage)


def _of_observers(recording: Recording) -> Iterator[tuple[int, str]]:
    """(call, op) of kernels that change buffers that they read, at the same version."""
    for op in recording.ops:
        if _is_observer(op):
            yield op.call, str(op.func.overloadpacket.__name__)


def _is_observer(op: RawOp) -> bool:
    return op.func.overloadpacket.__name__ in _OBSERVERS


def _of_own_checkpoints(
    recording: Recording,
) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(call, reason, safe mechanisms) of outermost calls that the model recomputes.

    Programs turn off the ``gradient_checkpointing`` switch of transformers while they
    run.
    """
    calls, again = recording.calls, recording.run_again
    for index, raw in enumerate(calls):
        inside = raw.parent != OUTSIDE_CALLS and calls[raw.parent].fqn in again
        if raw.fqn in again and not inside and raw.stop > raw.start:
            switched = again[raw.fqn]
            by = "gradient_checkpointing is on" if switched else "it is checkpointed"
            reason = f"runs again in backward already: in the model itself {by}"
            yield index, reason, RERUNS if switched else BOTH


def _of_ops(
    recording: Recording, call: RawCall, mine: Sequence[RawOp]
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(kind, reason, safe mechanisms) of ops that a call's own code runs."""
    # Batch norms also change a buffer that counts batches.
    counts_only = any(map(_updates_statistics, mine))
    for op in mine:
        name = str(op.func.overloadpacket.__name__)
        if _updates_statistics(op):
            yield "statistics", f"{name} updates running statistics", BOTH
        if any(isinstance(leaf, torch.Generator) for leaf in op.args):
            yield "random", f"{name} {OWN_GENERATOR}", BOTH
        if has_data_dependent_shape(op.func, op.args):
            yield "shapes", f"{name} returns as much as values decide", BOTH
        for storage in op.writes:
            raw = recording.storages[storage]
            if raw.maker != BEFORE_STEP or raw.kind not in ("buffer", "parameter"):
                continue
            if raw.kind == "parameter" or storage >= recording.num_known:
                parameter = raw.kind == "parameter"
                what = "parameter" if parameter else "plain attribute"
                guard = PROGRAMS if parameter else BOTH
                yield "buffer", f"changes a tensor that is a {what}", guard
            elif _depends(recording, call, storage):
                yield "buffer", "changes a buffer that its outputs follow", BOTH
            elif not counts_only:
                yield "buffer", "changes a buffer", BOTH


def _updates_statistics(op: RawOp) -> bool:
    if op.func.overloadpacket.__name__ not in BATCH_NORMS:
        return False
    mean, _ = op.args[RUNNING_STATISTICS]
    return bool(op.args[TRAINING]) and isinstance(mean, TensorMeta)


def _depends(recording: Recording, call: RawCall, buffer: int) -> bool:
    """Whether results of a call depend on a buffer's content at its start."""
    storages, tainted = recording.storages, {buffer}
    for op in recording.ops[call.start : call.stop]:
        name = op.func.overloadpacket.__name__
        if name in _REPLACES:
            (target,) = op.writes
            others = {*op.reads} - {target}
            (tainted.add if others & tainted else tainted.discard)(target)
        elif tainted & {*op.reads}:
            tainted |= {*op.outputs, *op.writes}
    made = {s for s in tainted if storages[s].maker != BEFORE_STEP}
    saved = {one.storage for one in recording.saved}
    lives_on = (storages[s].last for s in made)
    return bool(made & saved) or any(
        last == STILL_ALIVE or last >= call.stop for last in lives_on
    )
