"""Chains of equal layers, and the least that reversing one takes.

A. Griewank, A. Walther, "Algorithm 799: Revolve", 2000.
"""

from __future__ import annotations

from math import comb

import graphs

UNIT = 10  # bytes of everything that a layer makes
LEAST = 4 * UNIT  # of two layers and more: x, what two ops make, a gradient


def uniform(length: int) -> graphs.Graph:
    """Layers of one op that saves what it reads, and nothing else."""
    forward = graphs.Forward()
    x = forward.given(UNIT)
    with forward.call("", module="Root"):
        for number in range(length):
            with forward.call(f"{number}", module="Block"):
                (x,) = forward.op("f", [x], makes=[UNIT], saves=[x])
    forward.op("mean", [x], makes=[0])
    return forward.graph()


def extra_steps(length: int, slots: int) -> int:
    """Forward steps beyond one forward that so many checkpoints cost, at best.

    The binomial numbers; the start of the chain is one of the checkpoints.
    """
    repeats = 0
    while comb(slots + repeats, slots) < length:
        repeats += 1
    steps = repeats * length - comb(slots + repeats, slots + 1)
    return steps - (length - 1)
