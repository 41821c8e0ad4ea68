"""Run forward twice on real tensors, and find ops and calls whose results differ.

Both runs start from equal states: copies of the model and the batch, and the same
random states of torch, Python and NumPy. If the outputs are bitwise equal, the
intermediate tensors count as equal, too. Otherwise every op runs twice, to find
nondeterministic kernels; then every call runs twice, to find hidden state.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.graph.graph import Graph
from ckplan.graph.records import Hazard
from ckplan.simulating.simulate import simulate
from ckplan.tracing.faking.fake_mode import EMPTY_OPS
from ckplan.tracing.hazards.from_recording import NO_WAY, PROGRAMS
from ckplan.tracing.recording.side_effects import preserve_rng_state
from ckplan.training.allocator import CPU
from ckplan.training.failures import check_finite, first_line
from ckplan.training.free_memory import free_bytes
from ckplan.training.losses import call_model, pick_loss
from ckplan.training.randomness import torch_rng_restorer
from ckplan.training.step import Training, TrainingStep
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.training.workload import Workload, tensors_of

NOTE_SAME = "forward run twice on real tensors: every bit the same"
NOTE_DIFFERENT = "forward run twice on real tensors: some calls differ, see hazards"
NOTE_NOT = "forward was not run twice to compare: "
_MOST_COPIED_BYTES, _MOST_FLOPS = 1 << 29, 5 * 10**11


def with_nondeterminism_hazards(
    graph: Graph,
    build: Callable[[], Workload],
    training: Training,
    device: torch.device = CPU,
) -> Graph:
    """Add the hazards that running forward twice finds, if the model is small.

    Args:
        graph: The graph of the recorded step.
        build: Makes its workload, on real tensors.
        training: Options of the step, for its autocast.
        device: Device of the real tensors.

    Raises:
        WorkloadError: The loss is NaN or infinite; fake tensors cannot show this.
    """
    if not _is_small(graph, device):
        return _noted(graph, NOTE_NOT + "it is too large")
    try:
        warm_up_vector_kernels()
        step = TrainingStep(build(), None, training)
        grad = any(hazard.kind == "backward" for hazard in graph.hazards)
        unlike, loss = find_nondeterminism(step, grad=grad)
    except Exception as error:
        return _noted(graph, f"{NOTE_NOT}{type(error).__name__}: {first_line(error)}")
    if loss is not None:
        check_finite(loss, "the first step")
    number = {(call.fqn, call.number): i for i, call in enumerate(graph.calls)}
    more = [
        Hazard(number[one.fqn, one.number], one.kind, one.reason, one.guarded_by)
        for one in unlike
        if (one.fqn, one.number) in number
    ]
    hazards = sorted((*graph.hazards, *more), key=lambda hazard: hazard.call)
    graph = replace(graph, hazards=tuple(hazards))
    return _noted(graph, NOTE_DIFFERENT if more else NOTE_SAME)


def _is_small(graph: Graph, device: torch.device) -> bool:
    """Whether forward fits in memory on real tensors and takes little time."""
    kinds = graph.bytes_by_kind
    copied_bytes = kinds["parameter"] + kinds["buffer"] + kinds["input"]
    flops = sum(op.flops for op in graph.ops[: graph.num_forward])
    fits = 2 * simulate(graph).peak_bytes <= free_bytes(device)
    return fits and copied_bytes <= _MOST_COPIED_BYTES and flops <= _MOST_FLOPS


def _noted(graph: Graph, note: str) -> Graph:
    return replace(graph, notes=(*graph.notes, note))


class Nondeterminism(NamedTuple):
    """A call that gives other values when it, or one of its ops, reruns."""

    fqn: str
    number: int
    kind: str
    reason: str
    guarded_by: tuple[str, ...]


def find_nondeterminism(
    step: TrainingStep, *, grad: bool = False
) -> tuple[list[Nondeterminism], torch.Tensor | None]:
    """Find calls of a forward whose results differ between two runs.

    Args:
        step: A step on real tensors; only copies of its model and batch run.
        grad: Whether to run under gradients, as a forward that takes some needs.

    Returns:
        The calls, none if the outputs of forward are equal; and the loss, or None if
        it cannot be computed without gradients.
    """
    with (
        preserve_rng_state() as restart,
        torch.set_grad_enabled(grad),
        step.autocast(),
    ):

        def run(watch: _Watch | None = None) -> tuple[Workload, Any]:
            restart()
            again = _copied(step.workload)
            if watch is None:
                return again, _output(again)
            with watch.on(again.model):
                return again, _output(again)

        workload, output = run()
        same = _same(tensors_of(output), tensors_of(run()[1]))
        loss = _loss(workload, output)  # a loss can change the output
        if same:
            return [], loss
        ops = _OpsTwice()
        run(ops)
        calls = _CallsTwice({unlike[:2] for unlike in ops.found})
        run(calls)
        return [*ops.found, *calls.found], loss


def _output(workload: Workload) -> Any:
    """What the model returns; of a workload's own step all of it, and the loss last."""
    if workload.step is None:
        return call_model(workload)
    outputs: list[Any] = []
    hook = workload.model.register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    with ExitStack() as hooks:
        hooks.callback(hook.remove)
        return *outputs, workload.step(workload.model, workload.batch)


