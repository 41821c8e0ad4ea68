"""How Inductor is called for a plan, and what of it acts otherwise meanwhile.

Kernels that write into a buffer stay before those that read it, and random numbers are
drawn in the order of the program. And in a backward that computes values again,

- nodes that only read the same value share a kernel if they are near: Inductor moves
  the later of them forward, with all that it is made of. Attention of two layers that
  read one mask would be computed again at once;
- a buffer is freed after its last use: Inductor keeps it for a later one of its size,
  as long as an estimate of its own says that this adds nothing to the peak. What the
  MLP of one layer leaves behind would wait for that of the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias
from unittest import mock

from torch import fx

from ckplan.compiling.nodes import draws
from ckplan.compiling.torch_names import (
    DEPENDENCIES,
    PARTITIONER,
    PROBE,
    PROBE_OF_AOT,
    RECOMPUTE,
    GraphLowering,
    OrderedSet,
    Scheduler,
    SchedulerNode,
    StarDep,
    V,
    WeakDep,
    compile_fx,
    compile_fx_inner,
    functorch_config,
    inductor_config,
)

_ONE_PLANS = threading.RLock()
"""Two threads that replaced the same function of torch would not restore it."""
_NEAR = 16
"""Most nodes of Inductor's scheduler between two that share a kernel since they read
the same. Inductor has 64 for the same reason, which is more than a layer has."""


class Divides(Protocol):
    """A partitioner, as Inductor takes it."""

    @property
    def computes_again(self) -> bool:
        """Whether backward computes values again that torch would have saved."""


Record: TypeAlias = Callable[[str, dict[str, Any], Any, bool], None]
"""Given the source, constants, example inputs (fake tensors), and if it is backward."""


def compile_with(
    gm: fx.GraphModule,
    inputs: Any,
    partitioner: Divides | None,
    options: dict[str, Any],
    record: Record,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with Inductor.

    Args:
        gm: The graph; it is consumed.
        inputs: Its example inputs.
        partitioner: Divides the joint graph; None: torch's own.
        options: Options of Inductor.
        record: Given the generated code of forward and of backward, both before this
            returns; neither if a cache of AOTAutograd has the graph.
    """
    patches = {**options, PARTITIONER: partitioner}

    def inner(part: fx.GraphModule, given: Any, **how: Any) -> Any:
        with _frugal(partitioner, how):
            made = compile_fx_inner(part, given, **how)
        source = getattr(made, "source_code", None)
        if source is not None:
            constants = dict(made.constants or {})
            record(source, constants, list(given), bool(how.get("is_backward")))
        return made

    with _in_order(), functorch_config.patch(force_non_lazy_backward_lowering=True):
        return compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)


def generate_code(
    gm: fx.GraphModule,
    inputs: Any,
    partitioner: Divides | None,
    options: dict[str, Any],
    record: Record,
) -> None:
    """Lower forward and backward of a graph of Dynamo; compile and run nothing.

    Arguments are those of ``compile_with``; ``record`` is called once for each of both.
    """
    this_thread, compiled = threading.get_ident(), GraphLowering.compile_to_module

    def inner(part: fx.GraphModule, given: Any, **how: Any) -> Any:
        def instead(lowering: Any) -> Any:
            if threading.get_ident() != this_thread:
                return compiled(lowering)  # another thread compiles in earnest
            code, _ = lowering.codegen()
            backward = bool(how.get("is_backward"))
            record(code.value, dict(lowering.constants), list(given), backward)
            return SimpleNamespace(call=_not_compiled)

        replaced = mock.patch.object(GraphLowering, "compile_to_module", instead)
        with replaced, _frugal(partitioner, how):
            return compile_fx_inner(part, given, **how)

    with _in_order(), functorch_config.patch(**PROBE_OF_AOT):
        compile_fx(
            gm,
            inputs,
            inner_compile=inner,
            config_patches={**options, **PROBE, PARTITIONER: partitioner},
        )


def trace_joint(
    gm: fx.GraphModule, inputs: Any, partitioner: Divides, options: dict[str, Any]
) -> None:
    """Trace and divide the joint graph of a graph of Dynamo; generate no code.

    Arguments are those of ``compile_with``.
    """
    with functorch_config.patch(**PROBE_OF_AOT):
        compile_fx(
            gm,
            inputs,
            inner_compile=lambda part, given, **how: _not_compiled,
            config_patches={**options, **PROBE, PARTITIONER: partitioner},
        )


@contextmanager
def _in_order() -> Iterator[None]:
    """Keep kernels in order that write into a buffer, or draw random numbers.

    torch forgets that a kernel reads what another writes where it computes its loops
    anew, until 2.13 for what a scatter writes: gradients of a bilinear interpolation or
    a max pooling can be computed from zeros (issue 185509 of pytorch, mended after
    2.13). And it orders kernels by the bytes that are alive, also those that draw
    (issue 192635): with other values saved, each would get other numbers.
    """
    with _ONE_PLANS:
        recompute = getattr(SchedulerNode, RECOMPUTE)
        depend = getattr(Scheduler, DEPENDENCIES)

        def keep_order(node: Any, *args: Any, **how: Any) -> None:
            reads = node.read_writes.reads
            kept = OrderedSet(
                one for one in reads if isinstance(one, StarDep | WeakDep)
            )
            recompute(node, *args, **how)
            found = node.read_writes.with_read(kept)
            node.set_read_writes(found.rename(node.mutation_renames))

        def draw_in_order(scheduler: Any) -> None:
            drawn: list[str] = []
            for node in scheduler.nodes:
                if draws(getattr(node.node, "op_overload", None)):
                    V.graph.additional_buffer_deps[node.get_name()].update(drawn)
                    drawn += node.get_buffer_names()
            depend(scheduler)

        with (
            mock.patch.object(SchedulerNode, RECOMPUTE, keep_order),
            mock.patch.object(Scheduler, DEPENDENCIES, draw_in_order),
        ):
            yield


@contextmanager
def _frugal(partitioner: Divides | None, how: dict[str, Any]) -> Iterator[None]:
    """Let less be alive at a time in a backward that computes values again.

    Only near nodes share what they read, and no buffer waits for a later one, whatever
    the options say.
    """
    again = partitioner is not None and partitioner.computes_again
    if not (again and how.get("is_backward")):
        yield
        return
    freed = inductor_config.patch(allow_buffer_reuse=False)
    with freed, V.set_choices_handler(_NearChoices(V.choices)):
        yield


class _NearChoices:
    """The choices of Inductor, but for nodes that are far from each other."""

    def __init__(self, choices: Any) -> None:
        self._choices = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choices, name)

    def can_fuse_horizontal(
        self, scheduler: Any, one: Any, other: Any, shared_data_score: int
    ) -> bool:
        """Whether two nodes of which none reads what the other makes share a kernel."""
        between = one.min_order - other.max_order, other.min_order - one.max_order
        near = max(map(abs, between)) <= _NEAR
        given = scheduler, one, other, shared_data_score
        return near and self._choices.can_fuse_horizontal(*given)


def _not_compiled(*_: object) -> None:
    raise AssertionError("internal error: generated code ran that was not compiled")
