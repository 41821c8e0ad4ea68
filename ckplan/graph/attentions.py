"""Which calls hold an attention that is written out."""

from __future__ import annotations

from ckplan.graph.graph import Graph

PRODUCT, SOFTMAX = "bmm", frozenset({"_softmax", "_safe_softmax"})
"""Ops of an attention: of queries and keys, or with values; and between."""


def has_attention(graph: Graph, call: int) -> bool:
    """Whether a call itself multiplies heads before and after a softmax."""
    one = graph.calls[call]
    names = [
        op.name
        for op in graph.ops[one.start : one.stop]
        if op.name in SOFTMAX or (op.name == PRODUCT and op.call == call)
    ]
    return not SOFTMAX.isdisjoint(names) and len(names) > 2
