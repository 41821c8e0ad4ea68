"""Record one step of a loop that somebody else runs: from one update to the next.

The loop's own calls tell the phases: each backward goes through autograd's engine,
which is watched, and the optimizer tells when it has stepped. Saved tensors are kept as
copies, so the loop computes what it computes without a recorder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

import torch
from torch import nn
from torch.autograd import Variable

from ckplan.applying.tensors.backwards import NOT_KEPT
from ckplan.collector import apart_from_garbage
from ckplan.errors import WorkloadError
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.tracing.alive import alive_tensors
from ckplan.tracing.faking.backward_pass import leaf_of, reachable_nodes
from ckplan.tracing.recording.function_counts import FunctionCounts
from ckplan.tracing.recording.recorder import StepRecorder
from ckplan.tracing.recording.recording import (
    Recording,
)
from ckplan.tracing.recording.trimming import (
    Kept,
    Trimmed,
    hold_over,
    largest_moment,
    trimmed,
)
from ckplan.tracing.watched_step import know_before
from ckplan.training.fingerprint import batch_shapes, count_elements
from ckplan.training.optimizers import step_counts
from ckplan.training.workload import tensors_of

NOTE_OVER = (
    "autograd holds tensors of this step beyond its end, which are counted up to the "
    "end of the last backward: those of outputs that no backward runs through, or "
    "that a backward of the next step does; then the optimizer that steps last in the "
    "loop should end the step"
)
NOTE_AGAIN = (
    "a second backward runs through the same forward (retain_graph): what a plan "
    "drops is recomputed for each; a backward of the sum of both losses needs it once"
)

NOTE_KEPT = (
    "a backward keeps the graph (retain_graph=True), and no other one runs through it: "
    "without that, autograd frees what it holds as backward goes"
)


class Round(NamedTuple):
    """Ops of one backward, and of what ran before it since the last one."""

    start: int
    backward: int
    stop: int


class LoopWatch:
    """Watches the step of a loop that runs now."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        placed: torch.device,
    ) -> None:
        """Start to watch.

        Args:
            model: The model whose calls are followed.
            optimizers: Those that step; the last one ends the step.
            placed: Where the parameters of the model are.
        """
        if _watching:
            raise WorkloadError(
                "cannot record two loops at once: another recorder is open",
                needed="one recorder at a time",
                hint="record one model, then the other one",
            )
        self.rounds: list[Round] = []
        self.batch: dict[str, str] = {}  # of the largest call of the model
        self._holds_over = False  # autograd does, from this step to the next
        self._runs_again = False  # a backward, through what another one went through
        self._keeps_graph = False  # a backward does
        self._model, self._placed = model, placed
        on_cuda = placed.type == "cuda"
        self._recorder = StepRecorder(model, placed, fake=False, on_cuda=on_cuda)
        storages = self._recorder.storages
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        storages.numbers(grads, "gradient", BEFORE_STEP)  # which the loop may free
        del grads
        know_before(storages, model, optimizers)
        for optimizer in optimizers if on_cuda else ():
            storages.count_as_zero_bytes(step_counts(optimizer))
        for kind, tensor in _alive_before():
            storages.numbers([tensor], kind, BEFORE_STEP)
            del tensor
        self._scopes = ExitStack()
        self._scopes.enter_context(apart_from_garbage())
        engine = WatchedEngine(Variable._execution_engine, self._backward_runs)
        self._scopes.enter_context(
            mock.patch.object(Variable, "_execution_engine", engine)
        )
        self._functions = FunctionCounts(self._recorder)
        for hook in (
            model.register_forward_pre_hook(self._given, with_kwargs=True),
            model.register_forward_hook(self._returned, always_call=True),
        ):
            self._scopes.callback(hook.remove)
        self._scopes.enter_context(self._recorder.watching())
        _watching.append(self)
        self._scopes.callback(_watching.remove, self)
        _stop_in_forks(self._recorder)

    def end(self) -> None:
        """Stop watching; what is freed from here on outlives the step."""
        self._scopes.close()
        self._recorder.close()

    @cached_property
    def result(self) -> Trimmed:
        """The step; of accumulated batches that run the same ops, the largest one."""
        recording, rounds = self._recorder.recording, self.rounds
        self._runs_again = any(len(one.uses) > 1 for one in recording.saved)
        uses = chain.from_iterable(one.uses for one in recording.saved)
        self._keeps_graph = any(use.kept != NOT_KEPT for use in uses)
        self._holds_over = hold_over(recording)
        alike = {_signature(recording, one) for one in rounds}
        if len(rounds) < 2 or len(alike) > 1 or alike == {()}:
            return trimmed(recording)
        moment = largest_moment(recording)
        largest = next((one for one in rounds if moment < one.stop), rounds[-1])
        kept = Kept(largest.start, largest.stop, rounds[-1].stop)
        found = trimmed(recording, kept)
        found.recording.num_forward = largest.backward - largest.start
        found.recording.num_backward = largest.stop - largest.backward
        return found

    def notes(self) -> Iterator[str]:
        """What is to be known of the recorded step."""
        if self._holds_over:
            yield NOTE_OVER
        if self._runs_again:
            yield NOTE_AGAIN
        elif self._keeps_graph:
            yield NOTE_KEPT

    def _given(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Hook of the model: what it is given is the batch."""
        del module
        self._functions.__enter__()  # in the loop, other modes may come and go
        if not torch.is_grad_enabled():
            return
        shapes = batch_shapes(args, kwargs)
        if elements(shapes) > elements(self.batch):
            self.batch = shapes
        storages, recording = self._recorder.storages, self._recorder.recording
        given = [x for x in tensors_of([args, kwargs]) if not x.requires_grad]
        for number in storages.numbers(given, "input", BEFORE_STEP):
            found = recording.storages[number]
            is_own = found.kind not in ("temporary", "buffer")
            if is_own or number < recording.num_known:
                continue
            maker = found.maker
            if maker == BEFORE_STEP or recording.ops[maker].call == OUTSIDE_CALLS:
                found.kind = "input"

    def _returned(self, module: nn.Module, args: object, output: object) -> None:
        """Hook of the model, whose forward has ended."""
        del module, args, output
        self._functions.__exit__(None, None, None)

    def _backward_runs(
        self, outputs: Sequence[Any], create_graph: bool, run: Callable[[], Any]
    ) -> Any:
        """Run a backward of the loop, which may be inside another one."""
        recorder, recording = self._recorder, self._recorder.recording
        if create_graph or recorder.in_call or recorder.in_backward:
            return run()
        roots = [
            one.grad_fn if isinstance(one, torch.Tensor) else one.node
            for one in outputs
        ]
        nodes, start = reachable_nodes([*filter(None, roots)]), len(recording.ops)
        del roots
        recorder.begin_backward_of(nodes)
        leaves = [leaf for node in nodes if (leaf := leaf_of(node)) is not None]
        del nodes
        try:
            return run()
        finally:
            recorder.end_backward()
            before = self.rounds[-1].stop if self.rounds else 0
            self.rounds.append(Round(before, start, len(recording.ops)))
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            recorder.storages.set_kind(grads, "gradient")


_watching: list[LoopWatch] = []


class WatchedEngine:
    """Autograd's engine, each of whose backwards is told."""

    def __init__(
        self,
        engine: Any,
        told: Callable[[Sequence[Any], bool, Callable[[], Any]], Any],
    ) -> None:
        """Tell of each backward: its outputs, ``create_graph``, and what runs it."""
        self._engine = engine
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self,
        outputs: Sequence[Any],
        grads: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Run a backward, with the engine's signature."""

        def run() -> Any:
            return self._engine.run_backward(
                outputs, grads, keep_graph, create_graph, *others, **named
            )

        return self._told(outputs, create_graph, run)


def _alive_before() -> Iterator[tuple[str, torch.Tensor]]:
    """(kind, tensor) of what Python holds: also outputs of the step before."""
    found = alive_tensors()
    yield from _gradients_of(found)  # first, as they are also among what is found
    while found:
        yield _kind_of(found[-1]), found.pop()


def _gradients_of(
    tensors: Sequence[torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        grad = tensor.grad if _is_parameter(tensor) else None
        if grad is not None and not grad.is_sparse:
            yield "gradient", grad


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _kind_of(tensor: torch.Tensor) -> str:
    if _is_parameter(tensor):
        return "parameter"
    return "activation" if tensor.requires_grad else "input"


def _signature(recording: Recording, one: Round) -> tuple[Any, ...]:
    """What a round runs from the first call of the model to its backward."""
    calls = [call for call in recording.calls if one.start <= call.start < one.backward]
    if not calls:
        return ()
    ops = recording.ops[calls[0].start : one.backward]
    first = recording.calls.index(calls[0])
    return tuple((op.func, max(op.call - first, -1)) for op in ops)


def elements(shapes: Mapping[str, str]) -> int:
    """Number of elements in all tensors of a batch."""
    return sum(map(count_elements, shapes.values()))


def _stop_in_forks(recorder: StepRecorder) -> None:
    """Record nothing in processes that are forked while a step is recorded."""
    found = ref(recorder)

    def pause() -> None:
        alive = found()
        if alive is not None:
            alive.pause()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=pause)
