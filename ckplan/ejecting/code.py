"""Write a plan as plain PyTorch code, without ckplan as a dependency.

The code uses ``torch.utils.checkpoint``, which reruns whole modules. A plan that
rebuilds single ops has no such form. Neither has a plan that reruns modules which only
ckplan can rerun. The code is then the cheapest set of modules to rerun that fits the
same budget. It has its own peak and overhead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.hazards import refuse_torch_rerun, updates_statistics_twice
from ckplan.plan.plan import Plan, Prediction
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import resolve
from ckplan.plan.updates import group_size_of, with_planned_update
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.baselines import (
    can_recompute,
    cheapest_or_smallest,
    find_repeated_layers,
)
from ckplan.solving.chain import regions_of
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.menu import Menus, Option
from ckplan.solving.segmentation import (
    leaf_units,
    pruned_call_tree,
    segmentation_frontier,
    tree_frontier,
)
from ckplan.solving.unit_bytes import Unit
from ckplan.units import format_bytes, format_percent, parse_bytes

_TEMPLATE = '''\
"""Activation checkpointing of {model}, in plain PyTorch.

{about}

    checkpoint_calls(model)
{use}"""

from collections import Counter
{imports}
{torch}from torch import nn
from torch.utils.checkpoint import checkpoint

# Which calls of which modules run again in backward; None: every call.
CALLS = {{
{calls}
}}


def checkpoint_calls(model: nn.Module) -> nn.Module:
    """Make these calls run again in backward; rewrites the model in place."""
    counts = Counter()
{begins}
    for name, numbers in CALLS.items():
        _wrap(model.get_submodule(name), name, numbers, counts)
    return model


def _wrap(module, name, numbers, counts):
    forward = module.forward

    def checkpointed(*args, **kwargs):
        number = counts[name]
        counts[name] += 1
        if numbers is not None and number not in numbers:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed
'''
_ONE_FORWARD = (
    "    model.register_forward_pre_hook(lambda module, args: counts.clear())"
)
_SEVERAL_FORWARDS = """\

    def begins(module, args):
        if torch.is_grad_enabled():
            if counts[None] % {forwards} == 0:  # a step; calls are numbered over it
                counts.clear()
            counts[None] += 1

    model.register_forward_pre_hook(begins)"""
_GROUPS_IMPORTS = "from functools import wraps\nfrom types import MethodType\n"
_GROUPS_TEMPLATE = '''

def update_in_groups(optimizer, most={most}):
    """Let an optimizer update parameters of at most so many bytes at once."""
    step = optimizer.step

    @wraps(step)  # schedulers mark the step that they have seen
    def in_groups(self, closure=None):
        groups = self.param_groups
        self.param_groups = list(_split(groups, most))
        try:
            return step() if closure is None else step(closure)
        finally:
            self.param_groups = groups

    optimizer.step = MethodType(in_groups, optimizer)
    return optimizer


def _split(groups, most):
    for group in groups:
        part, held = [], 0
        for parameter in group["params"]:
            if part and held + parameter.nbytes > most:
                yield {{**group, "params": part}}
                part, held = [], 0
            part.append(parameter)
            held += parameter.nbytes
        yield {{**group, "params": part}}
'''


@dataclass(frozen=True)
class PlainPlan:
    """A plan that torch.utils.checkpoint can carry out."""

    graph: Graph
    plan: Plan  # the original plan
    regions: tuple[Region, ...]  # calls to rerun
    timeline: Timeline  # of `regions`
    planned: Timeline  # of the original plan
    same: bool  # whether `regions` are those of the plan

    @property
    def fits(self) -> bool:
        """Whether the peak fits the plan's budget, or its peak if it has none."""
        return limit_of(self.plan, self.planned).allows(self.timeline)


def plain_form(graph: Graph, plan: Plan) -> PlainPlan:
    """Find the nearest plan that torch.utils.checkpoint can carry out.

    Args:
        graph: The step of the model.
        plan: The plan to write.

    Raises:
        PlanError: The plan belongs to another model.
    """
    graph = with_planned_update(graph, plan)
    simulator = Simulator(graph)
    menus = Menus(simulator)
    regions = resolve(plan, graph)
    planned = simulator.run(regions)
    same = all(r.by == RERUN and _is_safe_in_torch(graph, r) for r in regions)
    if not same:
        limit = limit_of(plan, planned)
        found = _reruns(simulator, menus, limit)
        _, regions = cheapest_or_smallest(found, limit, itemgetter(0))
    return PlainPlan(
        graph,
        plan,
        tuple(regions),
        simulator.run(regions),
        planned,
        same,
    )


def limit_of(plan: Plan, planned: Timeline) -> MemoryLimit:
    """The limit for a replacement: the plan's budget, or its peak without one."""
    budget_bytes = plan.budget_bytes
    return MemoryLimit(planned.peak_bytes if budget_bytes is None else budget_bytes)


def torch_can_rerun(simulator: Simulator, region: Region) -> bool:
    """Whether torch alone can rerun a region with right gradients."""
    return _is_safe_in_torch(simulator.graph, region) and can_recompute(
        simulator, region
    )


def _is_safe_in_torch(graph: Graph, region: Region) -> bool:
    try:
        refuse_torch_rerun(graph, region)
    except PlanError:
        return False
    return True


