"""Generate the code of a step with Inductor, without compiling or running any of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ckplan.compiling.inductor import Record, compile_with, generate_code, trace_joint
from ckplan.compiling.partition import JointGraph, Partitioner, cached_partitioner
from ckplan.compiling.torch_errors import errors_pass, refuse_read_values
from ckplan.compiling.torch_names import (
    EXAMPLE,
    QUICK,
    FakeTensorMode,
    Symbol,
    copy_of,
    evaluate,
    layout_at,
)


@dataclass(frozen=True)
class Code:
    """The generated wrapper of forward or backward: allocations, calls, frees."""

    source: str
    constants: Mapping[str, Any]
    inputs: Sequence[Any]  # fake tensors, and sizes


@dataclass(frozen=True)
class Lowered:
    """The generated code of one step."""

    forward: Code
    backward: Code


@dataclass(frozen=True)
class DynamoGraph:
    """A graph as Dynamo gives it to a backend, to be lowered any number of times."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    options: Mapping[str, Any]  # of Inductor
    sizes: Mapping[Symbol, int] = field(default_factory=dict)  # to replay code at

    @cached_property
    def key(self) -> str:
        """Equal for equal graphs with inputs of equal shapes."""
        shapes = [
            (str(one.dtype), tuple(one.shape), one.stride(), one.requires_grad)
            if isinstance(one, torch.Tensor)
            else repr(one)
            for one in self.inputs
        ]
        return hashlib.sha256(f"{self.module.code}{shapes}".encode()).hexdigest()

    def without_batch(self) -> DynamoGraph:
        """The graph with Dynamo's fake tensors in place of inputs but parameters.

        It can be lowered as before, and keeps no batch alive.
        """
        placed = self.module.graph.find_nodes(op="placeholder")
        inputs = [
            one if isinstance(one, nn.Parameter) else node.meta.get(EXAMPLE, one)
            for node, one in zip(placed, self.inputs, strict=True)
        ]
        return replace(self, inputs=inputs)

    def copied(self) -> fx.GraphModule:
        """A copy that Inductor may change; parameters and constants are shared."""
        return copy_of(self.module)

    def compile(
        self, partitioner: Partitioner
    ) -> tuple[Callable[..., Any], Lowered | None]:
        """Compile with a partitioner.

        Returns:
            What runs the graph, and its generated code; None where a cache has it.
        """
        found, record = _recorder(self.sizes)
        options = dict(self.options)
        call = compile_with(self.copied(), self.inputs, partitioner, options, record)
        return call, _both(found)

    def lower(
        self,
        saved: Collection[str] | None,
        share: float | None = None,
        quick: bool = False,
        sized: JointGraph | None = None,
    ) -> tuple[JointGraph | None, Lowered | None]:
        """Generate the code with the given values saved.

        Args:
            saved: Names of nodes of the joint graph; None for torch's own choice.
            share: With None, torch's ``activation_memory_budget``.
            sized: Of a graph with dynamic shapes, what has the names; see
                ``Partitioner``.
            quick: The code need not be that which would run. Its bytes nearly always
                are, but what is chosen by them must be checked.

        Returns:
            The joint graph as it was divided, and the code; two times None if nothing
            requires a gradient.
        """
        found, record = _recorder(self.sizes)
        partitioner = Partitioner(saved, share=share, sized=sized)
        options = {**self.options, **(QUICK if quick else {})}
        generate_code(self.copied(), self.inputs, partitioner, options, record)
        return partitioner.seen, _both(found)

    def trace(self) -> JointGraph | None:
        """The joint graph as torch divides it, without any code for a device.

        Returns:
            None if nothing requires a gradient.
        """
        partitioner = Partitioner(None)
        trace_joint(self.copied(), self.inputs, partitioner, dict(self.options))
        return partitioner.seen


def lower_alone(graph: fx.GraphModule, inputs: Sequence[Any]) -> Code:
    """Generate the code of a graph of Dynamo that has no backward."""
    found, record = _recorder({})
    generate_code(copy_of(graph), inputs, None, {}, record)
    return found[False]


def in_order(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A backend: what torch itself chooses to save, its kernels in order."""
    with errors_pass():
        refuse_read_values(graph)
        return DynamoGraph(graph, inputs, {}).compile(cached_partitioner(None, 1.0))[0]


def _recorder(sizes: Mapping[Symbol, int]) -> tuple[dict[bool, Code], Record]:
    found: dict[bool, Code] = {}

    def record(
        source: str, constants: dict[str, Any], inputs: Any, backward: bool
    ) -> None:
        given = [_at(one, sizes) for one in inputs] if sizes else inputs
        found[backward] = Code(source, constants, given)

    return found, record


def _at(value: Any, sizes: Mapping[Symbol, int]) -> Any:
    """An example input, with numbers in place of symbols."""
    if isinstance(value, torch.Tensor):
        how: Any = {"dtype": value.dtype, "device": value.device}
        with FakeTensorMode():
            return torch.empty_strided(*layout_at(value, sizes), **how)
    return evaluate(value, sizes) if isinstance(value, torch.SymInt) else value


def _both(found: Mapping[bool, Code]) -> Lowered | None:
    return Lowered(found[False], found[True]) if len(found) == 2 else None
