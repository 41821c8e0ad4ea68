"""Run backward node by node from Python, without torch's engine.

Torch's engine fails on fake CUDA tensors on a machine without a GPU, as it needs
streams before its first node. This module does the engine's work at each node: it runs
hooks and the node's formula, converts shapes and dtypes of results, and sums gradients.
Nodes run in the reverse order of forward (``engine.cpp`` of torch 2.11 to 2.13).

Gradients are bitwise equal to the engine's. Lifetimes of tensors are equal, too, except
for tensors that nodes of torch save without hooks. These are freed with the graph.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction, _HookMixin
from torch.autograd.graph import GradientEdge, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ckplan.tracing.faking.backward_pass import (
    FREED_GRAPH_ERROR,
    BackwardPass,
    Hook,
    NodeHooks,
    TensorHooks,
    leaf_of,
    run_node,
)
from ckplan.tracing.faking.backward_task import BackwardTask, HookedTensor, edge_of


def _register(hooks: dict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def hook_node(node: Node, begins: Hook, ends: Hook) -> None:
    """Register hooks before and after a node, with the active engine."""
    if _active:
        hooks = _active[-1].hooks[node]
        _register(hooks.before, begins)
        _register(hooks.after, ends)
    else:
        node.register_prehook(begins)
        node.register_hook(ends)


def frees_saved_tensors() -> bool:
    """Whether the running node's saved tensors will be freed after it."""
    return bool(_active) and not _active[-1].keeps_graph


@contextmanager
def use_python_engine() -> Iterator[None]:
    """A scope in which this module runs every backward of the process."""
    here = _PythonEngine()
    with ExitStack() as stack:

        def put(owner: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, by, create=True))

        put(Variable, "_execution_engine", here)
        put(torch._C, "_current_graph_task_id", here.current_task)
        put(torch._C, "_will_engine_execute_node", here.will_run)
        hooks = torch._C._autograd
        keeps = "_get_current_graph_task_keep_graph"
        put(hooks, keeps, lambda: here.keeps_graph)
        put(hooks, "_push_saved_tensors_default_hooks", here.push_saved_tensors_hooks())
        put(hooks, "_pop_saved_tensors_default_hooks", here.pop_saved_tensors_hooks())
        put(torch.Tensor, "register_hook", here.register_on_tensor())
        put(torch.Tensor, "retain_grad", here.retain_grad())
        put(BackwardCFunction, "register_prehook", here.register_on_node("before"))
        put(BackwardCFunction, "register_hook", here.register_on_node("after"))
        put(BackwardCFunction, "set_materialize_grads", here.set_materialize_grads())
        put(BackwardCFunction, "saved_tensors", here.saved_tensors())
        put(_HookMixin, "_register_hook", staticmethod(here.register_on_torchs()))
        _active.append(here)
        stack.callback(_active.remove, here)
        yield


