"""What would make a step fit, each with its price: the hints where no plan does.

A remedy is priced by replaying the step with it, under the smallest plan, unless it
says that its bytes are about right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from ckplan import units
from ckplan.errors import PlanError
from ckplan.graph.batch import batch_rows, is_of_batch
from ckplan.graph.caches import held_caches, with_storages, without_caches
from ckplan.graph.graph import Graph
from ckplan.graph.grouped_updates import group_size, with_grouped_update
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS, Op, Storage, TensorType
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.tiled_heads import head_in_tiles, run_beside

_Regions: TypeAlias = tuple[Region, ...]
_PeakOf: TypeAlias = Callable[[Graph], int]

SAME, CLOSE, CHANGES = "same", "close", "changes"
BITS = (SAME, CLOSE, CHANGES)
"""Results bit for bit; up to rounding; another training."""

SMALLER = "a smaller batch, accumulated to the same total"
TILED = "--allow tiles"
_SMALLEST_SHARE = 0.02  # of the peak: what frees less is no remedy
_CHUNKS = 8
_SIXTEEN = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change of the training that lowers the peak."""

    name: str
    how: str  # the option or edit
    peak_bytes: int  # of the step with it, under the smallest plan
    bits: str  # one of BITS
    overhead: float | None = None  # of the time per sample; None: not known
    about: bool = False  # whether the bytes are an estimate
    fits: bool | None = None  # in the limit that was asked for; None without one

    def __str__(self) -> str:
        """The edit and what it needs then."""
        about = "about " if self.about else ""
        return f"{self.how} ({about}{units.format_bytes(self.peak_bytes)})"


def remedies(
    graph: Graph,
    regions: _Regions,
    limit_bytes: int | None = None,
    floor_of: _PeakOf | None = None,
    others: Sequence[_Regions] = (),
) -> tuple[Remedy, ...]:
    """What lowers the peak of the smallest plan, in order of cost.

    Results bit for bit come first, then those up to rounding, then those that change
    training; among each the cheaper ones, then the ones that free most.

    Args:
        graph: The step.
        regions: Its smallest plan.
        limit_bytes: The limit on its tensors, to mark what fits.
        floor_of: The least bytes of another step; by default those of these plans.
        others: Further plans, which may be smaller with a change.
    """
    smallest = Simulator(graph).run(regions)
    least = partial(_least_peak, plans=(regions, *others))
    found = [
        *_caches(graph, floor_of or least),
        *_smaller_batch(graph, least, limit_bytes),
        *_head_in_tiles(graph, (regions, *others)),
        *_chunks(graph, least),
        *_grouped_update(graph, least),
        *_smaller_state(graph, least),
        *_sixteen_bits(smallest),
    ]
    most = smallest.peak_bytes * (1 - _SMALLEST_SHARE)
    kept = (one for one in found if one.peak_bytes <= most)
    if limit_bytes is not None:
        kept = (replace(one, fits=one.peak_bytes <= limit_bytes) for one in kept)
    return tuple(sorted(kept, key=by_cost))


def by_cost(one: Remedy) -> tuple[int, bool, float, int]:
    """Sort key: results, then time, then memory."""
    unknown = one.overhead is None
    return BITS.index(one.bits), unknown, one.overhead or 0.0, one.peak_bytes


def cache_remedy(graph: Graph, caches: frozenset[int], peak_bytes: int) -> Remedy:
    """The row of ``use_cache=False``."""
    some = graph.storages[min(caches)]
    return Remedy(
        f"no cache: {len(caches)} x {some.tensor} live until backward ends",
        "use_cache=False in the model's configuration",
        peak_bytes,
        SAME,
        overhead=0.0,
    )


def _caches(graph: Graph, floor_of: _PeakOf) -> Iterator[Remedy]:
    caches = held_caches(graph)
    if caches:
        yield cache_remedy(graph, caches, floor_of(without_caches(graph)))


def _least_peak(graph: Graph, plans: Sequence[_Regions]) -> int:
    simulator = Simulator(graph)
    return min(simulator.run(regions).peak_bytes for regions in plans)


