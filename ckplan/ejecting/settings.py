"""Express a plan as settings of other tools: transformers, DeepSpeed, Megatron-LM.

Each tool reruns whole layers, chosen by one or two numbers. The simulator tries the
possible settings. The cheapest one that fits the plan's budget is chosen, or the one
with the smallest peak if none fits.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from operator import itemgetter
from typing import TypeAlias

from ckplan.ejecting.code import limit_of, peak_and_overhead, torch_can_rerun
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.hazards import refuse_torch_rerun, updates_statistics_twice
from ckplan.plan.plan import Plan, Prediction
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import resolve
from ckplan.plan.updates import group_size_of, with_planned_update
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.baselines import (
    EXHAUSTIVE_MAX_LAYERS,
    cheapest_or_smallest,
    find_repeated_layers,
    min_regions_to_fit,
    run_lengths,
)
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.menu import Menus
from ckplan.units import format_bytes

_NEEDS = {
    "transformers": "a model of transformers whose layers are these; numbers beyond 1 "
    "need transformers 5",
    "deepspeed": "a PipelineModule of these layers, or a model that calls "
    "deepspeed.checkpointing.checkpoint for each of them",
    "megatron": "the same layers in Megatron-LM, in one pipeline stage",
}
TOOLS = tuple(_NEEDS)
_ALL = slice(None)


@dataclass(frozen=True)
class Setting:
    """A setting of a tool, its regions and its predicted timelines."""

    tool: str
    text: str  # to copy into a script or file
    regions: tuple[Region, ...]
    timeline: Timeline
    planned: Timeline  # of the original plan
    limit: MemoryLimit
    same: bool  # whether the setting equals the plan
    updates_twice: bool  # running statistics
    predicted: Prediction | None = None  # by the plan itself
    groups: str | None = None  # size of those that the optimizer updates
    in_tiles: tuple[str, ...] = ()  # calls

    @property
    def fits(self) -> bool:
        """Whether its peak is within the plan's budget."""
        return self.limit.allows(self.timeline)

    def about(self) -> Iterator[str]:
        """Yield notes on the setting, one line each."""
        predicted = self.predicted if self.same else None
        yield f"predicted: peak {peak_and_overhead(self.timeline, predicted)}"
        if not self.same:
            planned = peak_and_overhead(self.planned, self.predicted)
            yield f"the plan itself, beyond {self.tool}: peak {planned}"
        if not self.fits:
            limit = format_bytes(self.limit.bytes)
            yield f"it does NOT fit {limit}: nothing that {self.tool} can say does"
        if self.updates_twice:
            yield "running statistics are updated twice a step; gradients are the same"
        if self.groups is not None:
            grouped = f"ckplan.update_in_groups(optimizer, {self.groups!r})"
            yield f"left out, but in these figures: {grouped}; --as torch has it"
        if any(effect.moved for effect in self.planned.effects):
            yield f"left out: the plan also moves tensors; {self.tool} recomputes them"
        if self.in_tiles:
            yield f"left out: the plan runs {', '.join(self.in_tiles)} in tiles"
        yield f"needs {_NEEDS[self.tool]}"