class _PythonEngine:
    """The replacement of autograd's engine, with its hooks."""

    def __init__(self) -> None:
        self.hooks: defaultdict[Node, NodeHooks] = defaultdict(NodeHooks)
        self.tasks: list[BackwardTask] = []  # the innermost last
        self.retained: list[ref[torch.Tensor]] = []
        self._numbers = count()
        self.taken_out: list[HookedTensor] = []  # unpacked by the running node
        self.lets_go = False  # free saved tensors instead of unpacking them
        self.pushed: list[list[Hook]] = []
        self.any_on_torchs = False  # hooks on nodes of torch's own
        self._found: dict[int, Hook] | None = None

    # -- saved tensors ---------------------------------------------------------------

    def push_saved_tensors_hooks(self) -> Hook:
        """Wrap saved tensors, so that they can be freed without torch's engine."""
        real = torch._C._autograd._push_saved_tensors_default_hooks

        def push(pack: Hook, unpack: Hook) -> None:
            pushed = [
                pack,
                unpack,
            ]  # nodes keep ``hold`` alive; it must not keep these alive

            def hold(tensor: torch.Tensor) -> HookedTensor:
                pack, unpack = pushed
                return HookedTensor(pack(tensor), unpack)

            self.pushed.append(pushed)
            real(hold, self._take_out)

        return push

    def pop_saved_tensors_hooks(self) -> Hook:
        """Undo ``push_saved_tensors_hooks``."""
        real = torch._C._autograd._pop_saved_tensors_default_hooks

        def pop() -> None:
            real()
            if self.pushed:
                self.pushed.pop().clear()

        return pop

    def _take_out(self, held: HookedTensor) -> Any:
        if self.lets_go:
            held.let_go()
            return _NOTHING
        if held.unpack is None:
            raise RuntimeError(FREED_GRAPH_ERROR)
        # Other callers, such as torch's checkpoint, keep the tensors they unpack.
        if sys._getframe(1).f_code is run_node.__code__:
            self.taken_out.append(held)
        return held.unpack(held.packed)

    # -- hooks -----------------------------------------------------------------------

    def register_on_tensor(self) -> Hook:
        real = torch.Tensor.register_hook

        def register_hook(tensor: Any, hook: Hook) -> Any:
            handle = real(tensor, hook)
            node = tensor.grad_fn
            if node is not None:  # hooks of a leaf are read when its node runs
                tensor_hooks, mine = (
                    self.hooks[node].tensor_hooks,
                    tensor._backward_hooks,
                )
                if not any(one.hooks is mine for one in tensor_hooks):
                    tensor_hooks.append(TensorHooks(tensor.output_nr, mine))
            return handle

        return register_hook

    def retain_grad(self) -> Hook:
        real = torch.Tensor.retain_grad

        def retain_grad(tensor: torch.Tensor) -> None:
            if tensor.grad_fn is not None and not tensor.retains_grad:
                self.retained.append(ref(tensor))
            real(tensor)

        return retain_grad

    def register_on_node(self, when: str) -> Hook:
        def register(node: Any, hook: Hook) -> RemovableHandle:
            return _register(getattr(self.hooks[node], when), hook)

        return register

    def register_on_torchs(self) -> Hook:
        """Replace the function that a node of torch calls to add a hook.

        The function receives the node's hooks, so that ``_hooks_on`` can read them.
        """
        real = _HookMixin._register_hook

        def register(there: dict[int, Hook] | None, hook: Hook) -> Any:
            if hook is not _ASK:
                self.any_on_torchs = True
                return real(there, hook)
            self._found = there
            return OrderedDict() if there is None else there, None

        return register

    def _hooks_on(self, node: Node, register: str) -> dict[int, Hook]:
        getattr(node, register)(_ASK)
        return self._found or {}

    def saved_tensors(self) -> property:
        real = BackwardCFunction.saved_tensors

        def saved_tensors(node: Any) -> Any:
            if FREED_GRAPH_ERROR in node.metadata:
                raise RuntimeError(FREED_GRAPH_ERROR)
            return real.__get__(node)

        return property(saved_tensors)

    def set_materialize_grads(self) -> Hook:
        real = BackwardCFunction.set_materialize_grads

        def set_materialize_grads(node: Any, value: bool) -> None:
            real(node, value)  # its value cannot be read back
            self.hooks[node].materializes_no_grads = not value

        return set_materialize_grads

    # -- the engine ------------------------------------------------------------------

    def run_backward(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        grads: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[torch.Tensor | GradientEdge],
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run a backward for ``torch.autograd``, with the engine's signature."""
        for place, one in enumerate(outputs):
            if isinstance(one, torch.Tensor) and not one.requires_grad:
                raise RuntimeError(
                    f"element {place} of tensors does not require grad and does not "
                    "have a grad_fn"
                )
        if accumulate_grad:
            for one in inputs:
                if isinstance(one, torch.Tensor) and not one.is_leaf:
                    one.retain_grad()
        roots = [*map(edge_of, outputs)]
        wanted = [edge_of(one, roots) for one in inputs]
        self.retained = [one for one in self.retained if one() is not None]
        run = BackwardPass(
            [node for node, _ in roots],
            wanted,
            accumulate_grad,
            self._hooks_of,
            self._done,
        )
        takes_checkpoints = not wanted and self.is_checkpoint_valid()
        task = BackwardTask(next(self._numbers), run, keep_graph, takes_checkpoints)
        self.tasks.append(task)
        try:
            with torch.set_grad_enabled(create_graph):
                outs = list(grads)
                for place, root in enumerate(roots):
                    run.add_gradient(outs, place, root)
                run.run_all()
            for callback in task.callbacks:  # a callback can queue more
                callback()
        finally:
            self.tasks.remove(task)
        if accumulate_grad:
            return ()
        if not allow_unreachable and len(run.captured) < len(set(wanted)):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in "
                "the graph. Set allow_unused=True if this is the desired behavior."
            )
        return tuple(run.captured.get(edge) for edge in wanted)

    def queue_callback(self, callback: Callable[[], object]) -> None:
        """Queue a function to run after the running backward."""
        if not self.tasks:
            raise RuntimeError(
                "Final callbacks can only be installed during backward pass."
            )
        self.tasks[-1].callbacks.append(callback)

    def is_checkpoint_valid(self) -> bool:
        """Whether a checkpoint can run backward inside the running ones."""
        return all(task.takes_checkpoints for task in self.tasks)

    def current_task(self) -> int:
        """The number of the running backward; -1 for none."""
        return self.tasks[-1].number if self.tasks else -1

    def will_run(self, node: Node) -> bool:
        """Whether the running backward runs a node."""
        return self.tasks[-1].run.will_run(node)

    @property
    def keeps_graph(self) -> bool:
        """Whether the running backward retains its graph."""
        return bool(self.tasks) and self.tasks[-1].keeps_graph

    def _hooks_of(self, node: Node) -> NodeHooks:
        hooks, leaf = self.hooks.get(node) or NodeHooks(), leaf_of(node)
        there = [tensor for one in self.retained if (tensor := one()) is not None]
        retained = [one for one in there if one.grad_fn is node]
        hooks = replace(hooks, retained=retained) if retained else hooks
        if self.any_on_torchs and not isinstance(node, BackwardCFunction):
            before = self._hooks_on(node, "register_prehook") | hooks.before
            after = self._hooks_on(node, "register_hook") | hooks.after
            hooks = replace(hooks, before=before, after=after)
        if leaf is None or not leaf._backward_hooks:
            return hooks
        of_leaf = TensorHooks(0, leaf._backward_hooks)
        return replace(hooks, tensor_hooks=[*hooks.tensor_hooks, of_leaf])

    def _done(self, node: Node) -> None:
        if not self.keeps_graph:
            self.hooks.pop(node, None)
            for held in self.taken_out:
                held.let_go()
            if isinstance(node, BackwardCFunction):
                self._let_go_of_saved(node)
            node.metadata[FREED_GRAPH_ERROR] = True
        self.taken_out.clear()

    def _let_go_of_saved(self, node: Any) -> None:
        """Free saved tensors that a custom function did not unpack."""
        self.lets_go = True
        try:
            # Reading tensors without hooks fails if they were changed in place.
            with _disable_current_modes(), suppress(RuntimeError):
                node.saved_tensors  # noqa: B018  (reading frees them)
        finally:
            self.lets_go = False


def _ASK(*args: object) -> None:  # noqa: N802
    """A marker hook that asks a node for its registered hooks."""


_NOTHING = torch.empty(0)
_active: list[_PythonEngine] = []