def _smaller_batch(
    graph: Graph, peak_of: _PeakOf, limit_bytes: int | None
) -> Iterator[Remedy]:
    """The largest part of the batch that fits; what the step makes shrinks with it."""
    rows = batch_rows(graph) or 1
    numbers = {2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, rows} - {1}
    for parts in sorted(numbers):
        if rows % parts:
            continue  # the parts together would have other rows
        smaller = with_storages(graph, partial(_in_parts, parts, graph))
        peak_bytes = peak_of(smaller)
        if limit_bytes is None or peak_bytes <= limit_bytes:
            yield Remedy(
                SMALLER,
                f"a batch of {rows // parts} in place of {rows}, "
                f"{_accumulated(graph, parts)}",
                peak_bytes,
                bits_of_parts(graph),
                about=True,
            )
            return


def _accumulated(graph: Graph, parts: int) -> str:
    if "script" in graph.options.get("workload", {}):  # its options are its own
        return f"accumulated {parts} times as often, in the script"
    return f"with --accumulate {parts * graph.num_batches}"


def bits_of_parts(graph: Graph) -> str:
    """What a batch in parts does to results: sums of rows round, batch norms differ."""
    norms = (
        op
        for op in graph.ops[: graph.num_forward]
        if "batch_norm" in op.name and not op.name.endswith("no_training")
    )
    mixes = any("InstanceNorm" not in _module_of(graph, op) for op in norms)
    return CHANGES if mixes else CLOSE


def _module_of(graph: Graph, op: Op) -> str:
    return "" if op.call == OUTSIDE_CALLS else graph.calls[op.call].module


