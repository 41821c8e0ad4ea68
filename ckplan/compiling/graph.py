"""The joint graph of a compiled step as a ``Graph``, so that the solver can plan it.

One op is a run of nodes of one module that Inductor can fuse; a contraction is one of
its own. Values that leave a run are storages. What torch saves without a plan are the
saved tensors, and module calls come from the module stacks of the nodes. Seconds of a
run are those of what its kernels move first, or of a contraction: see ``kernels.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.costs import CardCosts, CpuCosts, NoCosts, costs_of
from ckplan.compiling.kernels import Kernels
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.runs import leaves, main_of, runs_of
from ckplan.compiling.torch_names import PRIMALS, TANGENTS
from ckplan.gpus import Gpu
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    BEFORE_STEP,
    OUTSIDE_CALLS,
    Call,
    Op,
    Saved,
    Storage,
)
from ckplan.training.fingerprint import torch_version


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step as a ``Graph``, and the values that its storages stand for."""

    graph: Graph
    name_of: Mapping[int, str]  # storage of forward -> node that makes it
    fuses_more: bool
    inputs: Mapping[int, int]  # storage -> its place among the inputs of forward
    outputs: tuple[int | None, ...]  # storages; before them, inputs that are changed
    gradients: Mapping[int, int]  # storage -> the place of the input it belongs to
    kernel_bytes: Mapping[str, int] | None
    rebuilt: tuple[tuple[float, float], ...]  # seconds of ops in backward's kernels


def as_graph(
    joint: JointGraph,
    model: str,
    kernel_bytes: Mapping[str, int] | None = None,
    *,
    fuses_more: bool = False,
    gpu: Gpu | None = None,
    is_measured: bool = True,
) -> CompiledStep:
    """Make the ``Graph`` of a compiled step.

    Args:
        joint: The joint graph; its own division is the unplanned step.
        model: Name of the model.
        kernel_bytes: Of a replay; kernels that it does not have are measured.
        fuses_more: Constants divide no runs, and outputs of backward take the place of
            saved tensors. Whether Inductor's do, the replay of its code shows.
        gpu: The card that has the costs; by default one core of this CPU.
        is_measured: Whether there are costs at all.
    """
    costs = costs_of(gpu, kernel_bytes) if is_measured else NoCosts()
    builder = _Builder(fuses_more, costs)
    costs.measure(joint.forward.graph, joint.backward.graph)
    builder.add_inputs(joint)
    builder.add_forward(joint.forward.graph)
    num_forward = len(builder.ops)
    builder.add_backward(
        joint.backward.graph, {node.name: node for node in joint.forward.graph.nodes}
    )
    builder.end(joint, num_forward)
    if fuses_more:
        builder.overwrite(num_forward)
    saved = tuple(_saved(builder, joint, num_forward))
    builder.reuse({one.storage for one in saved})
    graph = Graph(
        model=model,
        fingerprint={
            "torch": torch_version(),
            "device": costs.device,
            "compiled": joint.digest,
        },
        ops=tuple(builder.ops),
        storages=tuple(builder.storages),
        saved=saved,
        calls=tuple(builder.calls),
        num_forward=num_forward,
        num_backward=len(builder.ops) - num_forward,
        options={} if gpu is None else {"gpu": gpu.name},
        costs=costs.source,
    )
    names = {s: node.name for node, s in builder.forward_storages.items()}
    return CompiledStep(
        graph,
        names,
        fuses_more,
        *builder.ends(joint),
        kernel_bytes,
        tuple(builder.rebuilt),
    )


