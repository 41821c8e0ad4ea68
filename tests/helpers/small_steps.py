"""Small steps at random, of kinds: what brute force can still enumerate."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import graphs
from graphs import Forward

from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Workspace

KINDS = ("chain", "skips", "calls in calls", "encodings", "in place", "nesting")


def small_step(rng: Random, kind: str) -> Graph:
    """Make up a small step.

    ``chain``: every call reads what the one before it returned. ``skips``: ops read
    anything made before. ``calls in calls``: with skips, too. ``encodings``: what ops
    make has smaller forms. ``in place``: ops change what others made, and tensors live
    longer than they must. ``nesting``: a chain of few ops, some of them in calls in
    calls, where regions inside regions can be enumerated.
    """
    if kind == "in place":
        return replace(graphs.random_step(rng, num_ops=2), encodings=())
    graph = _Step(rng, kind).graph()
    if kind == "encodings":
        graph = replace(graph, encodings=tuple(_encodings(graph, rng)))
    return graph


class _Step:
    """A small step in the making."""

    def __init__(self, rng: Random, kind: str) -> None:
        self._rng = rng
        self._forward = Forward()
        self._most_bytes = rng.choice((9, 99, 999))
        self._skips = kind in ("skips", "calls in calls", "encodings")
        self._saves = 0.9 if kind == "nesting" else 0.6
        self._deep = {"calls in calls": 0.7, "nesting": 0.05}.get(kind, 0.0)
        self._lengths = {"calls in calls": (1, 1, 2), "nesting": (1,)}.get(
            kind, (1, 2, 2, 3)
        )
        self._counts = {"calls in calls": (2, 3), "nesting": (3, 3, 3, 4)}.get(
            kind, (2, 3, 3, 4)
        )
        self._outputs = (1,) if kind == "nesting" else (1, 1, 1, 2)
        self._made = [self._forward.given(self._bytes())]

    def graph(self) -> Graph:
        rng, forward = self._rng, self._forward
        with forward.call("", module="Root"):
            for number in range(rng.choice(self._counts)):
                self._block(f"{number}", self._deep)
                if rng.random() < 0.2:
                    self._run("glue")
        forward.op("mean", [self._made[-1]], makes=[4])
        return forward.graph()

    def _block(self, name: str, deep: float) -> None:
        with self._forward.call(name, module="Block"):
            for place in range(self._rng.choice(self._lengths)):
                if self._rng.random() < deep:
                    self._block(f"{name}.{place}", 0.0)
                else:
                    self._run("op")

    def _run(self, name: str) -> None:
        rng, forward, made = self._rng, self._forward, self._made
        reads = [made[-1]]
        if self._skips and rng.random() < 0.5:
            reads.append(rng.choice(made))
        if rng.random() < 0.5:
            weight_bytes = rng.randint(1, self._most_bytes // 3)
            reads.append(forward.given(weight_bytes, "parameter"))
        reads = list(dict.fromkeys(reads))
        makes = [self._bytes() for _ in range(rng.choice(self._outputs))]
        outputs = forward.op(
            name,
            reads,
            makes=makes,
            saves=[s for s in reads if rng.random() < self._saves],
            workspace=Workspace(*rng.choice(((), (), (), ((self._bytes(),),)))),
            seconds=rng.choice((0, *range(1, 10))),
        )
        forward.save(*(s for s in outputs if rng.random() < 0.3))
        made.extend(outputs)

    def _bytes(self) -> int:
        return self._rng.randint(0, self._most_bytes)


def _encodings(graph: Graph, rng: Random) -> list[Encoding]:
    found = []
    for number, op in enumerate(graph.ops[: graph.num_forward - 1]):
        for output, storage in enumerate(op.outputs):
            if rng.random() < 0.2:
                size = rng.randint(0, graph.storages[storage].bytes)
                costs = [rng.randint(0, 4) for _ in range(4)]
                found.append(Encoding(number, output, "bits", size, *costs))
    return found