def _in_parts(parts: int, graph: Graph, number: int, one: Storage) -> Storage:
    """A tensor of one part of the batch, if it is made before the optimizer's step."""
    del number
    grows = one.kind == "activation" or (
        one.kind == "temporary" and BEFORE_STEP < one.maker < graph.backward_stop
    )
    grows = grows or (one.kind == "input" and is_of_batch(graph, one.tensor))
    return replace(one, bytes=-(-one.bytes // parts)) if grows else one


def _chunks(graph: Graph, peak_of: _PeakOf) -> Iterator[Remedy]:
    """Cross entropy in chunks of tokens, for the logits and their gradients."""
    logits = _logits(graph)
    if logits is None:
        return

    def in_chunks(number: int, one: Storage) -> Storage:
        del number
        is_of = one.maker != BEFORE_STEP and _has_size(one.tensor, logits)
        return replace(one, bytes=one.bytes // _CHUNKS) if is_of else one

    yield Remedy(
        f"cross entropy in chunks of tokens: logits are {logits}",
        "a loss in chunks, such as Liger's or cut-cross-entropy",
        peak_of(with_storages(graph, in_chunks)),
        CLOSE,
        about=True,
    )


def _head_in_tiles(graph: Graph, plans: Sequence[_Regions]) -> Iterator[Remedy]:
    """The head and its loss in tiles, where that leaves all bits as they are."""
    head, simulator = head_in_tiles(graph), Simulator(graph)
    if head is None:
        return
    lines = filter(None, (run_beside(simulator, regions, head) for regions in plans))
    line = min(lines, key=lambda one: one.peak_bytes, default=None)
    if line is None:
        return
    yield tiles_remedy(line.peak_bytes, None if any(plans) else line.overhead)


def tiles_remedy(peak_bytes: int, overhead: float | None) -> Remedy:
    """The row of the head and its loss in tiles."""
    name = "the head and its loss in tiles: no logits"
    return Remedy(name, TILED, peak_bytes, SAME, overhead=overhead)


def _logits(graph: Graph) -> TensorType | None:
    """The largest tensor that a cross entropy makes in forward."""
    made = (
        graph.storages[storage].tensor
        for op in graph.ops[: graph.num_forward]
        if op.name == "_log_softmax"
        for storage in op.outputs
    )
    found = (tensor for tensor in made if tensor is not None and tensor.shape)
    return max(found, key=lambda one: math.prod(one.shape), default=None)


def _has_size(tensor: TensorType | None, logits: TensorType) -> bool:
    if tensor is None or tensor.shape[-1:] != logits.shape[-1:]:
        return False
    return math.prod(tensor.shape) == math.prod(logits.shape)


def _grouped_update(graph: Graph, peak_of: _PeakOf) -> Iterator[Remedy]:
    """An update of fewer parameters at once, for the lists of ``foreach`` kernels."""
    size = group_size(graph)
    if size is None:
        return
    name = str(graph.options.get("optimizer", "default")).partition(":")[0]
    own = name in ("own", "none")
    try:
        grouped, about = (
            with_grouped_update(graph, size, units.parse_bytes(size)),
            False,
        )
    except PlanError:
        grouped, about = _with_smaller_lists(graph, units.parse_bytes(size)), True
    yield Remedy(
        f"an update in groups of at most {size} of parameters",
        f"ckplan.update_in_groups(optimizer, {size!r})"
        if own
        else f"--optimizer {'adamw' if name == 'default' else name}:foreach={size}",
        peak_of(grouped),
        SAME,
        overhead=max(grouped.step_seconds / (graph.step_seconds or 1.0) - 1, 0.0),
        about=about,
    )


def _with_smaller_lists(graph: Graph, group_bytes: int) -> Graph:
    """The step with lists of temporaries of so many bytes, about as groups make."""
    update = graph.ops[graph.backward_stop :]
    most = max(_made_bytes(graph, op) for op in update if _is_list(op))

    def smaller(number: int, one: Storage) -> Storage:
        del number
        listed = one.maker >= graph.backward_stop and _is_list(graph.ops[one.maker])
        if not listed or one.kind == "optimizer":
            return one
        return replace(one, bytes=one.bytes * group_bytes // most)

    return with_storages(graph, smaller)


def _is_list(op: Op) -> bool:
    return op.name.startswith("_foreach_")


def _made_bytes(graph: Graph, op: Op) -> int:
    return sum(graph.storages[one].bytes for one in op.creates)


def _smaller_state(graph: Graph, peak_of: _PeakOf) -> Iterator[Remedy]:
    if graph.options.get("optimizer") in ("sgd", "adamw8bit"):
        return
    parts_of = {"adamw8bit": 2 if _is_sixteen(graph) else 4, "sgd": 0}
    for name, parts in parts_of.items():
        smaller = with_storages(graph, partial(_shrunk, parts))
        yield Remedy(
            f"an optimizer with {'a smaller' if parts else 'no'} state",
            f"--optimizer {name}",
            peak_of(smaller),
            CHANGES,
            about=True,  # what its step allocates is another one's
        )


def _shrunk(parts: int, number: int, one: Storage) -> Storage:
    """State of the optimizer divided by a number, or dropped if it is 0."""
    del number
    if one.kind != "optimizer":
        return one
    return replace(one, bytes=one.bytes // parts if parts else 0)


def _sixteen_bits(smallest: Timeline) -> Iterator[Remedy]:
    """Half of the bytes of a model that is in 32 bits."""
    if _is_sixteen(smallest.graph):
        return
    at_peak = smallest.peak_by_kind
    halved = sum(at_peak[kind] for kind in ("parameter", "gradient", "optimizer"))
    yield Remedy(
        "parameters in 16 bits",
        "a model in bf16",
        smallest.peak_bytes - halved // 2,
        CHANGES,
        about=True,
    )


def _is_sixteen(graph: Graph) -> bool:
    """Whether most bytes of the parameters are of 16 bits.

    The parts that one of several ranks has are of no type; those of the model are.
    """
    named = graph.fingerprint.get("parameters")
    texts = named.values() if isinstance(named, Mapping) else ()
    made = [one.tensor for one in graph.storages if one.kind == "parameter"]
    named_types = [TensorType.parse(str(text)) for text in texts]
    types = [*filter(None, made)] or [*filter(None, named_types)]
    of_sixteen = sum(one.bytes for one in types if one.dtype in _SIXTEEN)
    return 2 * of_sixteen >= sum(one.bytes for one in types)
