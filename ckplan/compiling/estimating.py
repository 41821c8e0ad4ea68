"""Estimates of what divisions of a joint graph cost, several at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import cached_property, partial

import torch
from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.costs import CardCosts, CpuCosts, costs_of
from ckplan.compiling.graph import CompiledStep, as_graph
from ckplan.compiling.handing import before_gradients
from ckplan.compiling.kernels import Kernels
from ckplan.compiling.outlines import outlined
from ckplan.compiling.partition import JointGraph, Saved
from ckplan.compiling.runs import runs_of
from ckplan.compiling.side_by_side import shared_out
from ckplan.gpus import Gpu

_LEAST_GAIN = 0.02
"""Of a step: if a plan is estimated to spare less, that is not promised."""
_STEPS = 200  # overheads are multiples of half a percent of a step
_ROUNDING = 1e-6


def rounded_up(overhead: float) -> float:
    """To the next half percent, so that plans that cost nearly the same are equal."""
    return math.ceil(overhead * _STEPS - _ROUNDING) / _STEPS


class Estimates:
    """Estimated seconds of the divisions of one joint graph. Each is made once."""

    def __init__(
        self, joint: JointGraph, step: CompiledStep, card: Gpu | None = None
    ) -> None:
        """Estimate nothing yet; arguments are those of ``Proposer``."""
        self._joint = joint
        self._step = step
        self._card = card
        self._overheads: dict[Saved, float] = {None: 0.0}

    def overhead_of(self, saved: Saved) -> float:
        """Estimated seconds that saving the given values adds, as a fraction.

        They are those of that division of the joint graph.
        """
        if saved not in self._overheads:
            assert saved is not None
            divided = outlined(self._joint, saved, as_bits=self._card is None)
            self._overheads[saved] = self.overhead_in(divided)
        return self._overheads[saved]

    def learn(self, some: Iterable[Saved]) -> None:
        """Estimate many, in copies of this process where that is quicker."""
        new = [one for one in dict.fromkeys(some) if one not in self._overheads]
        if not new:
            return
        self.overhead_of(new.pop())  # all that is to be measured is known then
        _ = self._costs_of_joint
        threads = torch.get_num_threads()  # a copy has one
        found = shared_out(partial(self._overhead_for, threads), new)
        self._overheads |= zip(new, found, strict=True)

    def _overhead_for(self, threads: int, saved: Saved) -> float:
        torch.set_num_threads(threads)  # nothing runs, but costs depend on them
        return self.overhead_of(saved)

    def overhead_in(self, joint: JointGraph) -> float:
        """Estimated seconds of another division beyond torch's own, as a fraction.

        Estimates are too rough to promise a small gain: then it is 0. They are rounded
        up, so that of plans that cost nearly the same, few are replayed.
        """
        more = self.seconds_in(joint) / self.own_seconds - 1
        more = more if more < -_LEAST_GAIN else max(more, 0.0)
        return rounded_up(more)

    @cached_property
    def own_seconds(self) -> float:
        """Estimated seconds of torch's own division."""
        return self.seconds_in(self._joint)

    def seconds_in(self, joint: JointGraph) -> float:
        """Estimated seconds of a division: of all ops of its ``Graph``."""
        if self._card is not None:  # launches run beside it
            model, more = self._step.graph.model, self._step.fuses_more
            step = as_graph(joint, model, fuses_more=more, gpu=self._card)
            return step.graph.step_seconds
        forward, backward = joint.forward.graph, joint.backward.graph
        costs = self._costs(forward, backward)
        first = self._seconds_in_half(forward, costs, ())
        return first + self._seconds_in_half(backward, costs, self._of_forward)

    def again(self, node: fx.Node) -> float:
        """Seconds of a contraction that backward runs again; 0.0 of other nodes."""
        return self._costs_of_joint.again(node)

    def _seconds_in_half(
        self, half: fx.Graph, costs: CpuCosts | CardCosts, made_before: Collection[str]
    ) -> float:
        """Seconds of forward or backward, where some contractions ran before."""
        kernels = Kernels(half)
        return sum(
            costs.rebuilt(run, kernels)[0]
            if any(one.name in made_before and _follows(one) for one in run)
            else costs.seconds(run, kernels)[0]
            for run in runs_of(half, self._step.fuses_more)
        )

    @cached_property
    def _of_forward(self) -> frozenset[str]:
        graph = self._joint.module.graph
        return frozenset(node.name for node in before_gradients(graph))

    @cached_property
    def _costs_of_joint(self) -> CpuCosts | CardCosts:
        return self._costs(self._joint.module.graph)

    def _costs(self, *graphs: fx.Graph) -> CpuCosts | CardCosts:
        costs = costs_of(self._card, self._step.kernel_bytes)
        costs.measure(*graphs)
        return costs


def _follows(node: fx.Node) -> bool:
    """Whether a node is a contraction of something that its graph has just made."""
    bases = map(nodes.base_of, node.all_input_nodes)
    return nodes.is_alone(node) and any(base.op == "call_function" for base in bases)
