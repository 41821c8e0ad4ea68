"""Generate the code of a step with Inductor, without compiling or running any of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ckplan.compiling.partition import JointGraph, Partitioner
from ckplan.compiling.torch_names import generate_code


@dataclass(frozen=True)
class Code:
    """The generated wrapper of forward or backward: allocations, calls, frees."""

    source: str
    constants: Mapping[str, Any]
    inputs: Sequence[Any]  # fake tensors


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

    def copied(self) -> fx.GraphModule:
        """A copy that Inductor may change; parameters and constants are shared."""
        copied = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        copied.meta = dict(self.module.meta)
        return copied

    def lower(
        self, saved: Collection[str] | None, share: float | None = None
    ) -> tuple[JointGraph | None, Lowered | None]:
        """Generate the code with the given values saved.

        Args:
            saved: Names of nodes of the joint graph; None for torch's own choice.
            share: With None, torch's ``activation_memory_budget``.

        Returns:
            The joint graph as it was divided, and the code; two times None if nothing
            requires a gradient.
        """
        found: dict[bool, Code] = {}

        def record(
            source: str, constants: dict[str, Any], inputs: Any, backward: bool
        ) -> None:
            found[backward] = Code(source, constants, inputs)

        partitioner = Partitioner(saved, share=share)
        options = dict(self.options)
        generate_code(self.copied(), self.inputs, partitioner, options, record)
        lowered = Lowered(found[False], found[True]) if len(found) == 2 else None
        return partitioner.seen, lowered
