"""Profile a workload: build it, run one step under watch, measure its ops.

Everything is built under fake tensors first, which have shapes and no bytes, so that a
model larger than the machine can be profiled. Where the model wants to see real values,
the step is run again on real ones, and the graph says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode

from ckplan.applying import remove
from ckplan.graph.graph import Graph
from ckplan.graph.records import MEASURED, EngineCosts
from ckplan.graph.sharding import Sharding, sharded
from ckplan.tracing.build import build_graph, encodable_outputs
from ckplan.tracing.costs.apply_overhead import calibrate_engine
from ckplan.tracing.costs.calibrate import (
    EncodingCost,
    Progress,
    calibrate,
    calibrate_encodings,
)
from ckplan.tracing.costs.cost_cache import Cost, CostCache, cost_cache
from ckplan.tracing.costs.roofline import roofline, roofline_encodings
from ckplan.tracing.cuda.memory import in_allocator_blocks, with_workspaces
from ckplan.tracing.hazards.nondeterminism import with_nondeterminism_hazards
from ckplan.tracing.recording.recording import Recording, TensorMeta
from ckplan.tracing.recording.side_effects import preserve_rng_state
from ckplan.tracing.smaller_batches import DoesNotFitError, profile_smaller_batches
from ckplan.tracing.target import TraceTarget, find_target
from ckplan.tracing.trace import (
    BuildWorkload,
    FakeScope,
    TracedStep,
    trace,
    trace_on_real_tensors,
)
from ckplan.training.fingerprint import fingerprint
from ckplan.training.free_memory import empty_cache_after
from ckplan.training.loading import WorkloadSpec
from ckplan.training.randomness import seed_everything
from ckplan.training.step import DEFAULT_TRAINING, Training
from ckplan.training.workload import (
    Workload,
    as_workload,
    check_not_lazy,
    on_device,
    tensors_of,
)

NOTE_SECONDS = "seconds and workspaces: each distinct op measured alone on this machine"
NOTE_ROOFLINE = "seconds: the least that the card needs; workspaces are not counted"
NOTE_SOME_WORKSPACES = (
    "seconds: the least that the card needs; bytes: in blocks of 512, with the "
    "workspaces of kernels and of cuBLAS, not those of cuDNN"
)
NOTE_CPU_BYTES = "bytes: as on a CPU, where kernels keep other tensors than on a card"


def profile_workload(
    spec: WorkloadSpec,
    *,
    training: Training = DEFAULT_TRAINING,
    device: str | None = None,
    gpu: str | None = None,
    fresh: bool = False,
    replay: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Graph:
    """Profile what a file offers.

    Args:
        spec: Where the workload comes from.
        training: How it is trained.
        device: Where the step is to run: ``cpu``, or ``cuda``, with a GPU or without;
            by default ``cuda`` if a card is named.
        gpu: A card of ``ckplan gpus``, whose roofline stands in for measured seconds.
        fresh: Measure ops again that were measured on this machine before.
        replay: Run the forward of a small model twice, to find what differs then.
        seed: Of every random number: a step that follows them is the one that
            ``verify`` takes.
        progress: Told how far the work has come.

    Raises:
        CkplanError: There is no such card or device.
        WorkloadError: The workload cannot be built or trained.
    """
    target = find_target(device or ("cpu" if gpu is None else "cuda"), gpu)
    make = spec.load()  # imports happen outside of fake tensors

    def build(scope: FakeScope | None) -> Workload:
        del scope
        seed_everything(seed)
        return make()

    with _left_as_it_is(target):
        return _profile(build, training, target, fresh, replay, progress)


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: str | None = None,
    amp: str | None = None,
    accumulate: int = 1,
    device: str | None = None,
    clip: float | None = None,
    scaler: bool = False,
    gpu: str | None = None,
    replay: bool = True,
    shard: str | None = None,
    world_size: int = 1,
    units: Sequence[str] = (),
    fresh: bool = False,
    progress: Progress | None = None,
) -> Graph:
    """Profile one training step of a model, leaving the model as it is.

    Args:
        model: In the mode it is trained in; a copy of it is traced.
        batch: A mapping is passed as keywords, a tuple or list as positionals.
        loss: ``loss(output, batch)``; by default ``output.loss``, a scalar output, or
            the sum of the output's floating tensors.
        optimizer: ``adamw`` by default; ``adam``, ``sgd``, ``momentum``,
            ``adafactor``, ``adamw8bit`` or ``none``. With ``:foreach``, ``:fused`` or
            ``:single`` one of torch's kernels, if not what torch chooses.
        amp: ``bf16`` or ``fp16``: forward and loss run under autocast.
        accumulate: Backwards before the optimizer takes a step; the last is profiled.
        device: Where the step is to run, by default where the model is, or on the card
            that is named; ``cuda`` needs
            no GPU.
        clip: Largest norm of all gradients together: ``clip_grad_norm_``.
        scaler: Whether the loss goes through a gradient scaler.
        gpu: A card of ``ckplan gpus``, whose roofline stands in for measured seconds.
        replay: Run the forward of a small model twice, to find what differs then.
        shard: The step of one of several ranks: ``ddp``, ``zero1``, ``zero2``,
            ``zero3`` or ``fsdp2``; see ``ckplan.shard``.
        world_size: How many ranks there are.
        units: Modules that are gathered as one, if not the layers.
        fresh: Measure ops again that were measured on this machine before.
        progress: Told how far the work has come.

    Returns:
        The recorded step.

    Raises:
        CkplanError: There is no such card or device, or it cannot be sharded so.
        WorkloadError: The model cannot be trained on this batch.
    """
    sharding = Sharding(shard, world_size, tuple(units)) if shard else None
    workload = as_workload((model, batch, loss), "the call of profile()")
    check_not_lazy(model, "profile")
    here = next((str(p.device) for p in model.parameters()), "cpu")
    target = find_target(device or (here if gpu is None else "cuda"), gpu)

    def build(scope: FakeScope | None) -> Workload:
        real = (workload.model, workload.batch)
        if scope is None:
            model, batch = copy.deepcopy(real)
        else:
            fake, known = scope
            with FakeCopyMode(fake):
                model, batch = copy.deepcopy(real, _generators_of(workload.model))
            known.learn_all(_values_of(model, batch), _values_of(*real))
        return Workload(model, batch, workload.loss)

    training = Training(optimizer, amp, accumulate, clip, scaler)
    with _left_as_it_is(target):
        graph = _profile(build, training, target, fresh, replay, progress)
    return sharded(graph, sharding) if sharding else graph


@contextmanager
def _left_as_it_is(target: TraceTarget) -> Iterator[None]:
    """Random states stay as they are, and a GPU has the memory that it had."""
    target.begin()
    with preserve_rng_state(), empty_cache_after(target.placed):
        yield


def _generators_of(model: nn.Module) -> dict[int, Any]:
    """What ``deepcopy`` takes for them: their states are real tensors."""
    held = (value for module in model.modules() for value in vars(module).values())
    found = (value for value in held if isinstance(value, torch.Generator))
    return {id(one): one.clone_state() for one in found}


def _values_of(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    return [*model.buffers(), *tensors_of(batch)]


def _profile(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    fresh: bool,
    replay: bool,
    progress: Progress | None,
) -> Graph:
    cache = cost_cache(target.placed, fresh=fresh)
    tell = progress or (lambda what, done, total: None)

    def unplanned(scope: FakeScope | None) -> Workload:
        workload = build(scope)
        remove(workload.model)
        return workload

    tell("tracing", 0, 0)
    try:
        traced, too_large = trace(unplanned, training, target), None
    except DoesNotFitError as error:
        too_large = (
            error.without_traceback()
        )  # what failed must not hold memory any more
    if too_large is None:
        graph = _as_graph(traced, training, target, cache, progress)
    else:
        tell("tracing smaller batches", 0, 0)
        graph = profile_smaller_batches(
            unplanned,
            lambda smaller: trace_on_real_tensors(
                smaller, training, target, too_large.needed
            ),
            lambda traced: _as_graph(traced, training, target, cache, progress),
            lambda workload: fingerprint(workload, target.device)["batch"],
            too_large,
        )
    if not (replay and target.is_here):
        return graph
    tell("running forward twice", 0, 0)
    return with_nondeterminism_hazards(
        graph,
        lambda: on_device(unplanned(None), target.placed),
        training,
        target.placed,
    )


def _as_graph(
    traced: TracedStep,
    training: Training,
    target: TraceTarget,
    cache: CostCache,
    progress: Progress | None,
) -> Graph:
    """Measure what was recorded, and put both together."""
    costs, notes = _costs(traced.recording, target, cache, progress)
    options, gpu = training.as_options(), target.gpu
    graph = build_graph(
        traced.recording,
        costs,
        _coding_costs(traced.recording, target, cache),
        model=traced.model,
        fingerprint=traced.fingerprint,
        options=options if gpu is None else {**options, "gpu": gpu.name},
        notes=[*traced.notes, *notes, *cache.notes],
        cost_source=MEASURED if gpu is None else f"roofline {gpu.name}",
        engine=_engine_costs(traced.recording, target, cache),
    )
    if target.device.type == "cuda":
        return in_allocator_blocks(graph, target.capability)
    return graph


def _costs(
    recording: Recording,
    target: TraceTarget,
    cache: CostCache,
    progress: Progress | None,
) -> tuple[list[Cost], list[str]]:
    """What every op costs, and what a reader must know of that."""
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


def _engine_costs(
    recording: Recording, target: TraceTarget, cache: CostCache
) -> EngineCosts:
    """What our own part costs; of other machines than this one it is not known."""
    if target.gpu is not None:
        return EngineCosts()
    forward = recording.ops[: recording.num_forward]
    return calibrate_engine(forward, target.device, cache)


def _coding_costs(
    recording: Recording, target: TraceTarget, cache: CostCache
) -> dict[tuple[str, TensorMeta], EncodingCost]:
    forms = ((form, meta) for _, _, form, meta in encodable_outputs(recording))
    encoding_costs = calibrate_encodings(forms, target.placed, cache)
    return (
        encoding_costs
        if target.gpu is None
        else roofline_encodings(encoding_costs, target.gpu)
    )
