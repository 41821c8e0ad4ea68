"""The step of a card on another card: seconds by the roofline, bytes as they are.

``ckplan profile --gpu`` takes the same roofline, so between cards of one compute
capability only small workspaces can differ. Other capabilities run other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Op

_RATES = {"float16": "fp16", "bfloat16": "bf16"}


def on_card(graph: Graph, card: gpus.Gpu) -> Graph:
    """The same step with the seconds of another card.

    Args:
        graph: A step that was profiled for a card.
        card: The other card.
    """
    made_for = card_of(graph)
    if made_for == card:
        return graph
    known = made_for or card
    slower = known.bandwidth / card.bandwidth
    launches = card.launch_seconds / known.launch_seconds

    def op_on_card(op: Op) -> Op:
        rate = _rate_of(graph, op)
        return replace(
            op,
            seconds=card.device_seconds(op.flops, op.moved_bytes, rate),
            launch_seconds=launches * op.launch_seconds,
        )

    def encoding_on_card(one: Encoding) -> Encoding:
        return replace(
            one,
            encode_seconds=slower * one.encode_seconds,
            decode_seconds=slower * one.decode_seconds,
        )

    return replace(
        graph,
        ops=tuple(map(op_on_card, graph.ops)),
        encodings=tuple(map(encoding_on_card, graph.encodings)),
        costs=f"roofline {card.name}",
        options={**graph.options, "gpu": card.name},
    )


def card_of(graph: Graph) -> gpus.Gpu | None:
    """The card that a step was profiled for, if it is known."""
    try:
        return gpus.find(graph.options["gpu"])
    except (KeyError, CkplanError):
        return None


def estimated(graph: Graph, card: gpus.Gpu) -> Iterator[str]:
    """What of the answer for a card is estimated, and with what."""
    made_for = card_of(graph)
    name = graph.options.get("gpu", "another GPU")
    if str(graph.fingerprint.get("device")) == "cpu":
        yield "bytes: as on a CPU, for which the trace was made"
    elif card.platform != "cuda":
        yield f"bytes: of CUDA on {name}; the kernels of {card.platform} are not known"
    elif made_for is None or made_for.capability != card.capability:
        yield f"bytes: kernels as on {name}, of another compute capability"
    elif made_for.multiprocessors != card.multiprocessors:
        yield f"bytes: workspaces of reductions as on {name}"
    if made_for != card:
        yield f"seconds: of the ops traced for {name}, at the rates of each card"
    if card.assumed:
        yield f"{', '.join(card.assumed)}: assumed, the table of cards has none"


def _rate_of(graph: Graph, op: Op) -> str:
    """The rate of an op by the type of its first floating-point input."""
    types = (graph.storages[one].tensor for one in op.reads)
    names = (tensor.dtype for tensor in types if tensor is not None)
    dtype = next((name for name in names if "float" in name), "float32")
    if dtype != "float32":
        return _RATES.get(dtype, "fp32")
    return "tf32" if "conv" in op.name else "fp32"
