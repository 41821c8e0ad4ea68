"""Convolutions that backward must not compute again, since others would change.

A graph that has a convolution is laid out by Inductor with channels last, the backward
of other convolutions in it, too. So to compute one again gives all of them another
kernel: of 512 channels on 2 x 2 pixels, one takes 110 KiB of scratch memory and the
other 4.6 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.graph import CompiledStep
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.workspaces import KernelBytes
from ckplan.plan.region import Region

_FORWARD = "convolution"


def convolutions_to_save(
    joint: JointGraph, kernel_bytes: Mapping[str, int]
) -> frozenset[str]:
    """Names of the convolutions of forward if scratch memory would grow by more.

    Args:
        joint: The joint graph, divided as without a plan.
        kernel_bytes: Of the replay of that.
    """
    found = joint.forward.graph, joint.backward.graph
    forward, backward = (filter(_is_convolution, nodes.ops_of(one)) for one in found)
    in_code, traced = KernelBytes(kernel_bytes), KernelBytes()
    calls = [(one.target, *_given(one)) for one in backward]
    for kernels in (in_code, traced):
        for call in calls:
            kernels.bytes_of(*call)
        kernels.measure()
    grows = [traced.bytes_of(*call) - in_code.bytes_of(*call) for call in calls]
    made = {node.name: nodes.num_bytes(node) for node in forward}
    return (
        frozenset(made) if sum(made.values()) < max(grows, default=0) else frozenset()
    )


def saving(
    step: CompiledStep, regions: Sequence[Region], names: frozenset[str]
) -> tuple[Region, ...]:
    """The same regions, which also save the values of nodes."""
    graph = step.graph
    wanted = {
        (number, place)
        for number, op in enumerate(graph.ops[: graph.num_forward])
        for place, storage in enumerate(op.outputs)
        if step.name_of[storage] in names
    }

    def more(one: Region) -> Region:
        last = one.call if one.last is None else one.last
        inside = range(graph.calls[one.call].start, graph.calls[last].stop)
        return replace(one, save=one.save | {s for s in wanted if s[0] in inside})

    return tuple(map(more, regions))


def _is_convolution(node: fx.Node) -> bool:
    return nodes.name_of_op(node).startswith(_FORWARD)


def _given(node: fx.Node) -> tuple[object, object]:
    found: tuple[object, object] = fx.map_arg(
        (node.args, node.kwargs), lambda one: one.meta["val"]
    )
    return found
