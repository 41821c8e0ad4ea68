"""Graphs with dynamic shapes: planned for the largest batch that is known.

Dynamo writes a symbol in place of a size that may change. The plan is made for the same
graph with numbers in their places: the bound of a size that has one
(``torch._dynamo.mark_dynamic(batch, 0, max=64)``), or else the size of the batch that
is compiled for. The code that runs is replayed at the same sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import cached_partitioner
from ckplan.compiling.replay import replay
from ckplan.compiling.search import Chosen, CompiledPlanner
from ckplan.compiling.torch_names import (
    EXAMPLE,
    Symbol,
    bound_of,
    evaluate,
    layout_at,
    symbol_of,
)

Sizes: TypeAlias = Mapping[Symbol, int]


def sizes_of(inputs: Sequence[Any]) -> dict[Symbol, int]:
    """The largest sizes that the symbols of a graph stand for; empty without any."""
    found: dict[Symbol, int] = {}
    for value in inputs:
        if isinstance(value, torch.SymInt) and (name := symbol_of(value)) is not None:
            found[name] = max(bound_of(value) or 0, int(value.node.hint))
    return found


def with_sizes(graph: DynamoGraph) -> DynamoGraph:
    """The graph with its largest sizes in place of symbols."""
    placed = graph.module.graph.find_nodes(op="placeholder")
    inputs = [
        _sized(node, value, graph.sizes)
        for node, value in zip(placed, graph.inputs, strict=True)
    ]
    return replace(graph, inputs=inputs, sizes={})


def _sized(node: fx.Node, value: Any, sizes: Sizes) -> Any:
    if isinstance(value, torch.SymInt):
        return evaluate(value, sizes)
    example = node.meta.get(EXAMPLE)
    if not isinstance(example, torch.Tensor) or not _is_dynamic(example):
        return value
    place = layout_at(example, sizes)
    with example.fake_mode:
        fake = torch.empty_strided(*place, dtype=example.dtype, device=example.device)
    return fake.requires_grad_(example.requires_grad)


def _is_dynamic(tensor: torch.Tensor) -> bool:
    sizes = (*tensor.shape, *tensor.stride())
    return any(isinstance(one, torch.SymInt) for one in sizes)


def compiled_for(
    traced: DynamoGraph,
    planner: CompiledPlanner,
    choose: Callable[[CompiledPlanner, int], Chosen],
) -> tuple[Chosen, Callable[..., Any]]:
    """Compile a graph with dynamic shapes with the plan for its largest sizes.

    Code for all sizes may take other bytes than code for these: then less is left.

    Args:
        traced: The graph.
        planner: Plans it at its largest sizes.
        choose: Makes a plan whose code takes so many bytes less than may be.

    Returns:
        The plan, with the replay of the code that runs, and what runs that.

    Raises:
        ApplyError: With these sizes, the graph runs other ops.
        CkplanError: What ``choose`` raises.
    """
    sized, beyond = planner.joint, 0
    while True:
        chosen = choose(planner, beyond)
        call, lowered = traced.compile(cached_partitioner(chosen.saved, sized=sized))
        if lowered is None:
            _, lowered = traced.lower(chosen.saved, sized=sized)
            assert lowered is not None
        found = replay(lowered, sized.num_outputs)
        most = chosen.budget_bytes
        more = 0 if most is None else found.peak_bytes - most - beyond
        if more <= 0:
            chosen = replace(chosen, replayed=found)
            return chosen, telling_of_larger(call, traced)
        beyond += more


def telling_of_larger(
    call: Callable[..., Any], traced: DynamoGraph
) -> Callable[..., Any]:
    """What runs a graph; it warns, once, of a size that is larger than planned for."""
    largest = {
        place: evaluate(value, traced.sizes)
        for place, value in enumerate(traced.inputs)
        if isinstance(value, torch.SymInt)
    }
    told = False

    def run(*args: Any) -> Any:
        nonlocal told
        if not told:
            for place, most in largest.items():
                if args[place] > most:
                    told = True
                    warnings.warn(
                        f"a size of the batch is {args[place]}, and the plan is for "
                        f"{most}: memory may exceed the budget; compile with the "
                        "largest batch, or torch._dynamo.mark_dynamic(batch, 0, max=n)",
                        stacklevel=2,
                    )
        return call(*args)

    return run