class _Builder:
    """Appends ops in order, and numbers storages and calls."""

    def __init__(self, fuses_more: bool, costs: CpuCosts | CardCosts | NoCosts) -> None:
        self._fuses_more = fuses_more
        self._costs = costs
        self.ops: list[Op] = []
        self.rebuilt: list[tuple[float, float]] = []
        self.storages: list[Storage] = []
        self._types: list[object] = []  # of the storages' numbers
        self.calls: list[Call] = []
        self.forward_storages: dict[fx.Node, int] = {}
        self.backward_storages: dict[fx.Node, int] = {}
        self._open: list[int] = []  # calls, the outermost first
        self._times = Counter[str]()

    def add_inputs(self, joint: JointGraph) -> None:
        """Number the storages of parameters, buffers and batch.

        Backward returns a gradient or None for every input, in their order. Parameters
        are those with a gradient.
        """
        inputs = joint.forward.graph.find_nodes(op="placeholder")
        gradients = nodes.returned(joint.backward.graph)
        for node, gradient in zip(inputs, gradients, strict=False):
            kind = "input" if gradient is None else "parameter"
            self.forward_storages[node] = self._new(node, kind, BEFORE_STEP)

    def add_forward(self, graph: fx.Graph) -> None:
        """Append the ops and calls of forward."""
        kernels = Kernels(graph)
        for run in runs_of(graph, self._fuses_more):
            call = self._enter(nodes.modules_around(run[0]))
            self._add(run, call, self.forward_storages, "activation", kernels)
        self._close(0)

    def add_backward(self, graph: fx.Graph, forward: Mapping[str, fx.Node]) -> None:
        """Append the ops of backward, each to the call that it is the backward of."""
        for node in graph.find_nodes(op="placeholder"):
            if node.name.startswith(TANGENTS):
                storage = self._new(node, "gradient", BEFORE_STEP)
            else:
                made = nodes.base_of(forward[node.name])
                known = self.forward_storages.get(made)
                if known is None:  # a constant of the graph, or no bytes
                    known = self._new(node, "buffer", BEFORE_STEP)
                storage = known
            self.backward_storages[node] = storage
        first: dict[str, int] = {}
        for index, one in enumerate(self.calls):
            first.setdefault(one.fqn, index)
        kernels = Kernels(graph)
        for run in runs_of(graph, self._fuses_more):
            around = ("", *(path for path, _ in nodes.modules_around(run[0])))
            call = next(first[fqn] for fqn in reversed(around) if fqn in first)
            self._add(run, call, self.backward_storages, "temporary", kernels)

    def end(self, joint: JointGraph, num_forward: int) -> None:
        """Keep inputs, outputs and gradients alive to the end of the step."""
        stop = len(self.ops)
        outputs = nodes.outputs(joint.forward.graph)[: joint.num_outputs]
        kept = {self.forward_storages.get(nodes.base_of(node)) for node in outputs}
        found = map(nodes.base_of, nodes.outputs(joint.backward.graph))
        gradients = {
            s
            for s in (self.backward_storages.get(node) for node in found)
            if s is not None and self.storages[s].maker >= num_forward
        }
        for number, one in enumerate(self.storages):
            if number in gradients:
                self.storages[number] = replace(one, kind="gradient", last=stop)
            elif number in kept or one.maker == BEFORE_STEP:
                self.storages[number] = replace(one, last=stop)

    def ends(
        self, joint: JointGraph
    ) -> tuple[dict[int, int], tuple[int | None, ...], dict[int, int]]:
        """Storages of what the step is given, returns and makes as gradients."""
        inputs = {
            self.forward_storages[node]: int(node.name.removeprefix(PRIMALS)) - 1
            for node in joint.forward.graph.find_nodes(op="placeholder")
            if node.name.startswith(PRIMALS)
        }
        returned = nodes.returned(joint.forward.graph)[: joint.num_outputs]
        outputs = tuple(
            self.forward_storages.get(nodes.base_of(one))
            for one in returned
            if isinstance(one, fx.Node)
        )
        made = enumerate(nodes.returned(joint.backward.graph))
        gradients = {
            self.backward_storages[nodes.base_of(one)]: place
            for place, one in made
            if isinstance(one, fx.Node) and nodes.base_of(one) in self.backward_storages
        }
        return inputs, outputs, gradients

    def overwrite(self, num_forward: int) -> None:
        """Let outputs of backward take the place of saved tensors that die in the op.

        Inductor writes the gradient of logits over logits. Here they are one storage,
        saved or rebuilt, which later ops read in the place of the output.
        """
        stop = len(self.ops)
        last = {s: at for at in range(num_forward, stop) for s in self.ops[at].reads}
        place: dict[int, int] = {}  # of an output: the saved tensor that it overwrites
        for number in range(num_forward, stop):
            op = self.ops[number]
            reads = tuple(dict.fromkeys(place.get(s, s) for s in op.reads))
            self.ops[number] = replace(op, reads=reads)
            dying = {s: self.storages[s] for s in reads if last[s] == number}
            free = {
                s: one.bytes
                for s, one in dying.items()
                if one.kind == "activation" and one.last < stop and not op.flops
            }
            for output in op.outputs:
                made = self.storages[output]
                fit = (s for s, size in free.items() if size == made.bytes)
                storage = next(fit, None)
                if storage is not None and made.kind == "temporary":
                    del free[storage]
                    place[output] = storage
                    last[storage] = last.get(output, number)
                    self.storages[output] = replace(made, bytes=0, last=number)

    def reuse(self, saved: Collection[int]) -> None:
        """Let outputs take the place of inputs of their size and type that die there.

        Inductor writes them in place, so both are never alive at once. Kernels that are
        not generated do not.
        """
        for number, op in enumerate(self.ops):
            if op.flops:
                continue
            sizes = Counter(map(self._size, op.outputs))
            for storage in op.reads:
                one = self.storages[storage]
                dies = one.last == number and one.maker != BEFORE_STEP
                if dies and storage not in saved and sizes[self._size(storage)]:
                    sizes[self._size(storage)] -= 1
                    self.storages[storage] = replace(one, last=number - 1)

    def _size(self, storage: int) -> tuple[int, object]:
        return self.storages[storage].bytes, self._types[storage]

    def _new(self, node: fx.Node, kind: str, maker: int) -> int:
        self._types.append(getattr(node.meta.get("val"), "dtype", None))
        self.storages.append(Storage(nodes.num_bytes(node), kind, maker, maker))
        return len(self.storages) - 1

    def _add(
        self,
        run: Sequence[fx.Node],
        call: int,
        known: dict[fx.Node, int],
        kind: str,
        kernels: Kernels,
    ) -> None:
        number, inside = len(self.ops), {*run}
        bases = (nodes.base_of(one) for node in run for one in node.all_input_nodes)
        reads = tuple(dict.fromkeys(known[b] for b in bases if b in known))
        outputs = []
        for node in filter(nodes.is_tensor, run):
            if not nodes.is_view(node) and leaves(node, inside):
                known[node] = self._new(node, kind, number)
                outputs.append(known[node])
        for storage in (*reads, *outputs):
            used = self.storages[storage]
            if kind != "temporary" or used.kind == kind:  # else a saved tensor holds it
                self.storages[storage] = replace(used, last=number)
        seconds, launch_seconds = self._costs.seconds(run, kernels)
        self.rebuilt.append(self._costs.rebuilt(run, kernels))
        self.ops.append(
            Op(
                name=nodes.name_of_op(main_of(run)).strip("_"),
                call=call,
                reads=reads,
                writes=(),
                outputs=tuple(outputs),
                workspace=self._costs.workspace_of(main_of(run)),
                flops=sum(map(nodes.flops_of, run)),
                moved_bytes=kernels.crossing_bytes(run),
                seconds=seconds,
                launch_seconds=launch_seconds,
                random=any(map(nodes.is_draw, run)),
            )
        )

    def _enter(self, around: nodes.Modules) -> int:
        """Open and close calls until those around the next op are open."""
        wanted = (("", "Model"), *around)
        same = 0
        while same < min(len(self._open), len(wanted)):
            if self.calls[self._open[same]].fqn != wanted[same][0]:
                break
            same += 1
        self._close(same)
        for fqn, module in wanted[same:]:
            parent = self._open[-1] if self._open else OUTSIDE_CALLS
            start, number = len(self.ops), self._times[fqn]
            self._times[fqn] += 1
            self.calls.append(Call(fqn, number, parent, start, start, module))
            self._open.append(len(self.calls) - 1)
        return self._open[-1]

    def _close(self, depth: int) -> None:
        while len(self._open) > depth:
            call = self._open.pop()
            self.calls[call] = replace(self.calls[call], stop=len(self.ops))


def _saved(builder: _Builder, joint: JointGraph, num_forward: int) -> Iterator[Saved]:
    """The saved tensors, in order of the ops that make them; each storage once.

    A saved tensor is held from its making to the last op of backward that reads it.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number in range(num_forward, len(builder.ops)):
        for storage in builder.ops[number].reads:
            first.setdefault(storage, number)
            last[storage] = number
    inputs = joint.backward.graph.find_nodes(op="placeholder")
    found = {builder.backward_storages[node] for node in inputs}
    for storage in sorted(found, key=lambda s: builder.storages[s].maker):
        maker = builder.storages[storage].maker
        if maker != BEFORE_STEP:
            wanted = first.get(storage, -1)
            done = last.get(storage, num_forward)
            call = builder.ops[maker].call
            yield Saved(storage, call, maker + 1, wanted, done, max(wanted, done))
