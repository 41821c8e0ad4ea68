"""Fit the costs of recomputation to steps that were measured with plans and without.

A plan adds to a step ``again`` times the seconds of its recomputed ops, and the
engine's costs per saved tensor, per op, per region, per call that is followed, and per
op that is recorded in each step:

    added = again * ops + watch * saved + rerun * steps + region * regions
            + path * followed + record * recorded

Few plans are measured, and these parts grow together. So costs measured otherwise (ops
and the engine alone) are the prior: each has a Gaussian of a stated width around it, as
each measured sum has one of the width of its spread. The most probable costs minimise

    sum_k ((added_k - row_k . x) / width_k)^2 + sum_j ((x_j - prior_j) / width_j)^2

under x_j >= prior_j / 5: ridge regression towards the prior, in units of the widths
(Bishop, "Pattern Recognition and Machine Learning", 2006, section 3.3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ckplan.graph.records import EngineCosts

FITTED = (
    *("again", "watch_seconds", "rerun_seconds", "region_seconds", "path_seconds"),
    "record_seconds",
)
WIDTH_OF_OPS = 0.1  # of `again`, relative to the prior, which is of a step
WIDTH_OF_ENGINE = 1.0  # of every cost of the engine, relative to that of a chain
LEAST_SHARE = 0.2  # of the prior


class Added(NamedTuple):
    """What a plan added to a step, and what it consists of."""

    seconds: float  # in forward and backward
    width_seconds: float  # standard deviation, above 0
    ops_seconds: float  # of the ops that reran, each as long as in forward
    num_saved: int  # tensors that forwards of regions saved
    num_steps: int  # ops that reran
    num_regions: int
    num_followed: int = 0  # calls that are followed, since the plan names ops in them
    num_recorded: int = 0  # ops of forwards that each step records, and their reruns

    @property
    def row(self) -> tuple[float, ...]:
        """The factors of the costs that are ``FITTED``."""
        return self[2:]


def fit(costs: EngineCosts, plans: Sequence[Added]) -> EngineCosts:
    """The most probable costs; those that are not ``FITTED`` stay.

    Args:
        costs: The prior, measured otherwise; ``again`` is above 0.
        plans: What was measured.
    """
    prior = [getattr(costs, name) for name in FITTED]
    widths = [WIDTH_OF_OPS * prior[0], *(WIDTH_OF_ENGINE * one for one in prior[1:])]
    free = [place for place, width in enumerate(widths) if width > 0]
    found, least = list(prior), [LEAST_SHARE * one for one in prior]
    while free:
        steps = _least_squares(found, widths, free, prior, plans)
        below = [j for j in free if prior[j] + steps[j] < least[j]]
        for j in free:
            found[j] = max(prior[j] + steps[j], least[j])
        if not below:
            break
        free = [j for j in free if j not in below]  # these stay at the least
    return replace(costs, **dict(zip(FITTED, found, strict=True)))


def _least_squares(
    fixed: Sequence[float],
    widths: Sequence[float],
    free: Sequence[int],
    prior: Sequence[float],
    plans: Sequence[Added],
) -> dict[int, float]:
    """Distance of each free cost from its prior; the others are fixed."""
    rows = [[one.row[j] * widths[j] / one.width_seconds for j in free] for one in plans]
    base = [prior[j] if j in free else fixed[j] for j in range(len(prior))]
    left = [
        (one.seconds - sum(a * b for a, b in zip(one.row, base, strict=True)))
        / one.width_seconds
        for one in plans
    ]
    a = torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(-1, len(free))
    y = torch.tensor(left, dtype=torch.float64, device="cpu")
    normal = a.T @ a + torch.eye(len(free), dtype=torch.float64, device="cpu")
    solved = torch.linalg.solve(normal, a.T @ y).tolist()
    return {j: z * widths[j] for j, z in zip(free, solved, strict=True)}
