"""Turn a recording and its costs into a ``Graph``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ckplan.applying.tensors.backwards import NOT_KEPT
from ckplan.encodings import encoded_bytes, form_of, is_dense
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    BEFORE_STEP,
    MEASURED,
    OUTSIDE_CALLS,
    Call,
    Encoding,
    EngineCosts,
    Op,
    Saved,
    Storage,
    TensorType,
    Workspace,
)
from ckplan.tracing.costs.calibrate import EncodingCost
from ckplan.tracing.costs.cost_cache import Cost
from ckplan.tracing.hazards.from_recording import find_hazards
from ckplan.tracing.recording.recording import (
    STILL_ALIVE,
    RawOp,
    RawSaved,
    RawStorage,
    Recording,
    TensorMeta,
)
from ckplan.training.randomness import draws, may_draw

_SCALINGS = (torch.ops.aten.mul, torch.ops.aten.div)
_NUMBER_BYTES = 8


def build_graph(
    recording: Recording,
    costs: Sequence[Cost],
    encoding_costs: Mapping[tuple[str, TensorMeta], EncodingCost],
    *,
    model: str,
    fingerprint: Mapping[str, Any],
    options: Mapping[str, str],
    notes: Sequence[str],
    engine: EngineCosts,
    cost_source: str = MEASURED,
) -> Graph:
    """Assemble the graph of a recorded step."""
    saves = _of_forward(recording)
    _name_activations(recording)
    _add_hidden_bytes(recording, costs)
    if fingerprint.get("device") == "cpu":
        _add_numbers(recording)
    else:
        for storage in recording.on_host:
            recording.storages[storage].bytes = 0
    same = _accumulate_in_place(recording)
    keep = [i for i in range(len(recording.storages)) if same[i] == i]
    number = {old: new for new, old in enumerate(keep)}
    renamed = [number[same[i]] for i in range(len(same))]
    calls, call_number = _calls(recording, renamed)
    ops = tuple(
        _op(raw, cost, renamed, call_number, recording.storages)
        for raw, cost in zip(recording.ops, costs, strict=True)
    )
    return Graph(
        model=model,
        fingerprint=fingerprint,
        options=options,
        notes=tuple(notes),
        costs=cost_source,
        engine=engine,
        ops=ops,
        storages=tuple(_storage(recording, old) for old in keep),
        saved=tuple(
            Saved(
                renamed[s.storage],
                call_number[s.call],
                s.at,
                s.wanted,
                s.done,
                s.done if s.wanted < 0 else s.used,
                tuple((u.wanted, u.used) for u in s.uses) if len(s.uses) > 1 else (),
            )
            for s in saves
        ),
        calls=calls,
        encodings=tuple(_encodings(recording, encoding_costs)),
        hazards=find_hazards(recording, call_number),
        num_forward=recording.num_forward,
        num_backward=recording.num_backward,
        kept_backwards=tuple(_kept_backwards(saves)),
    )


def encodable_outputs(
    recording: Recording,
) -> Iterator[tuple[int, int, str, TensorMeta]]:
    """(op, output, form, description) of forward's outputs that can be encoded."""
    for number, op in enumerate(recording.ops[: recording.num_forward]):
        inputs = (leaf for leaf in op.args if isinstance(leaf, TensorMeta))
        shape = next((meta.shape for meta in inputs), ())
        for output, meta in enumerate(op.returned):
            form = form_of(op_name(op.func), output, meta.dtype, shape)
            if form and op.call != OUTSIDE_CALLS and is_dense(meta.shape, meta.stride):
                yield number, output, form, meta


def _encodings(
    recording: Recording, encoding_costs: Mapping[tuple[str, TensorMeta], EncodingCost]
) -> Iterator[Encoding]:
    for op, output, form, meta in encodable_outputs(recording):
        size, cost = (
            encoded_bytes(form, math.prod(meta.shape)),
            encoding_costs[form, meta],
        )
        yield Encoding(
            op,
            output,
            form,
            size,
            cost.encode_workspace_bytes,
            cost.decode_workspace_bytes,
            round(cost.encode_seconds, 9),
            round(cost.decode_seconds, 9),
        )


def op_name(func: Any) -> str:
    """``addmm`` for ``aten.addmm.default``."""
    return str(func.overloadpacket.__name__)


def _accumulate_in_place(recording: Recording) -> list[int]:
    """Merge storages of gradients that autograd accumulates in place.

    Without a dispatch mode, autograd adds in place if nothing else holds the first
    gradient (``InputBuffer`` in torch's autograd). Under a dispatch mode it always adds
    out of place, so the recording has one storage too many.

    Returns:
        For every recorded storage, the storage that it is in an unrecorded step.
    """
    same = list(range(len(recording.storages)))
    for position, op in enumerate(recording.ops):
        if not op.accumulates or op_name(op.func) != "add" or len(op.reads) != 2:
            continue
        first, result = op.reads[0], op.outputs[0]
        old, new = recording.storages[same[first]], recording.storages[result]
        dies_here = recording.storages[first].last == position
        fits = old.dense and old.bytes == new.bytes
        if dies_here and fits and old.maker != BEFORE_STEP:
            same[result] = same[first]
            old.last, old.kind = new.last, new.kind
            op.writes = (first,)
    return same


