"""``ckplan.backend``: a backend for ``torch.compile`` that plans what it is given."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import fx, nn

from ckplan import units
from ckplan.compiling.dynamic import compiled_for, sizes_of, with_sizes
from ckplan.compiling.eager_code import check_has_no_eager_code, read_wanted
from ckplan.compiling.finding import find_parts
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.other_batches import (
    as_a_larger_one,
    compiled_as_known,
    compiled_as_planned,
)
from ckplan.compiling.outside import Outside
from ckplan.compiling.partition import cached_partitioner
from ckplan.compiling.parts import Parts
from ckplan.compiling.refusals import (
    check_inputs,
    check_within_budget,
    place_of,
    refuse_dynamic,
    trains,
)
from ckplan.compiling.search import Chosen, CompiledPlanner, Progress, plan_graph
from ckplan.compiling.torch_errors import (
    errors_pass,
    require_compiler,
    require_hook,
)
from ckplan.compiling.torch_names import Compilation, compilation
from ckplan.compiling.workspaces import bytes_of_all
from ckplan.errors import ApplyError, CkplanError, InfeasibleError
from ckplan.plan.plan import Plan
from ckplan.training.allocator import CPU
from ckplan.training.workload import device_of, tensors_of


def backend(
    plan_or_budget: Plan | Path | str | int,
    *,
    reserve: str | int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    progress: Progress | None = None,
) -> Backend:
    """Make a backend for ``torch.compile(model, backend=...)``; see ``compile``.

    One backend is for one graph, recompiled for other shapes as torch wants. A step
    that graph breaks divide into several is refused, because each part would need to
    know what the others keep alive: ``ckplan.compile(..., fullgraph=False)`` finds out.
    """
    require_hook()
    plan_or_budget = read_wanted(plan_or_budget)
    check_has_no_eager_code(plan_or_budget)
    if not isinstance(plan_or_budget, (Plan, str, int)):
        raise CkplanError(
            f"cannot compile within a {type(plan_or_budget).__name__}",
            needed="a budget, a plan, or the path of its file",
            hint="ckplan.compile(model, '80%')",
        )
    if accumulate and optimizer is None:
        raise CkplanError(
            "cannot count accumulated gradients: which parameters have them is unknown",
            needed="the optimizer of these parameters",
            hint="optimizer=optimizer, accumulate=True",
        )
    outside = Outside(units.parse_bytes(reserve), optimizer, accumulate)
    return Backend(plan_or_budget, outside, progress)


@dataclass
class _Found:
    """What the backends of a model and of its copies found, whichever ran first."""

    planners: dict[object, CompiledPlanner] = field(default_factory=dict)  # by graph
    granted_bytes: int = 0  # the largest budget so far, which percent give
    parts: Parts | None = None  # of a step that may break
    shares: Mapping[str, Chosen] = field(default_factory=dict)  # by key of those graphs
    budget_bytes: int | None = None  # of those


class Backend:
    """A backend for ``torch.compile`` that plans the graph it is given."""

    __name__ = "ckplan"

    def __init__(
        self,
        plan_or_budget: Plan | str | int,
        outside: Outside,
        progress: Progress | None,
    ) -> None:
        self.model = "model"  # its name, in plans
        self._wanted = plan_or_budget
        self.outside = outside
        self._progress = progress
        self.chosen: list[Chosen] = []  # one per shape compiled for training
        self._found = _Found()
        self._compiled_code: list[tuple[Compilation, ref[Any]]] = []  # of those

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """The backend of a copy of the model, which has the same plans."""
        del memo
        copied = Backend(self._wanted, self.outside, self._progress)
        copied.model, copied._found = self.model, self._found
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what is asked for: plans are found again."""
        given = self._wanted, self.outside, None
        return type(self), given, {"model": self.model}

    @property
    def parts(self) -> Parts | None:
        """The graphs of a step that may break, once its first forward found them."""
        return self._found.parts

    @property
    def shares(self) -> Mapping[str, Chosen]:
        """Their plans, by key of a graph."""
        return self._found.shares

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once in a training step; 0 before one is replayed."""
        if self.parts is not None:
            replayed = {key: one.replayed for key, one in self.shares.items()}
            peak = self.parts.peak_bytes(replayed)
            return self.outside.peak_bytes(peak, self.parts.held_bytes)
        found = (one.replayed for one in self.chosen)
        peaks = (self.outside.peak_bytes(r.peak_bytes, r.held_bytes) for r in found)
        return max(peaks, default=0)

    @property
    def plans(self) -> list[Plan]:
        """The plans so far, one per shape compiled for training.

        Of a step that may break, one plan for all of its graphs.
        """
        if self.parts is not None:
            return [self.parts.plan(self.shares, self._found.budget_bytes)]
        found: list[Plan] = []
        for one in self.chosen:
            if one.plan not in found:  # else compiled anew, unchanged
                found.append(one.plan)
        return found

    def __call__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Plan and compile a graph of Dynamo."""
        with errors_pass():
            options, sizes = dict(options or {}), sizes_of(inputs)
            check_inputs(inputs, mode, options)
            traced = DynamoGraph(graph, inputs, options, sizes)
            if device_of(inputs) == CPU:
                require_compiler()
            if self.parts is not None:
                return self._part(traced)
            planner = self._planner(with_sizes(traced) if sizes else traced)
            if planner is None:
                return traced.compile(cached_partitioner(None))[0]
            if sizes:
                chosen, call = compiled_for(traced, planner, self._choose)
            else:
                chosen, call = self._compiled(planner)
        planner.traced = planner.traced.without_batch()  # the planner stays
        self.chosen.append(chosen)

        def run(*values: Any) -> Any:  # Dynamo keeps this, and only what call wraps
            return call(*values)

        self._compiled_code.append((compilation(), ref(run)))
        return run

    def find_parts(
        self,
        call: Callable[..., Any],
        model: nn.Module,
        how: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Parts | None:
        """Before the first forward of a step that may break: plan all of its graphs.

        Returns:
            The graphs; None if they were found before, or nothing trains.

        Raises:
            ApplyError: No graph trains.
            PlanError: A plan is for another step, or exceeds its budget.
            InfeasibleError: No plans fit together.
        """
        if self.parts is not None or not torch.is_grad_enabled():
            return None
        if device_of([*model.parameters(), *model.buffers()]) == CPU:
            require_compiler()
        parts = find_parts(call, model, args, kwargs, how, self._progress)
        if isinstance(self._wanted, Plan):
            self._found.budget_bytes = self._wanted.budget_bytes
            self._found.shares = parts.follow(self._wanted)
        else:
            left = self._left(parts.unplanned_peak_bytes, parts.held_bytes)
            self._found.budget_bytes = left
            with self._naming_the_rest(self._found.granted_bytes - left):
                self._found.shares = parts.share(left)
        self._found.parts = parts
        return parts

    def _part(self, traced: DynamoGraph) -> Callable[..., Any]:
        """Compile a graph of a step that may break."""
        assert self.parts is not None
        refuse_dynamic(traced.inputs)
        key = traced.key
        if key in self.parts.uncompiled:
            return traced.module.forward
        if key not in self.shares:
            if key in self.parts.plain or not trains(traced):
                return traced.compile(cached_partitioner(None))[0]
            return compiled_as_known(traced, self.shares.values())
        chosen = self.shares[key]
        self.chosen.append(chosen)
        return traced.compile(cached_partitioner(chosen.saved))[0]

    def _compiled(self, planner: CompiledPlanner) -> tuple[Chosen, Callable[..., Any]]:
        """The plan, and the code with it, whose replayed peak is that of the plan."""
        if isinstance(self._wanted, Plan):
            return compiled_as_planned(planner, self._wanted, self.chosen)
        while True:
            chosen = self._choose(planner)
            call, lowered = planner.traced.compile(cached_partitioner(chosen.saved))
            if planner.check(chosen, lowered):
                return chosen, call

    def _planner(self, traced: DynamoGraph) -> CompiledPlanner | None:
        """What plans a graph; None if it is not for training."""
        if not trains(traced):
            return None
        self._check_is_whole(traced.module)
        planner = plan_graph(
            traced,
            self.model,
            self._progress,
            quick=True,
            follows=isinstance(self._wanted, Plan),
        )
        if planner is None:
            return None  # no output depends on what requires a gradient
        # what a model sets in its first step often has it compiled anew, unchanged
        held_bytes = bytes_of_all(tensors_of(traced.inputs), planner.device.type)
        key = planner.digest, held_bytes
        known = self._found.planners.setdefault(key, planner)
        known.traced = traced
        return known

    def _choose(self, planner: CompiledPlanner, beyond: int = 0) -> Chosen:
        """The plan; the code that runs takes so many bytes beyond what it says."""
        if isinstance(self._wanted, Plan):
            chosen = planner.follow(self._wanted)
            check_within_budget(chosen.plan, chosen.replayed.peak_bytes + beyond)
            return chosen
        unplanned = planner.unplanned
        left = self._left(unplanned.peak_bytes, unplanned.held_bytes)
        found = as_a_larger_one(planner, self.chosen, left - beyond)
        if found is not None:
            return found
        with self._naming_the_rest(self._found.granted_bytes - left):
            return planner.solve(left - beyond)

    @contextmanager
    def _naming_the_rest(self, num_bytes: int) -> Iterator[None]:
        """Let a refusal name what a budget holds besides forward and backward."""
        try:
            yield
        except InfeasibleError as error:
            if not num_bytes:
                raise
            more = f"; {units.format_bytes(num_bytes)} more are reserved, as for the "
            needed = f"{error.needed}{more}optimizer"
            raise InfeasibleError(error.what, needed=needed, hint=error.hint) from None

    def _left(self, unplanned_bytes: int, held_bytes: int) -> int:
        """What the budget leaves for forward and backward.

        Percent are of the largest step so far: a last batch of fewer rows has no need
        to save as much of itself.
        """
        assert not isinstance(self._wanted, Plan)
        outside = self.outside
        wanted = outside.budget_bytes(self._wanted, unplanned_bytes, held_bytes)
        self._found.granted_bytes = max(self._found.granted_bytes, wanted)
        return outside.left_by(self._found.granted_bytes, held_bytes)

    @property
    def _living(self) -> list[Compilation]:
        """The compilations whose code may still run."""
        return [one for one, call in self._compiled_code if call() is not None]

    def _is_anew(self) -> bool:
        """Whether Dynamo compiles the same code again, such as for other shapes."""
        this, others = compilation(), self._living
        return this not in others and this[0] == others[0][0]

    def _check_is_whole(self, graph: fx.GraphModule) -> None:
        """Refuse the second graph of a step."""
        if self._living and not self._is_anew():
            gc.collect()  # torch.compiler.reset() leaves what was compiled to Python
        if self._living and not self._is_anew():
            raise ApplyError(
                "cannot plan several graphs of one step within one budget: the second "
                f"begins at {place_of(graph)}",
                needed="a step that compiles as one graph, and a backend of its own",
                hint="ckplan.compile(module, budget, fullgraph=False), of a module, "
                "no function; TORCH_LOGS=graph_breaks shows the break; under DDP, "
                "torch._dynamo.config.optimize_ddp=False",
            )
