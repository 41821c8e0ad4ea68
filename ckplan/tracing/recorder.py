"""Watch a training step op by op, without holding what autograd saves.

Saved tensors go through hooks that keep only their description, so every storage is
seen to die when nothing *but autograd* holds it. When autograd lets go is recorded
apart. From the two the simulator can tell the life of a storage under any plan.

Under fake tensors a saved tensor needs no content; under real ones a copy outside the
accounting stands in for it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ckplan.applying.calls import UnknownArgumentError, storage_of
from ckplan.applying.world import state_of
from ckplan.errors import WorkloadError
from ckplan.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.tracing.in_place import InPlace
from ckplan.tracing.nodes import below
from ckplan.tracing.recording import (
    RawCall,
    RawOp,
    RawSaved,
    RawStorage,
    Recording,
    describe,
    flops_of,
    meta,
    moved_bytes,
    written_by,
)
from ckplan.tracing.stand_in import Geometry, Packed
from ckplan.tracing.stepping import watch_node
from ckplan.tracing.watch import Watch
from ckplan.training.randomness import seeing_states

_DIFFERENTIATED = "is differentiated before forward is over"


_making: list[object] = []  # constants now, by functions that no mode looks into


@contextmanager
def constants_moved_unseen() -> Iterator[None]:
    """A scope in which nobody sees how ``torch.tensor`` moves what it made to a GPU.

    Without a GPU, torch lets its modes see that. With one it does not, and plans count
    ops as they are seen there.
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
        self._placed = placed.type
        self.recording = Recording()
        self._fake = fake
        self._modules = list(model.modules())
        self._fqns = {
            id(module): name
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # they take no hooks
        }
        self._ids: dict[int, int] = {}  # address of a live storage -> its number
        self._times_called: dict[str, int] = {}
        self._stack: list[int] = []
        self._watch = Watch()
        self._boundaries: list[tuple[int, int]] = []  # (autograd sequence, call)
        self._phase = "forward"
        self._node_call = OUTSIDE_CALLS
        self._in_node = False
        self._in_place = InPlace(on_cuda=on_cuda)
        self._paused = False
        self._over = False
        self._keep: list[object] = []

    # -- what exists before the step -------------------------------------------------

    def know(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Register storages that exist when the step begins."""
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage._cdata not in self._ids:
                if kind != "buffer":  # which a forward may put another one in place of
                    self._keep.append(storage)
                self._register(storage, kind, BEFORE_STEP, self._bytes_of(tensor))
                self.recording.num_known = len(self.recording.storages)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count nothing for what is in another memory than the device's."""
        for tensor in tensors:
            self.recording.storages[self._number_of(tensor)].bytes = 0

    def mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what storages that the step made are."""
        for tensor in tensors:
            number = self._ids.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.recording.storages[number].kind = kind

    # -- phases ----------------------------------------------------------------------

    def watching(self) -> AbstractContextManager[object]:
        """Everything that must be active during the step."""
        stack = ExitStack()
        module = nn.modules.module
        hooks = (
            module.register_module_forward_pre_hook(self._enter_call),
            module.register_module_forward_hook(self._leave_call, always_call=True),
        )
        for hook in (*hooks, *self._watch_arguments()):
            stack.callback(hook.remove)
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        )
        stack.enter_context(seeing_states(self._know_state))
        stack.enter_context(self)
        stack.callback(self._end)
        return stack

    def _end(self) -> None:
        """What is there now outlives the step, whoever lets it go."""
        self._over = True

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Forward is over; watch every node of the graph below the loss."""
        self._phase = "backward"
        self.recording.num_forward = len(self.recording.ops)
        for node in nodes_below(loss):
            self._in_place.watch(node)
            watch_node(node, self._node_begins(node), self._node_ends)

    def begin_update(self) -> None:
        """Backward is over; what follows is the optimizer."""
        self._phase = "optimizer"
        recording = self.recording
        recording.num_backward = len(recording.ops) - recording.num_forward

    # -- ops -------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or func.is_view or func.namespace == "prim":
            return func(*args, **kwargs)  # no bytes are made or changed
        if _making and func is torch.ops.aten._to_copy.default:
            return func(*args, **kwargs)
        func, args = self._in_place.instead_of(func, args)
        flat, spec = pytree.tree_flatten((args, kwargs))
        reads = self._numbers(flat, "buffer", BEFORE_STEP)
        out = func(*args, **kwargs)
        self._in_place.note(func, out)
        position = len(self.recording.ops)
        known = len(self.recording.storages)
        returned = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        outputs = self._numbers(returned, "temporary", position)
        reads += (s for s in outputs if s < known)  # also what it was not given
        changed = written_by(func, args, kwargs)
        writes = tuple(dict.fromkeys(map(self._number_of, changed)))
        if writes and not func.overloadpacket.__name__.endswith("_"):
            self._fill(writes, position)
        if len(self.recording.storages) > known or writes:
            tensors = [x for x in flat if isinstance(x, torch.Tensor)]
            tensors += returned or changed  # foreach ops return nothing
            self.recording.ops.append(
                RawOp(
                    func,
                    self._current_call(),
                    tuple(dict.fromkeys(reads)),
                    writes,
                    tuple(outputs),
                    tuple(map(meta, flat)),
                    spec,
                    tuple(map(describe, returned)),
                    flops_of(func, args, kwargs, out),
                    moved_bytes(func, tensors),
                    self._phase == "backward"
                    and not self._in_node
                    and not _shares_its_storage(flat),
                    torch.is_grad_enabled(),
                )
            )
        return out

    def _fill(self, storages: Sequence[int], position: int) -> None:
        """What was saved for an op that fills it, autograd means as it is then."""
        for saved in reversed(self.recording.saved):
            if saved.at < position:
                break
            if saved.storage in storages:
                saved.at = position + 1

    def _current_call(self) -> int:
        if self._phase == "forward":
            return self._stack[-1] if self._stack else OUTSIDE_CALLS
        return self._node_call if self._phase == "backward" else OUTSIDE_CALLS

    # -- storages --------------------------------------------------------------------

    def _numbers(self, leaves: Iterable[object], kind: str, maker: int) -> list[int]:
        numbers = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                storage = _storage_of(leaf)
                number = self._ids.get(storage._cdata)
                if number is None:
                    number = self._register(storage, kind, maker, self._bytes_of(leaf))
                    if leaf.storage_offset() or not fills_storage(leaf):
                        self.recording.storages[number].dense = False
                numbers.append(number)
        return numbers

    def _made_so_far(self, leaves: Iterable[object]) -> Iterator[int]:
        """Storages of those tensors that the step made."""
        storages = self.recording.storages
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                with suppress(UnknownArgumentError):  # it is of others that are seen
                    number = self._ids.get(storage_of(leaf)._cdata)
                    if number is not None and storages[number].maker != BEFORE_STEP:
                        yield number

    def _number_of(self, tensor: torch.Tensor) -> int:
        return self._ids[tensor.untyped_storage()._cdata]

    def _bytes_of(self, tensor: torch.Tensor) -> int:
        """Of its storage; what is in another memory than the step's takes nothing."""
        here = tensor.device.type == self._placed
        return tensor.untyped_storage().nbytes() if here else 0

    def _register(
        self, storage: torch.UntypedStorage, kind: str, maker: int, num_bytes: int
    ) -> int:
        number = len(self.recording.storages)
        self.recording.storages.append(RawStorage(num_bytes, kind, maker))
        self._alias(storage, number, self._died)
        return number

    def _know_state(self, state: torch.Tensor) -> None:
        maker = len(self.recording.ops) - 1  # at first BEFORE_STEP
        storage = state.untyped_storage()
        number = self._register(storage, "temporary", maker, storage.nbytes())
        self.recording.on_host.append(number)

    def _alias(
        self,
        storage: torch.UntypedStorage,
        number: int,
        died: Callable[[int, int], None],
    ) -> None:
        self._ids[storage._cdata] = number
        weakref.finalize(storage, died, storage._cdata, number).atexit = False

    def _died(self, address: int, number: int) -> None:
        self._ids.pop(address, None)
        if not self._over:
            self.recording.storages[number].last = len(self.recording.ops) - 1

    # -- saved tensors ---------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> object:
        storage = tensor.untyped_storage()
        number = self._ids.get(storage._cdata)
        if number is None or self.recording.storages[number].maker == BEFORE_STEP:
            return tensor
        packed = RawSaved(number, self._current_call(), len(self.recording.ops))
        self.recording.saved.append(packed)
        geometry = Geometry.of(tensor)
        copy = None if self._fake else self._blank(geometry, tensor)
        return Packed(self.released, len(self.recording.saved) - 1, geometry, copy)

    def _unpack(self, packed: object) -> torch.Tensor:
        if not isinstance(packed, Packed):
            assert isinstance(packed, torch.Tensor)
            return packed
        saved = self.recording.saved[packed.number]
        if saved.wanted < 0:
            saved.wanted = len(self.recording.ops)
        if self._phase == "forward":
            self.recording.changes.append((saved.call, "backward", _DIFFERENTIATED))
        tensor = packed.copy
        if tensor is None:
            tensor = self._blank(packed.geometry, None)

        def gone(address: int, number: int) -> None:
            del number
            self._ids.pop(address, None)
            saved.used = max(saved.used, len(self.recording.ops) - 1)
            self.released(packed_number)

        packed_number = packed.number
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ids:
            self._alias(storage, saved.storage, gone)
        return tensor

    def _blank(self, geometry: Geometry, content: torch.Tensor | None) -> torch.Tensor:
        self._paused = True
        try:
            return geometry.blank(content)
        finally:
            self._paused = False

    def released(self, number: int) -> None:
        """Autograd, or a node that ran, let a saved tensor go."""
        saved = self.recording.saved[number]
        saved.done = max(saved.done, len(self.recording.ops) - 1)

    # -- calls and nodes -------------------------------------------------------------

    def _enter_call(self, module: nn.Module, args: object) -> None:
        del args
        fqn = self._fqns.get(id(module))
        if fqn is None or self._phase != "forward":
            return
        number = self._times_called.get(fqn, 0)
        self._times_called[fqn] = number + 1
        self._look()
        self._watch.enter(module)
        parent = self._stack[-1] if self._stack else OUTSIDE_CALLS
        self._stack.append(len(self.recording.calls))
        start = len(self.recording.ops)
        kind = type(module).__name__
        state = self._numbers(state_of(module.modules()), "buffer", BEFORE_STEP)
        self.recording.calls.append(
            RawCall(fqn, number, parent, start, kind, state=tuple(state))
        )
        self._mark_boundary()

    def _leave_call(self, module: nn.Module, args: object, output: object) -> None:
        del args, output
        if id(module) not in self._fqns or self._phase != "forward":
            return
        self._look()
        self._watch.leave()
        self.recording.calls[self._stack.pop()].stop = len(self.recording.ops)
        self._mark_boundary()

    def _look(self) -> None:
        call = self._current_call()
        self.recording.changes += ((call, *found) for found in self._watch.changes())

    def _watch_arguments(self) -> list[RemovableHandle]:
        """Hooks of torch that see every module see no keywords."""

        def given(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if id(module) in self._fqns and self._phase == "forward":
                self._watch.arguments(args, kwargs)
                found = self._made_so_far(pytree.tree_leaves((args, kwargs)))
                call = self.recording.calls[self._stack[-1]]
                call.given = tuple(dict.fromkeys(found))

        return [
            module.register_forward_pre_hook(given, prepend=True, with_kwargs=True)
            for module in self._modules
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def _mark_boundary(self) -> None:
        # Nodes made from here on have this sequence number or a later one.
        sequence = torch.autograd._get_sequence_nr()
        self._boundaries.append((sequence, self._current_call()))

    def _node_begins(self, node: torch.autograd.graph.Node) -> Callable[..., None]:
        sequence = node._sequence_nr()
        place = bisect_right(self._boundaries, sequence, key=lambda b: b[0]) - 1
        is_leaf = node.name().endswith("AccumulateGrad")
        call = self._boundaries[place][1] if place >= 0 else OUTSIDE_CALLS

        def begins(grads: object) -> None:
            del grads
            self._in_node = True
            if not is_leaf:
                self._node_call = call

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
        self._keep.clear()
        self._modules.clear()  # whose storages, until they die, hold this recorder


def nodes_below(loss: torch.Tensor) -> list[torch.autograd.graph.Node]:
    """All nodes of the autograd graph below a loss."""
    return [] if loss.grad_fn is None else below([loss.grad_fn])


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    try:
        return storage_of(tensor)
    except UnknownArgumentError:
        layout = str(tensor.layout).removeprefix("torch.")
        raise WorkloadError(
            f"cannot trace the step: it uses tensors of layout {layout}, whose bytes "
            "are not followed",
            needed="strided tensors, in gradients, too",
            hint="sparse=False for embeddings, to_dense() for matrices",
        ) from None


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether its storage has no bytes beside its own."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _shares_its_storage(leaves: list[object]) -> bool:
    """Whether the first one is a view, which holds its base."""
    return any(isinstance(x, torch.Tensor) and x._is_view() for x in leaves[:1])