def _reruns(
    simulator: Simulator, menus: Menus, limit: MemoryLimit
) -> Iterator[tuple[Timeline, tuple[Region, ...]]]:
    """(timeline, regions) of candidate sets of calls to rerun; the empty set first."""

    def whole(unit: Unit) -> list[Option]:
        region = Region(unit[0], RERUN, last=unit[1])
        plain = [region] if _is_safe_in_torch(simulator.graph, region) else []
        return menus.as_options(unit, plain)

    yield simulator.run(), ()
    layers = find_repeated_layers(simulator.graph, menus)
    nodes = pruned_call_tree(simulator.graph, menus)
    covers = ([(layer, None) for layer in layers], list(leaf_units(nodes)))
    chains = [
        segmentation_frontier(simulator, segmentation, whole)
        for segmentation in covers
        if segmentation
    ]
    for chain in (*chains, tree_frontier(simulator, nodes, whole)):
        for bytes_ in (max(limit.bytes, chain.least_bytes), chain.least_bytes):
            for regions in map(regions_of, chain.cheapest_first(bytes_)):
                timeline = simulator.run(regions)
                yield timeline, regions
                if limit.allows(timeline):
                    break
    for segmentation in covers:
        every = [Region(call, RERUN) for call, _ in segmentation]
        done = tuple(region for region in every if torch_can_rerun(simulator, region))
        yield simulator.run(done), done


def as_code(plain: PlainPlan, version: str) -> str:
    """Return the source of a Python module that needs torch alone.

    Args:
        plain: The plan to write.
        version: The version of ckplan, for the header.
    """
    calls = "\n".join(
        f"    {name!r}: {_numbers(numbers)},"
        for name, numbers in _calls_of(plain).items()
    )
    about = "\n".join(_header_lines(plain, version))
    name = plain.graph.model  # a trace may have any text there
    model = name if name.replace(".", "_").isidentifier() else "a model"
    size = group_size_of(plain.plan)
    grouped = "" if size is None else _GROUPS_TEMPLATE.format(most=parse_bytes(size))
    forwards = plain.graph.fingerprint.get("forwards", 1)
    begins = _ONE_FORWARD if forwards == 1 else _SEVERAL_FORWARDS
    return (
        _TEMPLATE.format(
            model=model,
            about=about,
            calls=calls,
            use="    update_in_groups(optimizer)\n" if grouped else "",
            imports=_GROUPS_IMPORTS if grouped else "",
            torch="" if forwards == 1 else "import torch\n",
            begins=begins.format(forwards=forwards),
        )
        + grouped
    )


def _numbers(numbers: Sequence[int] | None) -> str:
    return "None" if numbers is None else f"{{{', '.join(map(str, numbers))}}}"


def _calls_of(plain: PlainPlan) -> Mapping[str, Sequence[int] | None]:
    """FQN -> numbers of the calls to rerun; None for every call."""
    chosen: dict[str, list[int]] = {}
    for call in sorted(region.call for region in plain.regions):
        found = plain.graph.calls[call]
        chosen.setdefault(found.fqn, []).append(found.number)
    times = dict.fromkeys(chosen, 0)
    for found in plain.graph.calls:
        if found.fqn in times:
            times[found.fqn] += 1
    return {
        fqn: None if len(numbers) == times[fqn] else numbers
        for fqn, numbers in chosen.items()
    }


def _header_lines(plain: PlainPlan, version: str) -> Iterator[str]:
    yield f"Made by `ckplan eject` of ckplan {version}. Predicted for this code:"
    predicted = plain.plan.predicted
    own = predicted if plain.same else None
    yield f"peak {peak_and_overhead(plain.timeline, own)}."
    if not plain.same:
        yield ""
        yield "The plan it stands for rebuilds single ops, which has no plain form:"
        yield f"its own peak is {peak_and_overhead(plain.planned, predicted)}."
    size = group_size_of(plain.plan)
    if size is not None:
        yield ""
        yield f"The optimizer updates groups of at most {size} of parameters, with its"
        yield "foreach kernels."
    if any(region.offload for region in plain.plan.regions):
        yield ""
        yield "It also moves tensors to a file. The nearest of torch moves all that is"
        yield "saved under it: torch.autograd.graph.save_on_cpu, from a GPU to memory."
    if plain.plan.calls_in_tiles:
        yield ""
        yield f"It also runs in tiles: {', '.join(plain.plan.calls_in_tiles)}. That has"
        yield "no plain form: ckplan.apply runs it."
    if updates_statistics_twice(plain.graph, plain.regions):
        yield ""
        yield "Running statistics of these modules are updated twice a step: gradients"
        yield "are the same, what evaluation sees is not."
    if not plain.fits:
        limit = format_bytes(limit_of(plain.plan, plain.planned).bytes)
        yield ""
        yield f"It does NOT fit {limit}: no set of modules to run again that was found"
        yield "does. This is the one with the smallest peak."


def peak_and_overhead(timeline: Timeline, predicted: Prediction | None = None) -> str:
    """Peak and overhead of a step, in words.

    Args:
        timeline: The step.
        predicted: What its plan says of it: seconds of the same step that were measured
            again must not give another figure.
    """
    overhead = timeline.overhead
    if predicted is not None and predicted.peak_bytes == timeline.peak_bytes:
        overhead = predicted.overhead
    shown = format_percent(overhead, sign=True)
    return f"{format_bytes(timeline.peak_bytes)}, overhead {shown}"
