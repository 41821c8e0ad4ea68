"""Test whether MLPs and attentions give the same bits in tiles, where they will train.

As for heads (``tiled_bits.py``): on random values, for the shapes, dtype, device and
number of threads of the step. Equal MLPs are tested once. Of MLPs that differ in rows
only, such as experts, those with the fewest and the most rows are tested: the rows of
experts differ from step to step. What an MLP computes is noted from the model itself,
whose tensors need no content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import NamedTuple

import torch

from ckplan.applying.tiling import (
    Bits,
    check_attention_bits,
    check_norm_bits,
    check_row_bits,
)
from ckplan.applying.tiling.autocast import autocast_of
from ckplan.applying.tiling.norm_program import NormProgram
from ckplan.applying.tiling.row_noting import program_of
from ckplan.applying.tiling.row_program import NotRowWise, RowProgram
from ckplan.graph.graph import Graph
from ckplan.graph.records import RUNS_WHOLE, TensorType, TiledBits
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.attention_ops import attention_sizes
from ckplan.simulating.norm_ops import NormOps
from ckplan.simulating.row_ops import RowOps
from ckplan.solving.tiled_rows import (
    ROW_COUNT,
    family_of,
    kind_of,
    row_wise_calls,
)
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import CostCache
from ckplan.tracing.steps.fake_forward import (
    PLAIN,
    Layouts,
    Told,
    layouts_of,
    told_by_forward,
)
from ckplan.tracing.steps.tiled_bits import (
    LONGEST_SECONDS,
    TileTest,
    known_tests,
    learn_tests,
)
from ckplan.training.failures import first_line
from ckplan.training.free_memory import free_bytes
from ckplan.training.step import AMP
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.training.workload import Workload

_RUNS = 4  # of all ops of an MLP: plain, and again in tiles
_AT_ONCE = 2  # of the bytes of all hidden values
_TILES = RowTiles(ROW_COUNT, ROW_COUNT)

Build = Callable[[], Workload]


def with_tested_rows(
    graph: Graph,
    build: Build,
    device: torch.device,
    cache: CostCache,
    progress: Progress | None,
) -> Graph:
    """Add to a graph whether its MLPs give the same bits in tiles of rows.

    A call that is too large to be tested gets a note, and so does one whose code does
    not run in tiles, which no plan may have then. A graph without such calls stays.

    Args:
        graph: A step that was recorded for this machine.
        build: Makes its workload, on plain tensors, with content or without.
        device: Where it trains.
        cache: Of the costs of that device.
        progress: Called with the progress.
    """
    calls = row_wise_calls(graph)
    told = told_by_forward(graph, build, calls)
    groups: dict[Hashable, list[int]] = {}
    for call, found in calls.items():
        layouts = told.layouts.get(graph.calls[call].fqn, PLAIN)
        if call not in told.whole:
            key = kind_of(graph, call, found), layouts
            groups.setdefault(key, []).append(call)
    keys = {kind: _key(graph, kind, calls[of[0]]) for kind, of in groups.items()}
    tested = _tested_for(graph, groups, calls)
    ends = {end for of in tested.values() for end in of}
    known = known_tests(cache, keys.values())
    wanted = {k: of[0] for k, of in groups.items() if keys[k] not in known}
    wanted = {kind: first for kind, first in wanted.items() if kind in ends}
    if wanted:
        (progress or (lambda what, done, total: None))("testing tiles", 0, 0)
    results = _test_each(graph, build, told, calls, [*wanted.values()], device)
    whole, notes = dict(told.whole), []
    for kind, first in wanted.items():
        result = results[first]
        if isinstance(result, TileTest):
            known |= learn_tests(cache, {keys[kind]: result})
        elif result.runs_whole:
            whole |= dict.fromkeys(groups[kind], result.why)
        else:
            name = graph.calls[first]
            notes.append(f"tiles of {name}: bits not tested: {result.why}")
    threads, counts = torch.get_num_threads(), _TILES.counts
    costs = {k: [known.get(keys[end]) for end in of] for k, of in tested.items()}
    tests = [
        TiledBits(call, *counts, far, threads, share)
        for kind, of in costs.items()
        if all(of)
        for far, share in [map(max, zip(*filter(None, of), strict=True))]
        for call in groups[kind]
    ]
    tests += [TiledBits(call, *counts, RUNS_WHOLE, threads) for call in whole]
    notes += [
        f"tiles of {graph.calls[call]}: it would run whole: {why}"
        for call, why in whole.items()
    ]
    more = (*graph.tiled, *sorted(tests, key=lambda one: one.call))
    return replace(graph, tiled=more, notes=(*graph.notes, *notes))


class _NotTested(NamedTuple):
    """Why there is no test."""

    why: str
    runs_whole: bool = False  # since its code does not run in tiles


def _test_each(
    graph: Graph,
    build: Build,
    told: Told,
    calls: dict[int, RowOps],
    wanted: list[int],
    device: torch.device,
) -> dict[int, TileTest | _NotTested]:
    """Call -> what its test found; or why there is no test."""
    found: dict[int, TileTest | _NotTested] = {}
    programs: dict[int, list[RowProgram | NormProgram] | _NotTested] = {}
    for call in wanted:
        why = _too_large(graph, calls[call], device)
        if why:
            found[call] = _NotTested(why)
    mlps = [one for one in wanted if calls[one].heads is None and one not in found]
    if mlps:
        programs = _programs(graph, build, told.layouts, calls, mlps)
    for call in wanted:
        if call in programs:
            found[call] = _test(programs[call], calls[call], device)
        elif call not in found:
            found[call] = _test_attention(graph, calls[call], device)
    return found


def _tested_for(
    graph: Graph, groups: dict[Hashable, list[int]], calls: dict[int, RowOps]
) -> dict[Hashable, list[Hashable]]:
    """Kind -> the kinds whose tests tell its bits: itself, or those around it."""
    families: dict[Hashable, list[Hashable]] = {}
    for kind, (first, *_) in groups.items():
        family = family_of(graph, first, calls[first])
        families.setdefault(family, []).append(kind)
    found: dict[Hashable, list[Hashable]] = {}
    for of in families.values():
        of.sort(key=lambda kind: calls[groups[kind][0]].rows)
        ends = [of[0], of[-1]]
        found |= {kind: [kind] if kind in ends else ends for kind in of}
    return found


def _programs(
    graph: Graph,
    build: Build,
    layouts: dict[str, Layouts],
    calls: dict[int, RowOps],
    wanted: list[int],
) -> dict[int, list[RowProgram | NormProgram] | _NotTested]:
    """Call -> what its module computes, by layout; or why that is not known."""
    try:
        model = build().model
        modules = dict(model.named_modules())
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        return dict.fromkeys(wanted, _NotTested(why))
    found: dict[int, list[RowProgram | NormProgram] | _NotTested] = {}
    for call in wanted:
        tensor, name = _given(graph, call, calls[call]), graph.calls[call].fqn
        module = modules[name]
        device = next(chain(module.parameters(), model.parameters())).device
        try:
            with autocast_of(device, _cast_of(graph, calls[call])):
                found[call] = [
                    program_of(module.forward, _empty(tensor, layout, device))
                    for layout in layouts.get(name, PLAIN)
                ]
        except NotRowWise as error:
            # The shape of a matrix's rows is a guess: their storage may be a view.
            found[call] = _NotTested(str(error), bool(calls[call].spatial))
    return found


def _cast_of(graph: Graph, found: RowOps) -> torch.dtype | None:
    """The dtype to which autocast casts its parameters, or what a norm reads."""
    if isinstance(found, NormOps):
        return AMP.get(graph.options.get("amp", ""))
    casts = (graph.storages[s].tensor for s in found.weights & graph.casts.keys())
    return next((getattr(torch, one.dtype) for one in casts if one is not None), None)


def _empty(
    tensor: TensorType, layout: torch.memory_format, device: torch.device
) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    return torch.empty(tensor.shape, dtype=dtype, device=device, memory_format=layout)


def _given(graph: Graph, call: int, found: RowOps) -> TensorType:
    """What a call is given: the storage may show another shape than its view."""
    tensor, start = graph.storages[found.hidden].tensor, graph.calls[call].start
    assert tensor is not None
    if found.forward[0] != start:  # a norm comes first
        made = graph.calls[call].arguments
        given = graph.storages[(*made, *graph.ops[start].reads)[0]].tensor
        if given is None:  # a part of a larger tensor of the batch
            return tensor
        return given if made else tensor._replace(dtype=given.dtype)  # of the batch
    if isinstance(found, NormOps):  # of the shape of what it makes
        made_here = graph.storages[graph.ops[found.product].outputs[0]].tensor
        return tensor if made_here is None else tensor._replace(shape=made_here.shape)
    if not found.spatial:
        return tensor
    channels = prod(tensor.shape) // (found.rows * prod(found.spatial))
    return tensor._replace(shape=(found.rows, channels, *found.spatial))


def _test(
    programs: list[RowProgram | NormProgram] | _NotTested,
    found: RowOps,
    device: torch.device,
) -> TileTest | _NotTested:
    """Test an MLP."""
    if isinstance(programs, _NotTested):
        return programs
    warm_up_vector_kernels()
    check = partial(_check, found, device)
    try:
        return TileTest.of(*map(check, programs))
    except (RuntimeError, MemoryError) as error:
        return _NotTested(first_line(error))


def _check(found: RowOps, device: torch.device, one: RowProgram | NormProgram) -> Bits:
    if isinstance(one, NormProgram):
        return check_norm_bits(one, device=device, tiles=_TILES)
    return check_row_bits(
        one, rows=found.rows, dtype=one.dtype, device=device, tiles=_TILES
    )


def _test_attention(
    graph: Graph, found: RowOps, device: torch.device
) -> TileTest | _NotTested:
    """Test an attention."""
    warm_up_vector_kernels()
    tensor = graph.storages[graph.ops[found.forward[0]].outputs[0]].tensor
    assert tensor is not None
    sizes, dtype = attention_sizes(graph, found), getattr(torch, tensor.dtype)
    try:
        return TileTest.of(
            check_attention_bits(sizes, dtype=dtype, device=device, tiles=_TILES)
        )
    except (RuntimeError, MemoryError) as error:
        return _NotTested(first_line(error))


def _key(graph: Graph, kind: Hashable, found: RowOps) -> str:
    """What the bits of an MLP in tiles depend on."""
    names = [graph.ops[number].name for number in found.backward]
    digest = hashlib.sha256(repr((kind, names)).encode()).hexdigest()[:32]
    return f"tiles {_TILES.counts} of rows {digest}"


def _too_large(graph: Graph, found: RowOps, device: torch.device) -> str:
    """Why a call is not tested, in words; "" if it is."""
    numbers = (*found.forward, *found.backward)
    runs = _RUNS * (len(layouts_of(found)) if found.heads is None else 2)
    seconds = runs * sum(graph.ops[number].seconds for number in numbers)
    if seconds > LONGEST_SECONDS:
        return f"it would take {seconds:.0f} s"
    if _AT_ONCE * sum(_sizes(graph, numbers)) > free_bytes(device):
        return "the hidden values do not fit in memory"
    return ""


def _sizes(graph: Graph, numbers: tuple[int, ...]) -> Iterator[int]:
    """Bytes of what ops read and make, each once."""
    ops = [graph.ops[number] for number in numbers]
    for storage in {s for op in ops for s in (*op.reads, *op.outputs)}:
        yield graph.storages[storage].bytes
