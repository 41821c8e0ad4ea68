"""Record a training step op by op, without holding tensors that autograd saves.

Hooks replace each saved tensor by its description. So a storage is freed as soon as
nothing *but autograd* holds it, and that time is recorded. The time when autograd frees
it is recorded separately. From both, the simulator computes the lifetime of the storage
under any plan.

A fake saved tensor needs no content; a real one is replaced by a copy that is not
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from ckplan.applying.tensors.backwards import NOT_KEPT, kept_backward
from ckplan.applying.tensors.compiled import uncompiled_function
from ckplan.applying.tensors.op_traits import traits_of
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.tracing.faking.asked_device import asked_device
from ckplan.tracing.faking.backward_pass import reachable_nodes
from ckplan.tracing.faking.inplace_formulas import InplaceFormulas
from ckplan.tracing.faking.python_engine import hook_node
from ckplan.tracing.faking.saved_placeholder import Geometry, SavedPlaceholder
from ckplan.tracing.recording.flattening import flatten, tensors_in
from ckplan.tracing.recording.module_calls import ModuleCalls
from ckplan.tracing.recording.recording import (
    RawOp,
    RawSaved,
    RawUse,
    Recording,
    TensorMeta,
    describe,
    flops_of,
    meta,
    moved_bytes,
    written_by,
)
from ckplan.tracing.recording.source_lines import UNKNOWN, SourceLines
from ckplan.tracing.recording.storages import Storages
from ckplan.training.randomness import observed_rng_states

_DIFFERENTIATED = "is differentiated before forward is over"
_making: list[object] = []  # functions that make a constant now, innermost last


@contextmanager
def hide_constant_transfers() -> Iterator[None]:
    """A scope that hides the copy to a GPU inside ``torch.tensor``.

    Without a GPU, torch shows this copy to dispatch modes; with one it does not. Plans
    count ops as they appear with a GPU.
    """

    def unseen(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(make)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            _making.append(make)
            try:
                return make(*args, **kwargs)
            finally:
                _making.pop()

        return call

    with ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            patched = mock.patch.object(torch, name, unseen(getattr(torch, name)))
            stack.enter_context(patched)
        yield


class StepRecorder(TorchDispatchMode):
    """Records ops, storages, saved tensors and calls while it is active."""

    def __init__(
        self, model: nn.Module, placed: torch.device, *, fake: bool, on_cuda: bool
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self.storages = Storages(self.recording, placed)
        self._calls = ModuleCalls(model, self.recording, self.storages)
        self._fake = fake
        self._phase = "forward"
        self._lines = SourceLines()
        self._node_call = OUTSIDE_CALLS
        self._node_line = UNKNOWN
        self._in_node = False
        self._in_place = InplaceFormulas(on_cuda=on_cuda)
        self._paused = False
        self._closed = False

    # -- phases ----------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A scope with all hooks that must be active during the step."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        states = observed_rng_states(self.storages.register_rng_state)
        with ExitStack() as stack:
            for context in (self._calls.watching(), hooks, states, self):
                stack.enter_context(context)
            stack.callback(self.storages.end)
            yield

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Start backward: hook every node of the autograd graph below the loss."""
        self.begin_backward_of(nodes_below(loss))

    def begin_backward_of(self, nodes: Iterable[torch.autograd.graph.Node]) -> None:
        """Start backward of nodes. The last one that starts ends forward."""
        self._phase = "backward"
        self._calls.end()
        self.recording.num_forward = len(self.recording.ops)
        for node in nodes:
            self._in_place.watch(node)
            hook_node(node, self._node_begins(node), self._node_ends)

    def end_backward(self) -> None:
        """End a backward that another forward can follow."""
        self.begin_update()
        self._phase = "forward"
        self._calls.resume()

    @property
    def in_call(self) -> bool:
        """Whether the forward of a module runs."""
        return self._phase == "forward" and self._calls.current != OUTSIDE_CALLS

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs."""
        return self._phase == "backward"

    def pause(self) -> None:
        """Record no more ops, as in a fork of the process."""
        self._paused = True

    def close(self) -> None:
        """Record no more of what happens to tensors of a step that is over."""
        self._closed = True

    def begin_update(self) -> None:
        """Start the optimizer's update."""
        self._phase = "optimizer"
        recording = self.recording
        recording.num_backward = len(recording.ops) - recording.num_forward

    # -- ops -------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard costs as much as recording an op

    @uncompiled_function
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        line = self._lines.mark_op() if self._phase == "forward" else None
        traits = traits_of(func)
        if traits.makes_nothing:
            out = func(*args, **kwargs)
            if func is torch.ops.aten.lift_fresh.default:
                self.storages.register_constant(out)
            return out
        if _making and func is torch.ops.aten._to_copy.default:
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_:  # as batches of workers arrive
            return func(*args, **kwargs)
        if self._in_place.runs:
            func, args = self._in_place.engine_op(func, args)
            traits = traits_of(func)
        flat, spec = flatten(args, kwargs)
        reads = self.storages.numbers(flat, "buffer", BEFORE_STEP)
        out = func(*args, **kwargs)
        if self._in_place.runs:
            self._in_place.track_output(func, out)
        position = len(self.recording.ops)
        known = len(self.recording.storages)
        returned = tensors_in(out)
        outputs = self.storages.numbers(returned, "temporary", position)
        reads += (s for s in outputs if s < known)  # known, but not inputs
        changed = written_by(traits, args, kwargs) if traits.writes else []
        writes = tuple(dict.fromkeys(map(self.storages.number_of, changed)))
        self._fill(writes, args[: traits.in_place], position)
        if len(self.recording.storages) > known or writes:
            given = tuple(map(meta, flat))
            described = tuple(map(describe, returned))
            moved = [x for x in given if type(x) is TensorMeta]
            moved += described or map(describe, changed)  # foreach ops return nothing
            self.recording.ops.append(
                RawOp(
                    func,
                    self.current_call,
                    tuple(dict.fromkeys(reads)),
                    writes,
                    tuple(outputs),
                    given,
                    spec,
                    described,
                    flops_of(func, args, kwargs, out),
                    moved_bytes(func, moved),
                    self._phase == "backward"
                    and not self._in_node
                    and not _shares_its_storage(flat),
                    torch.is_grad_enabled(),
                    self._current_line() if line is None else line,
                )
            )
        return out

    def _fill(self, writes: Sequence[int], own: object, position: int) -> None:
        """Move the save time of tensors to after the op that fills them."""
        if not writes:
            return
        storages = {*writes} - self.storages.known(tensors_in(own))
        for saved in reversed(self.recording.saved):
            if saved.at < position:
                break
            if saved.storage in storages:
                saved.at = position + 1

    @property
    def current_call(self) -> int:
        """The innermost running call of a module, or the one that a node belongs to."""
        if self._phase == "forward":
            return self._calls.current
        return self._node_call if self._phase == "backward" else OUTSIDE_CALLS

    def _current_line(self) -> str:
        in_backward = self._phase == "backward"
        line = self._lines.current(in_backward=in_backward)
        return line or (self._node_line if in_backward else UNKNOWN)

    # -- saved tensors ---------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> object:
        number = self.storages.find(tensor)
        if number is None or self.recording.storages[number].maker == BEFORE_STEP:
            return tensor
        packed = RawSaved(number, self.current_call, len(self.recording.ops))
        self.recording.saved.append(packed)
        geometry = Geometry.of(tensor)
        copy = None if self._fake else self._blank(geometry, tensor)
        return SavedPlaceholder(
            self.released, len(self.recording.saved) - 1, geometry, copy
        )

    def _unpack(self, packed: object) -> torch.Tensor:
        if not isinstance(packed, SavedPlaceholder):
            assert isinstance(packed, torch.Tensor)
            return packed
        saved = self.recording.saved[packed.number]
        kept = kept_backward()
        if not saved.uses or saved.uses[-1].kept not in (NOT_KEPT, kept):
            saved.uses.append(RawUse(len(self.recording.ops), kept=kept))
        if self._phase == "forward":
            self.recording.changes.append((saved.call, "backward", _DIFFERENTIATED))
        tensor = packed.copy
        if tensor is None or kept != NOT_KEPT:  # a tensor that goes before the graph
            tensor = self._blank(packed.geometry, tensor)

        use, number = saved.uses[-1], packed.number

        def gone() -> None:
            if not self._closed:
                use.used = max(use.used, len(self.recording.ops) - 1)
                if use.kept == NOT_KEPT:  # else, the graph holds it on
                    self.released(number)

        self.storages.alias_until_freed(tensor, saved.storage, gone)
        return tensor

    def _blank(self, geometry: Geometry, content: torch.Tensor | None) -> torch.Tensor:
        if _get_current_dispatch_mode_stack() == [self]:  # no other wants to see it
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return geometry.blank(content)
        self._paused = True
        try:
            with torch._C.DisableTorchFunction():  # no function of the model
                return geometry.blank(content)
        finally:
            self._paused = False

    def released(self, number: int) -> None:
        """Record that autograd, or a node that ran, frees a saved tensor."""
        if self._closed:
            return
        saved = self.recording.saved[number]
        saved.done = max(saved.done, len(self.recording.ops) - 1)

    # -- nodes -----------------------------------------------------------------------

    def _node_begins(self, node: torch.autograd.graph.Node) -> Callable[..., None]:
        is_leaf = node.name().endswith("AccumulateGrad")
        call, line = self._calls.call_of_node(node), self._lines.of_node(node)

        def begins(grads: object) -> None:
            del grads
            self._in_node = True
            if not is_leaf:
                self._node_call, self._node_line = call, line

        return begins

    def _node_ends(self, grad_inputs: object, grad_outputs: object) -> None:
        del grad_inputs, grad_outputs
        self._in_node = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self.storages.forget()
        self._calls.forget()


def nodes_below(loss: torch.Tensor) -> list[torch.autograd.graph.Node]:
    """All nodes of the autograd graph below a loss."""
    return [] if loss.grad_fn is None else reachable_nodes([loss.grad_fn])


def _shares_its_storage(leaves: list[object]) -> bool:
    """Whether the first argument is a view, which shares its base's storage."""
    return any(isinstance(x, torch.Tensor) and x._is_view() for x in leaves[:1])
