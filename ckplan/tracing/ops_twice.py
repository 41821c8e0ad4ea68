"""Run each op of a recorded forward twice, alone, and find those whose results differ.

A running loop cannot run its forward twice, as `profile` does: that could change what
the loop computes. Kernels that are not deterministic are found all the same, on
made-up values. State that calls keep outside modules and tensors is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS, Hazard
from ckplan.tracing.costs.op_arguments import arguments, input_bytes
from ckplan.tracing.hazards.from_recording import NO_WAY
from ckplan.tracing.hazards.nondeterminism import equal_bits
from ckplan.tracing.recording.recording import RawOp, Recording
from ckplan.training.uninitialized import returns_uninitialized

NOTE_SAME = (
    "each op of forward run twice alone, on made-up values: every bit the same; "
    "modules were not run twice, as that can change a running loop"
)
NOTE_DIFFERENT = (
    "each op of forward run twice alone, on made-up values: some differ, see hazards"
)
_MOST_FLOPS, _MOST_BYTES = 1 << 32, 1 << 28  # of one op


def with_chance_hazards(
    graph: Graph, recording: Recording, device: torch.device
) -> Graph:
    """Add a hazard for each call with an op that gives other values each time.

    Args:
        graph: The graph of the recorded step.
        recording: The recorded step.
        device: Where ops run. Their random numbers are not those of the loop.
    """
    number = {(call.fqn, call.number): i for i, call in enumerate(graph.calls)}
    known: dict[str, bool] = {}
    found: dict[Hazard, None] = {}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        for op in _of_forward(recording):
            key = f"{op.func}{op.args}"
            if key not in known:
                known[key] = _differs(op, device)
            call = recording.calls[op.call]
            place = number.get((call.fqn, call.number))
            if known[key] and place is not None:
                name = op.func.overloadpacket.__name__
                reason = f"{name} gives other values each time"
                found[Hazard(place, "chance", reason, NO_WAY)] = None
    hazards = sorted((*graph.hazards, *found), key=lambda hazard: hazard.call)
    note = NOTE_DIFFERENT if found else NOTE_SAME
    return replace(graph, hazards=tuple(hazards), notes=(*graph.notes, note))


def _of_forward(recording: Recording) -> Iterator[RawOp]:
    for place, op in enumerate(recording.ops):
        if op.call != OUTSIDE_CALLS:
            call = recording.calls[op.call]
            if call.start <= place < call.stop and _can_run_alone(op):
                yield op


def _can_run_alone(op: RawOp) -> bool:
    own = any(isinstance(leaf, torch.Generator) for leaf in op.args)
    small = op.flops <= _MOST_FLOPS and input_bytes(op) <= _MOST_BYTES
    return small and not own and not returns_uninitialized(op.func)


def _differs(op: RawOp, device: torch.device) -> bool:
    try:
        one, other = _ran(op, device), _ran(op, device)
    except Exception:  # made-up values need not suit an op
        return False
    return not all(map(equal_bits, one, other))


def _ran(op: RawOp, device: torch.device) -> list[torch.Tensor]:
    """What an op returns and writes; bytes can be scratch memory, and are left out."""
    torch.manual_seed(0)
    args, kwargs = arguments(op, device)
    for one in _tensors((args, kwargs)):
        # Sums of equal values are the same in every order.
        if one.is_floating_point() and all(one.stride()):
            one.uniform_(0.25, 0.75)
    torch.manual_seed(0)
    with torch.set_grad_enabled(op.in_grad_mode):
        out = op.func(*args, **kwargs)
    seen = _tensors((out, args, kwargs) if op.writes else out)
    return [one.detach() for one in seen if one.dtype != torch.uint8]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
