"""Profile a workload: build it, record one step, measure its ops.

The workload is first built under fake tensors. They have shapes and no bytes, so a
model larger than the machine's memory can be profiled. If the model needs real values,
the step runs on real tensors instead, and a note of the graph says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ckplan.applying import remove
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import MEASURED
from ckplan.graph.sharding import Sharding, sharded
from ckplan.simulating.peers import peer_rate
from ckplan.tracing.build import build_graph
from ckplan.tracing.copying import copied
from ckplan.tracing.costs.apply_overhead import on_host
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import CostCache, cost_cache
from ckplan.tracing.cuda.memory import in_allocator_blocks
from ckplan.tracing.faking.hollow import without_content
from ckplan.tracing.hazards.nondeterminism import with_nondeterminism_hazards
from ckplan.tracing.other_steps import OtherSteps
from ckplan.tracing.recording.side_effects import preserve_rng_state
from ckplan.tracing.seconds import coding_costs_of, costs_of, engine_costs_of
from ckplan.tracing.smaller_batches import DoesNotFitError, profile_smaller_batches
from ckplan.tracing.steps.measured import phases_in_step, with_seconds_in_step
from ckplan.tracing.steps.tiled_bits import with_tested_tiles
from ckplan.tracing.steps.tiled_row_bits import with_tested_rows
from ckplan.tracing.target import TraceTarget, find_target
from ckplan.tracing.trace import trace, trace_on_real_tensors
from ckplan.tracing.watched_step import BuildWorkload, FakeScope, TracedStep
from ckplan.training.fingerprint import fingerprint
from ckplan.training.free_memory import empty_cache_after
from ckplan.training.loading import WorkloadSpec
from ckplan.training.randomness import seed_everything
from ckplan.training.remembered import describe_workload
from ckplan.training.step import DEFAULT_TRAINING, Training, amp_name
from ckplan.training.workload import (
    Workload,
    as_workload,
    check_not_lazy,
    on_device,
    with_batch_dim,
)


def profile_workload(
    spec: WorkloadSpec,
    *,
    training: Training = DEFAULT_TRAINING,
    device: str | None = None,
    gpu: str | None = None,
    host: float = 1.0,
    fresh: bool = False,
    replay: bool = True,
    check: bool = True,
    in_step: bool | OtherSteps | None = None,
    seed: int = 0,
    change: Callable[[Workload], Workload] | None = None,
    progress: Progress | None = None,
) -> Graph:
    """Profile a workload that a file defines.

    Args:
        spec: Where the workload comes from.
        training: Options of the step.
        device: The device that the step is planned for: ``cpu`` or ``cuda``; ``cuda``
            needs no GPU and is the default if a card is named.
        gpu: A card of ``ckplan gpus``; its roofline replaces measured seconds.
        host: Speed of the processor that will launch the step on a GPU, relative to
            the one of this machine: 2 is twice as fast.
        fresh: Measure ops again that the cost cache already knows.
        replay: Run the forward of a small model twice, to find nondeterminism.
        check: Compare the path of fake tensors with a forward on plain ones.
        in_step: Take steps on the CPU, with plans and without, so that seconds are
            those of a real step; by default if that takes a few seconds. Given steps
            that were measured already, the same of others only.
        seed: Seed of all random generators; ``verify`` takes the same step for the
            same seed.
        change: Changes the workload once it is built, such as the length of its batch.
        progress: Called with the progress of the work.

    Raises:
        CkplanError: The card or the device does not exist.
        WorkloadError: The workload cannot be built or trained.
    """
    target = find_target(device or ("cpu" if gpu is None else "cuda"), gpu, host)
    make = spec.load()  # imports happen outside of fake tensors

    def build(scope: FakeScope | None) -> Workload:
        del scope
        seed_everything(seed)
        return change(make()) if change else make()

    with left_as_it_is(target):
        graph = _profile(
            build, training, target, fresh, replay, check, in_step, progress
        )
    known = describe_workload(spec, seed)
    more: dict[str, Any] = {"workload": known} if known else {}
    return replace(graph, options={**graph.options, **more})


def profile(
    model: nn.Module,
    batch: Any,
    *,
    target: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    step: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: str | None = None,
    amp: str | torch.dtype | None = None,
    accumulate: int = 1,
    device: str | torch.device | None = None,
    clip: float | None = None,
    scaler: bool = False,
    gpu: str | None = None,
    host: float = 1.0,
    replay: bool = True,
    check: bool = True,
    in_step: bool | OtherSteps | None = None,
    shard: str | None = None,
    world_size: int = 1,
    units: Sequence[str] = (),
    batch_dim: int | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Graph:
    """Profile one training step of a model, leaving the model as it is.

    Args:
        model: The model in its training mode; a copy of it is traced.
        batch: Inputs of the model; a mapping is passed as keyword arguments, a tuple
            or list as positional ones.
        target: What only the loss gets, such as labels.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output, batch)`` without a
            target; by default ``output.loss``, the only scalar of the output, or the
            sum of its floating tensors.
        step: ``step(model, batch)``, which returns the loss; instead of ``loss_fn``.
        loss: The earlier name of ``loss_fn``.
        optimizer: ``adamw`` by default; ``adam``, ``sgd``, ``momentum``,
            ``adafactor``, ``adamw8bit`` or ``none``. With ``:foreach``, ``:fused`` or
            ``:single`` that implementation of torch, instead of torch's default.
        amp: ``bf16``, ``fp16`` or its dtype: forward and loss run under autocast.
        accumulate: Backwards per optimizer step; the last one is profiled.
        device: The device that the step is planned for; by default the model's device,
            or ``cuda`` if a card is named. ``cuda`` needs no GPU.
        clip: Largest total norm of the gradients, as of ``clip_grad_norm_``.
        scaler: Whether a gradient scaler scales the loss.
        gpu: A card of ``ckplan gpus``; its roofline replaces measured seconds.
        host: Speed of the processor that will launch the step on a GPU, relative to
            the one of this machine: 2 is twice as fast.
        replay: Run the forward of a small model twice, to find nondeterminism.
        check: Compare the path of fake tensors with a forward on plain ones.
        in_step: Take steps on the CPU, with plans and without, so that seconds are
            those of a real step; by default if that takes a few seconds. Given steps
            that were measured already, the same of others only.
        shard: Profile the step of one rank under ``ddp``, ``zero1``, ``zero2``,
            ``zero3`` or ``fsdp2``; see ``ckplan.shard``.
        world_size: Number of ranks.
        units: Modules that are gathered as one unit; by default the layers.
        batch_dim: The dimension of the batch's tensors that counts rows; 0 by default.
            ``fit`` names rows of it, and batches that do not fit are cut there.
        fresh: Measure ops again that the cost cache already knows.
        progress: Called with the progress of the work.

    Returns:
        The recorded step.

    Raises:
        CkplanError: The card or device does not exist, or the step cannot be sharded
            in this way.
        WorkloadError: The model cannot be trained on this batch.
    """
    if world_size != 1 and not shard:
        raise CkplanError(
            f"cannot profile a rank of {world_size} without a scheme",
            needed="how the state of training is divided among them",
            hint="shard='fsdp2'",
        )
    sharding = Sharding(shard, world_size, tuple(units)) if shard else None
    given = {"target": target, "loss_fn": loss_fn, "step": step, "loss": loss}
    given = {key: value for key, value in given.items() if value is not None}
    name = "the call of profile()"
    workload = as_workload({"model": model, "batch": batch, **given}, name)
    workload = with_batch_dim(workload, batch_dim)
    check_not_lazy(model, "profile")
    here = next((str(p.device) for p in model.parameters()), "cpu")
    place = find_target(device or (here if gpu is None else "cuda"), gpu, host)

    build = partial(copied, workload)
    training = Training(optimizer, amp_name(amp), accumulate, clip, scaler)
    with left_as_it_is(place):
        graph = _profile(
            build, training, place, fresh, replay, check, in_step, progress
        )
    if batch_dim:
        options: dict[str, Any] = {**graph.options, "batch_dim": batch_dim}
        graph = replace(graph, options=options)
    return sharded(graph, sharding, peer_rate(graph)) if sharding else graph


@contextmanager
def left_as_it_is(target: TraceTarget) -> Iterator[None]:
    """A scope that restores random states and frees cached GPU memory at its end."""
    target.begin()
    with preserve_rng_state(), empty_cache_after(target.placed):
        yield


def _profile(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    fresh: bool,
    replay: bool,
    check: bool,
    in_step: bool | OtherSteps | None,
    progress: Progress | None,
) -> Graph:
    cache = cost_cache(target.placed, fresh=fresh)
    tell = progress or (lambda what, done, total: None)
    known = in_step if isinstance(in_step, OtherSteps) else None

    def unplanned(scope: FakeScope | None) -> Workload:
        workload = build(scope)
        remove(workload.model)
        return workload

    tell("tracing", 0, 0)
    traced = partial(trace, unplanned, training, target, check=check)
    measured = partial(
        as_graph, training=training, target=target, cache=cache, progress=progress
    )
    try:
        if known is None:
            graph = measured(traced())
        else:
            graph = known.recorded(training, target, traced, measured, check=check)
        too_large = None
    except DoesNotFitError as error:
        too_large = error.without_traceback()  # its frames must not keep memory
    if too_large is not None:
        tell("tracing smaller batches", 0, 0)
        graph = profile_smaller_batches(
            unplanned,
            lambda smaller: trace_on_real_tensors(
                smaller, training, target, too_large.needed
            ),
            measured,
            lambda workload: fingerprint(workload, target.device)["batch"],
            too_large,
        )
    if not target.is_here:
        return graph

    def real() -> Workload:
        return on_device(unplanned(None), target.placed)

    if replay:
        tell("running forward twice", 0, 0)
        place = target.placed
        graph = with_nondeterminism_hazards(graph, real, training, place)
    if target.gpu or too_large:
        return graph
    return _measured_whole(graph, real, training, target, cache, in_step, progress)


def _measured_whole(
    graph: Graph,
    real: Callable[[], Workload],
    training: Training,
    target: TraceTarget,
    cache: CostCache,
    in_step: bool | OtherSteps | None,
    progress: Progress | None,
) -> Graph:
    """A graph with what more than single ops shows: bits of tiles, whole steps."""
    known = in_step if isinstance(in_step, OtherSteps) else None
    if known is None:
        graph = with_tested_tiles(graph, target.placed, cache, progress)
        build = partial(without_content, real, target.placed)
        graph = with_tested_rows(graph, build, target.placed, cache, progress)
    if target.device.type != "cpu" or in_step is False:
        return graph
    step = graph, real, training, cache
    measured = partial(
        with_seconds_in_step,
        *step,
        asked=known is None and bool(in_step),
        progress=progress,
    )
    if known is None:
        return measured()
    phases = partial(phases_in_step, *step)
    return known.taken_into(graph, training.optimizer, measured, phases)


def as_graph(
    traced: TracedStep,
    training: Training,
    target: TraceTarget,
    cache: CostCache,
    progress: Progress | None,
) -> Graph:
    """Measure the ops of a recorded step and build its graph."""
    costs, notes = costs_of(traced.recording, target, cache, progress)
    options, gpu = training.as_options(), target.gpu
    if traced.own_optimizer:
        options["optimizer"] = "own"
    graph = build_graph(
        traced.recording,
        costs,
        coding_costs_of(traced.recording, target, cache),
        model=traced.model,
        fingerprint=traced.fingerprint,
        options=options if gpu is None else {**options, "gpu": gpu.name},
        notes=[*traced.notes, *notes, *cache.notes],
        cost_source=MEASURED if gpu is None else f"roofline {gpu.name}",
        engine=engine_costs_of(traced.recording, target, cache),
    )
    if target.device.type == "cuda":
        return in_allocator_blocks(on_host(graph, target.host), target.capability)
    return graph
