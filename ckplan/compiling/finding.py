"""Find the graphs of a step that may break, before any of them is compiled.

A first forward lets the model set itself up, as some do. Graphs are found by a second
one, uncompiled, that keeps nothing that they save. Code between graphs stays as it is:
what it saves is counted in a third one. Buffers and random state are restored.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ckplan.compiling.eager_code import eager_regions
from ckplan.compiling.joining import Run
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.parts import Parts
from ckplan.compiling.refusals import (
    check_inputs,
    place_of,
    refuse_dynamic,
)
from ckplan.compiling.search import CompiledPlanner, Progress, plan_graph
from ckplan.compiling.torch_errors import (
    ALLOWS_RECURRENT,
    errors_pass,
)
from ckplan.compiling.torch_names import (
    storage_key,
)
from ckplan.compiling.workspaces import bytes_of_all, bytes_on
from ckplan.errors import ApplyError
from ckplan.training.failures import first_line
from ckplan.training.randomness import randomness_restored
from ckplan.training.workload import device_of, tensors_of


def find_parts(
    call: Callable[..., Any],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    how: Mapping[str, Any],
    progress: Progress | None = None,
) -> Parts:
    """Run forward three times, uncompiled, to find the graphs of a step.

    Args:
        call: What is compiled: the model, or a function that calls it.
        model: Has all parameters and buffers.
        args: Of the call.
        kwargs: Of the call.
        how: Keyword arguments of ``torch.compile``, except ``backend``.
        progress: Told the stage of planning of each graph.

    Raises:
        ApplyError: Nothing that is compiled requires a gradient, or a graph is dynamic,
            not on the CPU, or compiled with a mode that cannot be planned.
    """
    run_uncompiled(call, model, args, kwargs)
    seeker = _Seeker(model, progress)
    state = [*model.parameters(), *model.buffers()]
    compiled = torch.compile(call, backend=seeker, **how)
    with _restored(model):
        compiled(*args, **kwargs)  # saves nothing for graphs
        seeker.begin_to_count(tensors_of((args, kwargs, state)))
        # else Dynamo compiles it where it skips what calls it
        count = torch.compiler.disable(seeker.count)
        with torch.autograd.graph.saved_tensors_hooks(count, _never):
            compiled(*args, **kwargs)
    seeker.end()
    if not seeker.planners:
        recurrent = any(isinstance(one, nn.RNNBase) for one in model.modules())
        shows = "TORCH_LOGS=graph_breaks shows what is not compiled"
        raise ApplyError(
            "cannot plan a compiled step: no graph of it requires a gradient",
            needed="a forward of which torch.compile compiles a part that trains",
            hint=f"{ALLOWS_RECURRENT}; {shows}" if recurrent else shows,
        )
    device = seeker.device
    trained = bytes_of_all([p for p in model.parameters() if p.requires_grad], device)
    held_bytes = bytes_of_all([*state, *tensors_of((args, kwargs))], device)
    libraries = (one.unplanned.library_bytes for one in seeker.planners.values())
    _name_untrained(seeker, model)
    return Parts(
        planners=seeker.planners,
        runs=tuple(seeker.runs),
        gradient_bytes=_gradient_bytes(seeker.parameters, device),
        eager_bytes=tuple(seeker.eager_bytes),
        eager_gradient_bytes=max(trained - bytes_of_all(seeker.trained, device), 0),
        held_bytes=held_bytes + max(libraries),
        uncompiled=seeker.uncompiled,
        plain=frozenset(seeker.plain),
        code_bytes=dict(seeker.code_bytes),
        model=type(model).__name__,
        eager=eager_regions(model),
    )


def run_uncompiled(
    call: Callable[..., Any],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Run a forward that saves nothing; buffers and random state are restored.

    Code that breaks the graph in the first forward alone, such as under a lock that
    guards what is set up once, has run afterwards.
    """
    drop_all = torch.autograd.graph.saved_tensors_hooks(_drop, _never)
    with _restored(model), drop_all:
        call(*args, **kwargs)


