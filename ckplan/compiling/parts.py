"""One budget for a step that graph breaks divide into several graphs.

Each graph is planned from what all need: while one runs forward or backward, what the
graphs before it save is alive, and the gradients of those after it. So all must be
known before the first is compiled. They are found by a forward that runs uncompiled and
keeps nothing that the graphs save. Code between graphs stays as it is: what it saves is
counted in a second such forward. Buffers and random state are restored.

Choices are combined at rates of exchange of seconds and bytes, the same for all graphs.
That list does not depend on the budget, so more budget never costs more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ckplan import units
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.replay import Replayed, replay
from ckplan.compiling.search import Candidate, Chosen, CompiledPlanner, Progress
from ckplan.compiling.torch_names import ALLOWS_RECURRENT, storage_key
from ckplan.errors import ApplyError, InfeasibleError


@dataclass(frozen=True)
class Parts:
    """The graphs of one step, in the order in which forward runs them."""

    planners: Mapping[str, CompiledPlanner]  # by key of their graph
    gradient_bytes: Mapping[str, int]  # of the parameters that each graph trains
    runs: Sequence[str]  # keys, one for each run
    eager_bytes: Sequence[int]  # saved by code before the first run, and after each
    eager_gradient_bytes: int  # of parameters that no graph trains
    held_bytes: int  # parameters, buffers and batch
    uncompiled: frozenset[str]  # keys of graphs that torch cannot compile

    @property
    def saved_uncompiled_bytes(self) -> int:
        """Bytes that autograd saves for code that is not compiled."""
        return sum(self.eager_bytes)

    def peak_bytes(self, replayed: Mapping[str, Replayed]) -> int:
        """Most bytes alive at once in the whole step; never too low for its graphs.

        Args:
            replayed: By key of a graph. What a graph returns is taken to live until its
                backward ends.
        """
        before = self.held_bytes + self.eager_bytes[0]
        peak = before
        for place, key in enumerate(self.runs):
            one = replayed[key]
            after = {*self.runs[place + 1 :]}
            gradients = sum(self.gradient_bytes[later] for later in after)
            if any(self.eager_bytes[place + 1 :]):
                gradients += self.eager_gradient_bytes
            in_backward = one.backward_peak_bytes + gradients
            peak = max(peak, before + max(one.forward_peak_bytes, in_backward))
            before += one.saved_bytes + self.eager_bytes[place + 1]
        return peak

    @property
    def unplanned_peak_bytes(self) -> int:
        """Most bytes alive at once in the step as torch divides its graphs."""
        return self.peak_bytes({k: one.unplanned for k, one in self.planners.items()})

    def share(self, budget_bytes: int) -> dict[str, Chosen]:
        """Find the cheapest plans of all graphs that fit one budget together.

        Returns:
            By key of a graph. The budget of each plan is the bytes that it takes, those
            of its graph's inputs included.

        Raises:
            InfeasibleError: None fit; the smallest peak is named.
        """
        smallest = self.unplanned_peak_bytes
        if smallest <= budget_bytes:
            unplanned = {k: one.candidates[0] for k, one in self.planners.items()}
            return self._chosen(unplanned)
        for combination in self._combinations():
            replayed = {
                key: self.planners[key].replayed(one.saved)
                for key, one in combination.items()
            }
            peak = self.peak_bytes(replayed)
            if peak <= budget_bytes:
                return self._chosen(combination)
            smallest = min(smallest, peak)
        budget, floor = map(units.format_bytes, (budget_bytes, smallest))
        raise InfeasibleError(
            f"no plans of {len(self.planners)} compiled graphs fit {budget} together",
            needed=f"at least {floor} ({smallest} B), the smallest peak",
            hint="a larger budget, a smaller batch, or ckplan.apply, uncompiled",
        )

    def _chosen(self, combination: Mapping[str, Candidate]) -> dict[str, Chosen]:
        return {k: self.planners[k].chosen(one) for k, one in combination.items()}

    def _combinations(self) -> list[dict[str, Candidate]]:
        """Choices for all graphs at every rate of exchange, the cheapest first."""
        options = {key: _options(one) for key, one in self.planners.items()}
        found = []
        for measure in ("saved_bytes", "step_peak_bytes"):
            found += [
                {key: _best(some, rate, measure) for key, some in options.items()}
                for rate in _rates(options.values(), measure)
            ]
        ordered = sorted(found, key=lambda one: sum(o.seconds for o in one.values()))
        return [{key: o.candidate for key, o in one.items()} for one in ordered]


@dataclass(frozen=True)
class _Option:
    candidate: Candidate
    replayed: Replayed
    seconds: float  # more than unplanned


def _options(planner: CompiledPlanner) -> list[_Option]:
    step_seconds = planner.step.graph.step_seconds
    return [
        _Option(one, planner.replayed(one.saved), one.overhead * step_seconds)
        for one in planner.candidates
    ]


def _rates(options: Iterable[list[_Option]], measure: str) -> list[float]:
    """Seconds per byte at which any graph's best option changes, and the two ends."""
    rates = {0.0}
    for some in options:
        for one, other in combinations(some, 2):
            saved = getattr(one.replayed, measure) - getattr(other.replayed, measure)
            if saved:
                rates.add(max((other.seconds - one.seconds) / saved, 0.0))
    highest = max(rates)
    return [*sorted(rates), 2 * highest + 1.0]