def setting_for(graph: Graph, plan: Plan, tool: str) -> Setting:
    """Find the setting of a tool that comes nearest to a plan.

    Args:
        graph: The step of the model.
        plan: The plan to express.
        tool: One of ``TOOLS``.

    Raises:
        PlanError: The plan belongs to another model, or the model has no layers that
            the tool can rerun.
    """
    graph = with_planned_update(graph, plan)
    simulator = Simulator(graph)
    regions = tuple(resolve(plan, graph))
    if not regions:
        raise PlanError(
            f"cannot express the plan as settings of {tool}: it recomputes nothing",
            needed="a plan with regions",
            hint="a smaller budget: ckplan solve --budget 80%",
        )
    planned = simulator.run(regions)
    layers = _by_forward(graph, find_repeated_layers(graph, Menus(simulator)))
    if not layers:
        raise PlanError(
            f"cannot express the plan as settings of {tool}: {graph.model} has no "
            "layers, "
            "modules of one type after one another",
            needed="a model made of layers",
            hint="--as torch, which takes any set of modules",
        )
    limit = limit_of(plan, planned)
    target = _Target(simulator, layers, regions, limit)
    candidates: list[tuple[str, tuple[Region, ...], Timeline]] = []
    refused: PlanError | None = None
    for text, chosen in _CHOICES[tool](target):
        try:
            for region in chosen:
                refuse_torch_rerun(graph, region)
            candidates.append((text, chosen, simulator.run(chosen)))
        except PlanError as error:
            refused = error
    if not candidates:
        assert refused is not None
        raise refused
    same = [one for one in candidates if set(one[1]) == set(regions)]
    best = cheapest_or_smallest(same or candidates, limit, itemgetter(2))
    twice = updates_statistics_twice(graph, best[1])
    return Setting(
        *(tool, *best, planned, limit, bool(same), twice, plan.predicted),
        groups=group_size_of(plan),
        in_tiles=plan.calls_in_tiles,
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The plan that a setting should come near."""

    simulator: Simulator
    layers: Sequence[Sequence[int]]  # in each forward of the step
    planned: Sequence[Region]
    limit: MemoryLimit

    @property
    def num_layers(self) -> int:
        """How many a forward calls."""
        return max(map(len, self.layers))

    def rerun(self, which: slice = _ALL) -> tuple[Region, ...]:
        """Some of the layers, each by itself, in every forward."""
        chosen = chain.from_iterable(layers[which] for layers in self.layers)
        return tuple(Region(layer, RERUN) for layer in chosen)

    def chunks(self, size: int) -> tuple[Region, ...]:
        """Runs of ``size`` layers; the last run of a forward may be shorter."""
        chunks = (
            layers[start : start + size]
            for layers in self.layers
            for start in range(0, len(layers), size)
        )
        return tuple(
            Region(chunk[0], RERUN, last=chunk[-1] if len(chunk) > 1 else None)
            for chunk in chunks
        )

    def first(self) -> set[int]:
        """Numbers of layers to try for a rerun of the first n layers, but not of all.

        A deep model tries two numbers only: the fewest that fit, and the plan's own.
        """
        most, times = self.num_layers - 1, len(self.layers)
        if most < EXHAUSTIVE_MAX_LAYERS:
            return {*range(1, most + 1)}
        can_be_done = partial(torch_can_rerun, self.simulator)
        in_order = (r for n in range(most) for r in self.rerun(slice(n, n + 1)))
        able = [*takewhile(can_be_done, in_order)]
        least_bytes = self.simulator.run(able).peak_bytes
        limit = MemoryLimit(max(self.limit.bytes, least_bytes))
        needed = -(-min_regions_to_fit(self.simulator, able, limit) // times)
        return {max(1, needed), min(max(1, len(self.planned) // times), most)}


_Choices: TypeAlias = Iterator[tuple[str, tuple[Region, ...]]]


def _by_forward(graph: Graph, layers: Sequence[int]) -> list[list[int]]:
    """Layers by the forward of the model that calls them; a tool reruns all alike."""
    roots = [number for number, call in enumerate(graph.calls) if not call.fqn]
    found: dict[int, list[int]] = {}
    for layer in layers:
        found.setdefault(bisect_right(roots, layer), []).append(layer)
    return [*found.values()]


def _transformers(target: _Target) -> _Choices:
    """Every n-th layer, starting with the first."""
    plain = 'model.gradient_checkpointing_enable({"use_reentrant": False})\n'
    yield plain, target.rerun()
    for step in range(2, target.num_layers + 1):
        text = f"model.activation_checkpointing_enable(every_n_layers={step})\n"
        yield text, target.rerun(slice(None, None, step))


def _deepspeed(target: _Target) -> _Choices:
    """Chunks of n layers."""
    for size in run_lengths(target.num_layers):
        chosen = target.chunks(size)
        content = {
            "activation_checkpointing": {
                "partition_activations": False,
                "contiguous_memory_optimization": False,
                "cpu_checkpointing": False,
                "number_checkpoints": len(chosen) // len(target.layers),
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            },
            "pipeline": {"activation_checkpoint_interval": size},
        }
        yield json.dumps(content, indent=2) + "\n", chosen


def _megatron(target: _Target) -> _Choices:
    """The first n layers (block), or chunks of n layers (uniform)."""
    start = "--recompute-granularity full --recompute-method"
    lengths, first = run_lengths(target.num_layers), target.first()
    for size in sorted({*lengths, *first}):
        number = f"--recompute-num-layers {size}\n"
        if size in lengths:
            yield f"{start} uniform {number}", target.chunks(size)
        if size in first:
            yield f"{start} block {number}", target.rerun(slice(size))


_CHOICES = {
    "transformers": _transformers,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}