def _loss(workload: Workload, output: Any) -> torch.Tensor | None:
    """The loss; None if it is not one number or needs gradients."""
    try:
        loss = output[-1] if workload.step else pick_loss(workload, output)[0]
    except Exception:
        return None
    is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1
    return loss if is_one else None


class _Watch:
    """Follows the running calls of a copy of the model."""

    def __init__(self) -> None:
        self.found: dict[Nondeterminism, None] = {}
        self.stack: list[tuple[str, int]] = []
        self._times: Counter[str] = Counter()

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        fqns = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.active:
                fqn = fqns[module]
                self.stack.append((fqn, self._times[fqn]))
                self._times[fqn] += 1
                self.began(module, args, kwargs)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.active:
                self.ended(module, output)
                self.stack.pop()

        with ExitStack() as hooks:  # removed at the end, as they hold the model
            for module in fqns:
                before = module.register_forward_pre_hook
                hooks.callback(before(enter, prepend=True, with_kwargs=True).remove)
                after = module.register_forward_hook
                hooks.callback(after(leave, with_kwargs=True).remove)
            yield

    active = True

    def began(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called when a call begins."""

    def ended(self, module: nn.Module, output: Any) -> None:
        """Called when the innermost call ends."""


class _OpsTwice(_Watch):
    """Runs every op twice on the same tensors."""

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        with super().on(model), _EachTwice(self._note):
            yield

    def _note(self, op: str) -> None:
        if self.stack:
            reason = f"{op} gives other values each time"
            self.found[Nondeterminism(*self.stack[-1], "chance", reason, NO_WAY)] = None


class _EachTwice(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "prim" or func in EMPTY_OPS:
            return func(*args, **kwargs)
        trial = args, kwargs
        if func._schema.is_mutable:
            trial = pytree.tree_map(_cloned, trial)
        restart = torch_rng_restorer()
        first = func(*trial[0], **trial[1])
        restart()
        out = func(*args, **kwargs)
        changed = ((args, kwargs), trial) if func._schema.is_mutable else ((), ())
        if not _same(tensors_of([out, changed[0]]), tensors_of([first, changed[1]])):
            self._note(func.overloadpacket.__name__)
        return out


class _CallsTwice(_Watch):
    """Reruns every call after it ends, as the rerun mechanism does."""

    def __init__(self, known: set[tuple[str, int]]) -> None:
        super().__init__()
        self._known = known  # nondeterministic because of their own ops
        self._began: list[tuple[Any, Callable[[], None]]] = []
        self._unlike_inside: list[bool] = [False]

    def began(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Copy the inputs of the call."""
        del module
        given = copy.deepcopy((args, kwargs))
        self._began.append((given, torch_rng_restorer()))
        self._unlike_inside.append(self.stack[-1] in self._known)

    def ended(self, module: nn.Module, output: Any) -> None:
        """Rerun the call, unless a call inside already gave other values."""
        (args, kwargs), restart = self._began.pop()
        unlike = self._unlike_inside.pop()
        if not unlike:
            self.active, go_on = False, torch_rng_restorer()
            restart()
            again = module(*args, **kwargs)
            go_on()
            self.active = True
            unlike = not _same(tensors_of(output), tensors_of(again))
            if unlike:
                reason = "gives other values when it runs again"
                found = Nondeterminism(*self.stack[-1], "state", reason, PROGRAMS)
                self.found[found] = None
        self._unlike_inside[-1] |= unlike


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(equal_bits, one, other))


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.layout != torch.strided or one.is_quantized:
        return True  # cannot be compared
    bits = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*bits)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _copied(workload: Workload) -> Workload:
    model, (batch, target) = copy.deepcopy((workload.model, workload.data))
    return replace(workload, model=model, batch=batch, target=target, optimizer=None)
