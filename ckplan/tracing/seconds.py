"""Seconds of a recorded step: of its ops, encodings, and the engine."""

from __future__ import annotations

from ckplan.graph.records import EngineCosts
from ckplan.tracing.build import encodable_outputs
from ckplan.tracing.costs.apply_overhead import calibrate_engine
from ckplan.tracing.costs.calibrate import (
    EncodingCost,
    Progress,
    calibrate,
    calibrate_encodings,
)
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.tracing.costs.roofline import roofline, roofline_encodings
from ckplan.tracing.cuda.memory import with_workspaces
from ckplan.tracing.recording.recording import Recording, TensorMeta
from ckplan.tracing.target import TraceTarget

NOTE_SECONDS = "seconds and workspaces: each distinct op measured alone on this machine"
NOTE_ROOFLINE = "seconds: the least that the card needs; workspaces are not counted"
NOTE_SOME_WORKSPACES = (
    "seconds: the least that the card needs; bytes: in blocks of 512, with the "
    "workspaces of kernels and of cuBLAS, not those of cuDNN and cuFFT"
)
NOTE_CPU_BYTES = "bytes: as on a CPU, where kernels keep other tensors than on a card"


def costs_of(
    recording: Recording,
    target: TraceTarget,
    cache: CostCache,
    progress: Progress | None,
) -> tuple[list[Cost], list[str]]:
    """The cost of every op, and notes on how the costs were found."""
    ops, gpu = recording.ops, target.gpu
    if gpu is not None and target.device.type == "cuda":
        return with_workspaces(ops, roofline(ops, gpu), gpu), [NOTE_SOME_WORKSPACES]
    if gpu is not None:
        return roofline(ops, gpu), [NOTE_ROOFLINE, NOTE_CPU_BYTES]
    costs, notes = calibrate(ops, target.device, progress, cache), [NOTE_SECONDS]
    if not all(cost.measured for cost in costs):
        some = sum(not cost.measured for cost in costs)
        notes.append(f"seconds of {some} ops scaled from the others, not measured")
    return costs, notes


def engine_costs_of(
    recording: Recording, target: TraceTarget, cache: CostCache
) -> EngineCosts:
    """Measure the overhead of ckplan's engine on the processor of this machine."""
    forward = recording.ops[: recording.num_forward]
    kernels_on_cpu = target.device.type == "cpu" and target.gpu is None
    evicting = forward if kernels_on_cpu else ()
    return calibrate_engine(evicting, target.device, cache)


def coding_costs_of(
    recording: Recording, target: TraceTarget, cache: CostCache
) -> dict[tuple[str, TensorMeta], EncodingCost]:
    """Seconds and bytes of encoding tensors, and of decoding them."""
    forms = ((form, meta) for _, _, form, meta in encodable_outputs(recording))
    encoding_costs = calibrate_encodings(forms, target.placed, cache)
    return (
        encoding_costs
        if target.gpu is None
        else roofline_encodings(encoding_costs, target.gpu)
    )
