"""Divide a joint graph into forward and backward, given which values are saved.

Every other value of forward that backward needs is computed again in backward, as late
as possible: next to its first use there. So the values of one layer are rebuilt when
that layer's backward begins, not all at once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ckplan.compiling import nodes
from ckplan.compiling.handing import before_gradients, bytes_handed, made_once
from ckplan.compiling.masks import pack_masks
from ckplan.compiling.sums import compute_apart, sums_that_wait
from ckplan.compiling.torch_names import (
    IN_FORWARD,
    PLACE,
    PRIMALS,
    CustomPartitionerFn,
    Parts,
    default_parts,
    frugal_parts,
    module_of,
    tagged_parts,
    without_duplicates,
)
from ckplan.errors import ApplyError
from ckplan.files import source_digest

Saved: TypeAlias = frozenset[str] | None
"""Names of the nodes that forward saves; None: torch's own choice."""


@dataclass(frozen=True)
class JointGraph:
    """The joint graph of one training step, and one division of it."""

    module: fx.GraphModule
    num_outputs: int  # of forward, before the saved values
    forward: fx.GraphModule
    backward: fx.GraphModule
    inputs: Any = ()  # what partitioners are given besides: example inputs, and more
    how: Mapping[str, Any] = field(default_factory=dict)
    # What is saved in place of torch's own choice; None where that is not wrong.
    instead: frozenset[str] | None = None

    def divided(self, saved: Collection[str]) -> JointGraph:
        """The same joint graph, divided so that forward saves the nodes named."""
        parts = divide(_copy(self.module), self.inputs, saved, dict(self.how))
        return replace(self, forward=parts[0], backward=parts[1])

    def saved_by_torch(self, share: float) -> frozenset[str]:
        """What torch saves under its ``activation_memory_budget``, 0 to 1."""
        joint = _copy(self.module)
        parts = frugal_parts(joint, self.inputs, dict(self.how), share)
        return _saved_of_forward(joint, parts)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for equal joint graphs."""
        return nodes.digest(self.module.graph)


class Partitioner(CustomPartitionerFn):
    """Saves the given values and no others; torch's own choice if there are none.

    Where torch's choice gives wrong gradients, since backward reads what forward has
    changed, forward saves what torch chose and what is made of that. A call leaves the
    joint graph in ``seen``, unless the graph has no backward.
    """

    def __init__(
        self,
        saved: Collection[str] | None,
        key: str | None = None,
        share: float | None = None,
        sized: JointGraph | None = None,
    ) -> None:
        """Divide joint graphs in one way.

        Args:
            saved: Names of the nodes to save; None: torch chooses.
            key: Identifies the choice to Inductor's caches; None: do not cache.
            share: If torch chooses, its ``activation_memory_budget``, 0 to 1.
            sized: What has the names, if what is divided has dynamic shapes: the same
                graph with numbers as sizes. Between sizes that are computed, its values
                have other names, and the same order.
        """
        self.saved = None if saved is None else frozenset(saved)
        self.key = key
        self.share = share
        self.sized = sized
        self.seen: JointGraph | None = None

    def __deepcopy__(self, _: object) -> Partitioner:
        """Itself: Inductor copies its options, and fake tensors cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Equal bytes for equal choices in every process: Inductor's caches hash them.

        What ``sized`` is, the key says.
        """
        saved = None if self.saved is None else tuple(sorted(self.saved))
        return Partitioner, (saved, self.key, self.share)

    def uuid(self) -> str | None:
        """The identity of the choice."""
        return self.key

    @property
    def computes_again(self) -> bool:
        """Whether backward computes values again that torch would have saved."""
        instead = None if self.seen is None else self.seen.instead
        return self.saved is not None or instead is not None

    def __call__(self, joint: fx.GraphModule, inputs: Any, **how: Any) -> Parts:
        """Divide the joint graph."""
        how.pop("compiler", None)
        joint = without_duplicates(joint)
        kept = _copy(joint)
        instead = None
        if self.saved is not None:
            parts = divide(joint, inputs, self.saved, how, self.sized)
            pack_masks(parts, how["num_fwd_outputs"])
        elif self.share is not None:
            parts = frugal_parts(joint, inputs, dict(how), self.share)
        else:
            parts = default_parts(joint, inputs, dict(how))
            if read_changed(parts):
                joint = _copy(kept)
                instead = _saved_of_forward(joint, parts)
                parts = divide(joint, inputs, instead, how)
        # Inductor changes the parts when it lowers them, and names of nodes with that.
        forward, backward = map(_copy, parts)
        num_outputs = how["num_fwd_outputs"]
        self.seen = JointGraph(
            kept, num_outputs, forward, backward, inputs, how, instead
        )
        return parts


def cached_partitioner(
    saved: Saved,
    share: float | None = None,
    sized: JointGraph | None = None,
) -> Partitioner:
    """A partitioner whose code Inductor's caches may keep; see ``Partitioner``.

    Its key is none of torch or of another ckplan: what they left there may run kernels
    in a wrong order, those of two layers in one, or keep memory for later values.
    """
    text = "\n".join(sorted(saved)) if saved is not None else f"torch's own, {share}"
    text += f"\n{sized.digest}" if sized is not None else ""
    text += f"\n{source_digest()}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Partitioner(saved, f"ckplan {digest}", share, sized)


def divide(
    joint: fx.GraphModule,
    inputs: Any,
    saved: Collection[str],
    how: dict[str, Any],
    sized: JointGraph | None = None,
) -> Parts:
    """Divide a joint graph so that forward saves the nodes named, and no others.

    Random draws are saved whether named or not, so none is drawn again; and so is what
    is made of inputs that forward changes, which backward would find changed.

    Args:
        joint: The joint graph; nodes that the names stand for are in it.
        inputs: Its example inputs.
        saved: Names of nodes of forward that make a tensor.
        how: What Inductor says besides, such as the number of outputs.
        sized: What has the names, if the joint graph has dynamic shapes.

    Raises:
        ApplyError: A name is not that of a node, or a gradient is computed from an
            input as it was before forward changed it.
    """
    known = joint.graph if sized is None else sized.module.graph
    count = how["num_fwd_outputs"] if sized is None else sized.num_outputs
    gradients = nodes.returned(known)[count:]
    apart = sums_that_wait(gradients, bytes_handed(known, saved))
    if sized is not None:
        both = saved, apart
        saved, apart = (nodes.renamed(one, known, joint.graph) for one in both)
    names = {node.name for node in joint.graph.nodes}
    unknown = sorted(set(saved) - names)
    if unknown:
        raise ApplyError(
            f"cannot save '{unknown[0]}': the compiled graph has no such value",
            needed="the graph that the plan was made for",
            hint="plan again: ckplan.compile(model, budget)",
        )
    changed = nodes.changed_inputs(joint.graph)
    _move_to_forward(joint.graph, saved)
    compute_apart(joint.graph, apart)
    for node in before_gradients(joint.graph):
        if node.op in ("call_function", "get_attr"):
            keep = node.name in saved or made_once(node, changed)
            policy = CheckpointPolicy
            wanted = policy.MUST_SAVE if keep else policy.MUST_RECOMPUTE
            node.meta["recompute"] = wanted
            node.meta["ac_graph_id"] = 0  # one region: torch adds no boundaries
    parts = tagged_parts(joint, inputs, how)
    if stale := read_changed(parts):
        raise ApplyError(
            f"cannot compile the step: backward reads {stale[0]}, an input that "
            "forward changes, so gradients would be wrong",
            needed="a buffer that forward changes, and no gradient that is computed "
            "from its old numbers",
            hint="ckplan.apply, which plans uncompiled code; or change the buffer "
            "after backward",
        )
    return parts


def read_changed(parts: Parts) -> list[str]:
    """Names of values that backward reads and that share memory with changed inputs.

    Forward changes inputs last, so backward wants each as it was before.
    """
    forward, backward = parts
    changed = nodes.changed_inputs(forward.graph)
    if not changed:
        return []
    made = {node.name: node for node in forward.graph.nodes}
    return [
        node.name
        for node in backward.graph.find_nodes(op="placeholder")
        if node.name in made
        and nodes.base_of(made[node.name]) in changed
        and any(nodes.is_read(node, user) for user in node.users)
    ]


def _saved_of_forward(joint: fx.GraphModule, parts: Parts) -> frozenset[str]:
    """What a division saves of forward, without views of inputs that it changes."""
    changed = nodes.changed_inputs(joint.graph)
    read = {one.name for one in parts[1].graph.find_nodes(op="placeholder")}
    return frozenset(
        node.name
        for node in before_gradients(joint.graph)
        if node.op == "call_function"
        and node.name in read
        and nodes.base_of(node) not in changed
    )


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    return module_of(copy.deepcopy(module.graph), module)


def _move_to_forward(graph: fx.Graph, saved: Collection[str]) -> None:
    """Move what is saved, and needs no gradient, among the nodes of forward.

    The formula of a backward makes some values of forward's alone, such as the inverse
    deviation of a norm by its width. torch's own choice may save them. They stand among
    the nodes of backward, of which the partitioner saves none.
    """
    last = next(
        node
        for node in reversed(graph.nodes)
        if node.meta.get(PLACE) == IN_FORWARD or node.name.startswith(PRIMALS)
    )
    order = {node: number for number, node in enumerate(graph.nodes)}
    ours = {*before_gradients(graph)}
    late: set[fx.Node] = set()
    todo = [node for node in ours if node.name in saved]
    while todo:
        node = todo.pop()
        if order[node] > order[last] and node not in late:
            late.add(node)
            todo += node.all_input_nodes
    for node in sorted(late, key=order.__getitem__):
        last.append(node)
        last = node
        node.meta[PLACE] = IN_FORWARD