def _add_numbers(recording: Recording) -> None:
    """Add a storage for each number that scales a tensor.

    Autograd keeps these numbers as CPU tensors that no hook sees. They do not count
    for other devices.
    """
    end = recording.num_forward + recording.num_backward - 1
    for position, op in enumerate(recording.ops[: recording.num_forward]):
        scales = op.func.overloadpacket in _SCALINGS and op.in_grad_mode
        if scales and not isinstance(op.args[1], TensorMeta):
            number = RawStorage(_NUMBER_BYTES, "temporary", position, end)
            recording.storages.append(number)


def _fresh(op: RawOp) -> list[int]:
    """Storages that an op allocates."""
    old = {*op.reads, *op.writes}
    return [storage for storage in dict.fromkeys(op.outputs) if storage not in old]


def _add_hidden_bytes(recording: Recording, costs: Sequence[Cost]) -> None:
    """Add bytes that an op holds beyond its outputs to its first new storage.

    For example, a reduced loss keeps the larger storage that it was computed in.
    """
    for op, cost in zip(recording.ops, costs, strict=True):
        fresh = _fresh(op)
        hidden = cost.held_bytes - sum(recording.storages[s].bytes for s in fresh)
        if fresh and hidden > 0:
            recording.storages[fresh[0]].bytes += hidden


def _op(
    raw: RawOp,
    cost: Cost,
    renamed: Sequence[int],
    call_number: Mapping[int, int],
    storages: Sequence[RawStorage],
) -> Op:
    made_bytes = sum(storages[s].bytes for s in _fresh(raw))
    name = op_name(raw.func)
    return Op(
        name=name,
        call=call_number[raw.call],
        reads=tuple(dict.fromkeys(renamed[s] for s in raw.reads)),
        writes=tuple(renamed[s] for s in raw.writes),
        outputs=tuple(renamed[s] for s in raw.outputs),
        workspace=cost.workspace or _in_one_block(cost.peak_bytes - made_bytes),
        flops=raw.flops,
        moved_bytes=raw.moved_bytes,
        seconds=round(cost.seconds, 9),
        random=may_draw(raw.func) and draws(raw.func, *raw.arguments),
        launch_seconds=round(cost.launch_seconds, 9),
        line=raw.line,
        is_inside=raw.is_inside,
    )


def _in_one_block(num_bytes: int) -> Workspace:
    """A workspace of one block, from a measured number of bytes."""
    return Workspace(after=(num_bytes,) if num_bytes > 0 else ())


def _of_forward(recording: Recording) -> list[RawSaved]:
    """Tensors that forward saves, in the order of saving.

    Tensors saved by a recomputed forward inside backward, as of torch's reentrant
    checkpoint, only extend the lifetime of their storage.
    """
    for saved in recording.saved:
        if saved.at > recording.num_forward:
            raw = recording.storages[saved.storage]
            if raw.last != STILL_ALIVE:
                raw.last = max(raw.last, saved.done)
    mine = [one for one in recording.saved if one.at <= recording.num_forward]
    for saved in mine:
        for use in saved.uses:
            if use.wanted > use.used:  # its node freed it and ran no op on it
                use.wanted = use.used = max(use.used, recording.num_forward)
                saved.done = max(saved.done, use.used)
    return sorted(mine, key=lambda one: one.at)


def _kept_backwards(saves: Iterable[RawSaved]) -> Iterator[tuple[int, int]]:
    """Ops [start, stop) of the backwards that keep the graph."""
    wanted: dict[int, list[int]] = {}
    for use in chain.from_iterable(one.uses for one in saves):
        if use.kept != NOT_KEPT:
            wanted.setdefault(use.kept, []).append(use.wanted)
    for _, found in sorted(wanted.items()):
        yield min(found), max(found) + 1


def _storage(recording: Recording, number: int) -> Storage:
    raw = recording.storages[number]
    last = len(recording.ops) if raw.last == STILL_ALIVE else raw.last
    kind, maker = raw.kind, raw.maker
    return Storage(raw.bytes, kind, maker, max(last, maker), _type(raw.tensor))


def _type(tensor: TensorMeta | None) -> TensorType | None:
    if tensor is None:
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorType(dtype, tensor.shape)


def _name_activations(recording: Recording) -> None:
    """Mark temporaries as activations if they are saved or outlive forward."""
    for saved in recording.saved:
        if recording.storages[saved.storage].kind == "temporary":
            recording.storages[saved.storage].kind = "activation"
    for raw in recording.storages:
        made_in_forward = 0 <= raw.maker < recording.num_forward
        outlives = raw.last == STILL_ALIVE or raw.last >= recording.num_forward
        if raw.kind == "temporary" and made_in_forward and outlives:
            raw.kind = "activation"


def _calls(
    recording: Recording, renamed: Sequence[int]
) -> tuple[tuple[Call, ...], dict[int, int]]:
    """Calls that ran an op, and the graph's number of every recorded call."""
    number = {OUTSIDE_CALLS: OUTSIDE_CALLS}
    calls: list[Call] = []
    counts: list[int] = []  # of functions, in calls of the graph
    for index, raw in enumerate(recording.calls):
        parent = number[raw.parent]
        if raw.stop == raw.start:
            number[index] = parent
            if parent != OUTSIDE_CALLS:
                counts[parent] += raw.functions or 0
            continue
        number[index] = len(calls)
        counts.append(raw.functions or 0)
        given, state = (
            tuple(renamed[storage] for storage in group)
            for group in (raw.given, raw.state)
        )
        span = raw.start, raw.stop
        calls.append(Call(raw.fqn, raw.number, parent, *span, raw.module, given, state))
    if any(counts):  # else nobody counted
        counted = zip(calls, counts, strict=True)
        calls = [replace(call, functions=count) for call, count in counted]
    return tuple(calls), number
