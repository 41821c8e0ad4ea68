"""The rows of the layer table: calls that own the activations.

A call that owns more than ``MAX_LAYER_SHARE`` of the activations is replaced by its
children, if these own any. The parent's own ops between its children get a separate
row, so the rows add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from ckplan.errors import PlanError
from ckplan.graph.fqn import call_name
from ckplan.graph.graph import Graph
from ckplan.graph.patterns import expand_calls, fold_calls
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C", bound="AbstractCost")

MAX_LAYER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class AbstractCost:
    """Numbers that are summed over ops and calls; without arguments, all are 0."""

    def __add__(self, other: Self) -> Self:
        """Add part by part."""
        names = [field.name for field in fields(self)]
        return type(self)(*(getattr(self, n) + getattr(other, n) for n in names))


@dataclass(frozen=True, slots=True)
class Cost(AbstractCost):
    """Cost of some ops in forward."""

    activation_bytes: int = 0
    flops: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """A call with its children, or only the own ops of a call."""

    call: int
    own_code: bool
    cost: Cost


@dataclass(frozen=True, slots=True)
class Row:
    """Equal layers, with the sum of their costs."""

    name: str  # a pattern of plans
    own_code: bool
    count: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward of a step, as layers."""

    layers: tuple[Layer, ...]  # one per row, in order of their first op
    inside: Cost  # of all calls: the sum over layers
    outside: Cost  # of ops outside all calls, such as the loss


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    return sum(costs, Cost())


def costs_inside(graph: Graph, own: Sequence[C]) -> list[C]:
    """Cost of every call including its children; the last is outside all calls."""
    inside = list(own)
    for index, call in reversed(list(enumerate(graph.calls))):
        inside[call.parent] += inside[index]
    return inside


def forward_costs(graph: Graph) -> Forward:
    """Find the layers of the table and their costs."""
    own = _own_costs(graph)
    inside = costs_inside(graph, own)
    total = total_cost(inside[call] for call in graph.children[OUTSIDE_CALLS])
    layers: list[Layer] = []
    stack = graph.children[OUTSIDE_CALLS][::-1]
    while stack:
        call = stack.pop()
        children = graph.children[call]
        large = inside[call].activation_bytes > MAX_LAYER_SHARE * total.activation_bytes
        if large and any(inside[child].activation_bytes for child in children):
            if own[call] != Cost():
                layers.append(Layer(call, True, own[call]))
            stack += reversed(children)
        else:
            layers.append(Layer(call, False, inside[call]))
    return Forward(tuple(layers), total, own[OUTSIDE_CALLS])


def layer_name(graph: Graph, call: int) -> str:
    """The pattern of one call: its FQN, numbered if the module ran more than once."""
    return patterns(graph, [call])[0][0]


def fold_layers(graph: Graph, layers: Iterable[Layer]) -> list[Row]:
    """Rows of equal layers, largest first, named by patterns as in plans.

    Layers are equal if they have one module type and the same ops at the same cost.
    """
    equal_layers: dict[object, list[Layer]] = defaultdict(list)
    for layer in layers:
        equal_layers[_digest(graph, layer)].append(layer)
    rows = [row for group in equal_layers.values() for row in _rows(graph, group)]
    return sorted(rows, key=lambda row: -row.cost.activation_bytes)


def _digest(graph: Graph, layer: Layer) -> object:
    call = graph.calls[layer.call]
    ops = tuple(op.name for op in graph.ops[call.start : call.stop])
    size = layer.cost.activation_bytes, layer.cost.flops
    return layer.own_code, call.module, size, ops


def _rows(graph: Graph, equal_layers: Sequence[Layer]) -> list[Row]:
    cost_of = {_key(graph, layer.call): layer.cost for layer in equal_layers}
    found = patterns(graph, [layer.call for layer in equal_layers])
    return [
        Row(
            name,
            equal_layers[0].own_code,
            len(keys),
            total_cost(cost_of[k] for k in keys),
        )
        for name, keys in found
    ]


def patterns(
    graph: Graph, calls: Iterable[int]
) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    """Patterns that together match some calls, each with its matched calls."""
    chosen = [_key(graph, call) for call in calls]
    everything = [(call.fqn, call.number) for call in graph.calls]
    try:
        names = fold_calls(chosen, everything)
    except PlanError:  # a module's name with a bracket in it
        return [(call_name(*key), (key,)) for key in chosen]
    return [(name, expand_calls(name, everything)) for name in names]


def _key(graph: Graph, call: int) -> tuple[str, int]:
    return graph.calls[call].fqn, graph.calls[call].number


def _own_costs(graph: Graph) -> list[Cost]:
    """Cost of every call without its children; the last is outside all calls."""
    own = [Cost()] * (len(graph.calls) + 1)
    for op in graph.ops[: graph.num_forward]:
        own[op.call] += Cost(0, op.flops, op.seconds)
    for storage in graph.storages:
        if storage.kind == "activation":
            made = storage.maker != BEFORE_STEP
            maker = graph.ops[storage.maker].call if made else OUTSIDE_CALLS
            own[maker] += Cost(storage.bytes)
    return own