class _Seeker:
    """A backend that plans graphs and runs them uncompiled, saving nothing."""

    __name__ = "ckplan"

    def __init__(self, model: nn.Module, progress: Progress | None) -> None:
        self.planners: dict[str, CompiledPlanner] = {}
        self.uncompiled: dict[str, str] = {}  # what Inductor said, by key
        self.plain = set[str]()  # keys of graphs whose backward has no code
        self.code_bytes = Counter[str]()  # saved, by module that is not compiled
        self.runs: list[Run] = []
        self.parameters: list[list[nn.Parameter]] = []  # that each run trains
        self.eager_bytes = [0]
        self.device = device_of([*model.parameters(), *model.buffers()]).type
        self._paths = {id(one): name or "." for name, one in model.named_modules()}
        self._progress = progress
        self._seen: set[int] | None = None  # storages that exist, or are counted
        self._kept: list[torch.Tensor] = []  # so that no storage takes a number twice

    def __call__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Trace and plan a graph of Dynamo."""
        with errors_pass():
            check_inputs(inputs, mode, options or {})
            refuse_dynamic(inputs)
        traced = DynamoGraph(graph, inputs, dict(options or {}))
        key = traced.key
        known = self.planners, self.uncompiled, self.plain
        if not any(key in some for some in known):
            self._plan(traced)
        if key not in self.planners:
            return graph.forward

        def run(*values: Any) -> Any:
            if self._seen is not None:
                for value in tensors_of(values):
                    self.count(value)  # the graph may save it, whoever made it
            with torch.autograd.graph.saved_tensors_hooks(_drop, _never):
                made = graph.forward(*values)
            if self._seen is None:
                return made
            self._know(made)
            keys = (tuple(map(_key_or_zero, some)) for some in (values, made))
            self.runs.append(Run(key, *keys))
            self.parameters.append([one for one in values if _is_trained(one)])
            self.eager_bytes.append(0)
            return made

        return run

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that graphs train; several may train one."""
        return [one for some in self.parameters for one in some]

    def begin_to_count(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on, note runs, and count what autograd saves between them."""
        self._seen = set()
        self._know(tensors)

    def end(self) -> None:
        """Hold nothing of the forwards any more: Dynamo keeps what it called."""
        self._seen = None
        self._kept.clear()

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that code between the graphs saves, or makes for them."""
        assert self._seen is not None
        if storage_key(tensor) not in self._seen:
            num_bytes = bytes_on(self.device, tensor)
            self.eager_bytes[-1] += num_bytes
            self.code_bytes[_running(self._paths)] += num_bytes
            self._know([tensor])

    def _know(self, made: Any) -> None:
        if self._seen is not None:
            for tensor in tensors_of(made):
                self._seen.add(storage_key(tensor))
                self._kept.append(tensor.detach())

    def _plan(self, traced: DynamoGraph) -> None:
        key = traced.key
        try:
            planner = plan_graph(traced, progress=self._progress)
        except Exception as error:  # whatever Inductor cannot lower
            said = f"{type(error).__name__}: {first_line(error)}"
            self.uncompiled[key] = f"{place_of(traced.module)}, {said}"
            return
        if planner is None:
            self.plain.add(key)
            return
        planner.traced = traced.without_batch()
        self.planners[key] = planner


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and the random state afterwards, also if forward fails."""
    held = [module._buffers for module in model.modules()]
    before = [dict(buffers) for buffers in held]  # forward may assign others
    values = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        with randomness_restored():
            yield
    finally:
        for buffers, known in zip(held, before, strict=True):
            buffers.update(known)
        with torch.no_grad():
            for one, value in values:
                one.copy_(value)


def _running(paths: Mapping[int, str]) -> str:
    """Path of the innermost module that runs, the model's if none does."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return path
        frame = frame.f_back
    return "."


def _name_untrained(seeker: _Seeker, model: nn.Module) -> None:
    """Name modules with parameters that no graph trains: they run uncompiled."""
    trained = {id(one) for one in seeker.trained}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own and not any(id(one) in trained for one in own):
            seeker.code_bytes.setdefault(name or ".", 0)


def _is_trained(value: object) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _gradient_bytes(
    parameters: Sequence[Sequence[nn.Parameter]], device: str
) -> tuple[int, ...]:
    """Bytes of the gradients that each run's backward is the first to make."""
    known, found = set[int](), []
    for some in reversed(parameters):
        new = [one for one in some if id(one) not in known]
        known |= {*map(id, new)}
        found.append(bytes_of_all(new, device))
    return (*reversed(found),)


def _key_or_zero(value: object) -> int:
    return storage_key(value) if isinstance(value, torch.Tensor) else 0


def _drop(_: torch.Tensor) -> None:
    """Save nothing: there is no backward."""


def _never(_: None) -> torch.Tensor:
    raise AssertionError("internal error: backward of a forward that only plans")
