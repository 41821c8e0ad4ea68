"""The parts of a row-wise call: what runs in tiles, and what stays as it is around."""

from __future__ import annotations

from math import prod

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.tiles import BEFORE_PRODUCTS, DROPOUT

CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution_backward"
PRODUCTS = {"mm": (1,), "addmm": (2,), CONVOLUTION: (1, 2)}
"""Products -> how many parameters they read."""


Numbers = tuple[int, ...]


def parts_of(graph: Graph, call: int) -> tuple[Numbers, Numbers, Numbers]:
    """Ops of a call before its first product, from there to its last one, and after.

    Before may be norms, and after dropout: they stay as they are, as do the casts of
    parameters by autocast, which are none of these ops.

    Raises:
        PlanError: It is no product, ops, and a product.
    """
    found = graph.calls[call]
    casts = {*graph.casts.values()}
    numbers = [n for n in range(found.start, found.stop) if n not in casts]
    matrices = [n for n in numbers if graph.ops[n].name in ("mm", "addmm")]
    products = matrices or [n for n in numbers if is_pointwise(graph, n)]
    first, last = (products or [found.start])[0], (products or [found.stop - 1])[-1]
    made: set[int] = set()
    for number in range(last + 1, found.stop):
        op = graph.ops[number]
        made.update(op.outputs)
        if not {*op.reads} - made <= {*graph.ops[last].outputs} - {*op.writes}:
            raise refuse_rows(graph, call, f"{op.name} follows its last product")
    for number in numbers:
        name = graph.ops[number].name
        if number < first and name not in BEFORE_PRODUCTS:
            raise refuse_rows(graph, call, f"it runs {name} before its first product")
        if first < number < last and graph.ops[number].random:
            why = "dropout before its last product draws a number for every hidden "
            raise refuse_rows(graph, call, why + "value at once, tiles draw others")
        if number > last and name not in DROPOUT:
            raise refuse_rows(graph, call, f"it ends in {name}")
    return (
        tuple(n for n in numbers if n < first),
        tuple(n for n in numbers if first <= n <= last),
        tuple(n for n in numbers if n > last),
    )


def is_weight(graph: Graph, storage: int) -> bool:
    """Whether a storage is a parameter, or autocast's copy of one."""
    return graph.storages[storage].kind == "parameter" or storage in graph.casts


def is_pointwise(graph: Graph, number: int) -> bool:
    """Whether an op is a 1x1 convolution over all channels, as far as shapes tell."""
    op = graph.ops[number]
    if op.name != CONVOLUTION or len(op.reads) < 2:
        return False
    given, weight, made = (
        graph.storages[s].tensor for s in (*op.reads[:2], op.outputs[0])
    )
    if given is None or weight is None or made is None:
        return False
    samples, channels, *spatial = made.shape
    inputs = prod(given.shape) // (samples * prod(spatial) or 1)
    ones = (1 for _ in spatial)
    return weight.shape == (channels, inputs, *ones) and prod(given.shape) == (
        samples * inputs * prod(spatial)
    )


def refuse_rows(graph: Graph, call: int, why: str) -> PlanError:
    """The error for a call that cannot run in tiles of rows."""
    return PlanError(
        f"cannot tile {graph.calls[call]} by rows: {why}",
        needed="an MLP: norms, products with parameters, elementwise ops, a product; "
        "an attention that no fused kernel runs; or a norm that is written out",
        hint="leave this call out of the plan",
    )
