"""What a rank sends in a step of the optimizer, and what of that takes time.

Collectives are rings: of N ranks, each sends (N - 1) / N of the bytes for an all-gather
or a reduce-scatter, twice that for an all-reduce, in as many pieces on all links at
once (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009). They run beside the phase that they belong to, which hides as much
of them as it lasts; what follows the optimizer is hidden by nothing. Latencies are not
counted, as of a roofline: it is the least that a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckplan.graph.graph import Graph
from ckplan.graph.queues import span
from ckplan.graph.sharding.gathering import backward_spans, unit_passes
from ckplan.graph.sharding.scheme import Sharding
from ckplan.graph.sharding.state import ROOT, State, Unit, flat_shares, state_of


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends, by the phase that they run beside."""

    forward_bytes: int = 0  # of every micro-batch: gathers
    backward_bytes: int = 0  # of every micro-batch
    last_backward_bytes: int = 0  # of the last micro-batch alone
    update_bytes: int = 0  # after the optimizer: gathers
    reduced_bytes: int = 0  # of those of a backward: to reduce, the rest to gather

    def step_bytes(self, num_batches: int) -> int:
        """Bytes of a step of the optimizer."""
        each = self.forward_bytes + self.backward_bytes
        return num_batches * each + self.last_backward_bytes + self.update_bytes

    def step_reduced_bytes(self, num_batches: int) -> int:
        """Bytes of its reductions alone."""
        return self.reduced_bytes * (num_batches if self.backward_bytes else 1)


@dataclass(frozen=True, slots=True)
class Communication:
    """Seconds of a rank's collectives in a step of the optimizer."""

    seconds: float  # of all
    reduce_seconds: float  # of these, reductions; the rest are gathers
    exposed_seconds: float  # of what is longer than the phase it runs beside
    rate: int  # bytes per second that a rank sends at most


def traffic_of(graph: Graph, sharding: Sharding) -> Traffic:
    """What a rank sends under a scheme.

    ``ddp`` and ``zero1`` reduce whole gradients once a step of the optimizer, ``zero2``
    and those that divide parameters after every micro-batch, as what they keep is a
    part. ``zero1`` and ``zero2`` gather what the optimizer changed, the others every
    unit before its forward and, but for the whole model's own parameters, before its
    backward.

    Args:
        graph: The step of one process.
        sharding: The scheme, and the number of ranks.

    Raises:
        GraphError: The trace does not name its parameters.
        PlanError: A unit is no module of the model.
    """
    state = state_of(graph, sharding.units)
    others = sharding.world_size - 1
    sizes = [graph.storages[gradient].bytes for gradient in state.gradients]
    part = others * -(-sum(sizes) // sharding.world_size)  # of all gradients
    if sharding.scheme == "ddp":
        return Traffic(last_backward_bytes=2 * part, reduced_bytes=part)
    if sharding.scheme == "zero1":
        return Traffic(0, 0, part, part, reduced_bytes=part)
    if sharding.scheme == "zero2":
        return Traffic(0, part, 0, part, reduced_bytes=part)
    if sharding.scheme == "fsdp2":
        part = others * _row_parts(state, sizes, sharding.world_size)
    forward, backward = _gathers(graph, state, sharding)
    return Traffic(others * forward, others * backward + part, reduced_bytes=part)


def _row_parts(state: State, sizes: Sequence[int], num_ranks: int) -> int:
    """A rank's own rows of all gradients."""
    if len(sizes) == len(state.parameters):
        return sum(parameter.share_bytes(num_ranks) for parameter in state.parameters)
    return sum(map(state.row_shares(num_ranks), sizes))  # some are frozen


def _gathers(graph: Graph, state: State, sharding: Sharding) -> tuple[int, int]:
    """A rank's own parts of all units gathered in forward, and in backward."""
    spans, ranks = backward_spans(graph), sharding.world_size

    def own_part(unit: Unit) -> int:
        if sharding.scheme == "fsdp2":
            return sum(parameter.share_bytes(ranks) for parameter in unit.parameters)
        return flat_shares([sum(p.bytes for p in unit.parameters)], ranks)[0]

    passes = [(unit, call, own_part(unit)) for unit, call in unit_passes(state)]
    backward = (
        size for unit, call, size in passes if unit.fqn != ROOT and call in spans
    )
    return sum(size for _, _, size in passes), sum(backward)


def communication(
    graph: Graph, traffic: Traffic, rate: int, added_seconds: float = 0.0
) -> Communication:
    """The seconds of a step's collectives, and those that nothing hides.

    Args:
        graph: The step, of one rank or of one process: its seconds are without them.
        traffic: What a rank sends.
        rate: Bytes per second from a rank to the others, and from them at once.
        added_seconds: What a plan adds to the backwards of a step of the optimizer.
    """
    many = graph.num_batches
    forward, backward = _phases(graph)
    backward += added_seconds / many
    sent = traffic.backward_bytes, traffic.backward_bytes + traffic.last_backward_bytes
    beside = [
        (many * [traffic.forward_bytes], forward),
        ((many - 1) * [sent[0]] + [sent[1]], backward),
        ([traffic.update_bytes], 0.0),
    ]
    return Communication(
        traffic.step_bytes(many) / rate,
        traffic.step_reduced_bytes(many) / rate,
        sum(_exposed(sizes, rate, seconds) for sizes, seconds in beside),
        rate,
    )


def _exposed(sizes: Sequence[int], rate: int, seconds: float) -> float:
    """What sending takes longer than a phase, each time."""
    return sum(max(size / rate - seconds, 0.0) for size in sizes)


def _phases(graph: Graph) -> tuple[float, float]:
    """Seconds of forward and of backward of one micro-batch."""
    device, launch = graph.device_and_launch
    start = graph.num_forward
    forward = span(launch[:start], device[:start]).seconds
    return forward, graph.batch_span.seconds - forward