def _best(some: list[_Option], rate: float, measure: str) -> _Option:
    def price(one: _Option) -> tuple[float, int]:
        num_bytes = getattr(one.replayed, measure)
        return one.seconds + rate * num_bytes, num_bytes

    return min(some, key=price)


def key_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Equal for equal graphs of Dynamo with inputs of equal shapes."""
    shapes = [
        (str(one.dtype), tuple(one.shape), one.stride(), one.requires_grad)
        if isinstance(one, torch.Tensor)
        else repr(one)
        for one in inputs
    ]
    return hashlib.sha256(f"{graph.code}{shapes}".encode()).hexdigest()


def find_parts(
    call: Callable[..., Any],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    how: Mapping[str, Any],
    progress: Progress | None = None,
) -> Parts:
    """Run forward twice, uncompiled, to find the graphs of a step.

    Args:
        call: What is compiled: the model, or a function that calls it.
        model: Has all parameters and buffers.
        args: Of the call.
        kwargs: Of the call.
        how: Keyword arguments of ``torch.compile``, except ``backend``.
        progress: Told the stage of planning of each graph.

    Raises:
        ApplyError: Nothing that is compiled requires a gradient.
    """
    seeker = _Seeker(progress)
    compiled = torch.compile(call, backend=seeker, **how)
    with _restored(model):
        compiled(*args, **kwargs)  # saves nothing for graphs
        seeker.begin_to_count(tensors_of((args, kwargs, list(model.parameters()))))
        with torch.autograd.graph.saved_tensors_hooks(seeker.count, _never):
            compiled(*args, **kwargs)
    if not seeker.planners:
        recurrent = any(isinstance(one, nn.RNNBase) for one in model.modules())
        shows = "TORCH_LOGS=graph_breaks shows what is not compiled"
        raise ApplyError(
            "cannot plan a compiled step: no graph of it requires a gradient",
            needed="a forward of which torch.compile compiles a part that trains",
            hint=f"{ALLOWS_RECURRENT}; {shows}" if recurrent else shows,
        )
    state = [*model.parameters(), *model.buffers()]
    trained = _bytes_of([p for p in model.parameters() if p.requires_grad])
    return Parts(
        planners=seeker.planners,
        gradient_bytes=seeker.gradient_bytes,
        runs=tuple(seeker.runs),
        eager_bytes=tuple(seeker.eager_bytes),
        eager_gradient_bytes=max(trained - sum(seeker.gradient_bytes.values()), 0),
        held_bytes=_bytes_of([*state, *tensors_of((args, kwargs))]),
        uncompiled=frozenset(seeker.uncompiled),
    )


class _Seeker:
    """A backend that plans graphs and runs them uncompiled, saving nothing."""

    __name__ = "ckplan"

    def __init__(self, progress: Progress | None) -> None:
        self.planners: dict[str, CompiledPlanner] = {}
        self.gradient_bytes: dict[str, int] = {}
        self.uncompiled: set[str] = set()
        self.runs: list[str] = []
        self.eager_bytes = [0]
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
        key = key_of(graph, inputs)
        if key not in self.planners and key not in self.uncompiled:
            self._plan(key, graph, inputs, dict(options or {}))
        if key not in self.planners:
            return graph.forward

        def run(*values: Any) -> Any:
            if self._seen is not None:
                self.runs.append(key)
                self.eager_bytes.append(0)
            with torch.autograd.graph.saved_tensors_hooks(_drop, _never):
                made = graph.forward(*values)
            self._know(made)
            return made

        return run

    def begin_to_count(self, tensors: Sequence[torch.Tensor]) -> None:
        """From now on, note runs, and count what autograd saves between them."""
        self._seen = set()
        self._know(tensors)

    @torch.compiler.disable  # else Dynamo compiles it where it skips what calls it
    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that code between the graphs saves."""
        assert self._seen is not None
        if storage_key(tensor) not in self._seen:
            self.eager_bytes[-1] += tensor.untyped_storage().nbytes()
            self._know([tensor])

    def _know(self, made: Any) -> None:
        if self._seen is not None:
            for tensor in tensors_of(made):
                self._seen.add(storage_key(tensor))
                self._kept.append(tensor.detach())

    def _plan(
        self,
        key: str,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        traced = DynamoGraph(graph, inputs, options)
        try:
            joint, lowered = traced.lower(None)
            if joint is None or lowered is None:
                return  # it does not train
            found = replay(lowered, joint.num_outputs)
        except Exception:  # whatever Inductor cannot lower
            self.uncompiled.add(key)
            return
        self.planners[key] = CompiledPlanner(
            traced, joint, found, progress=self._progress
        )
        trains = (one for one in inputs if isinstance(one, nn.Parameter))
        self.gradient_bytes[key] = _bytes_of([p for p in trains if p.requires_grad])


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and the random state afterwards."""
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for one, value in buffers:
            one.copy_(value)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    storages = {storage_key(one): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def _drop(_: torch.Tensor) -> None:
    """Save nothing: there is no backward."""


def _never(_: None) -> torch.Tensor:
    raise AssertionError("internal error: backward of a forward that only plans")
