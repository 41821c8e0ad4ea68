"""How far two compiled steps are apart, and what of that is rounding alone.

Where an exact gradient is zero, as that of the bias of an attention's keys, its numbers
in float32 are rounding alone, and relative to themselves they differ by anything. The
same step in float64 decides: it says how far either is from the exact gradient. It runs
uncompiled; if the step draws numbers, compiled, since only that draws the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ckplan.training.step import AMP
from ckplan.training.workload import Workload

ROUNDING = 1e-4
"""Largest difference of a number, relative to the largest one beside it, that kernels
of another shape may make by rounding."""
_LAST_PLACES = 2  # so many, of numbers in the type of autocast
_SPREAD, _SPREAD_OF_ZERO = 4.0, 32.0
"""How much further from the exact numbers one of two roundings may be; and where these
are zero, so that nothing but rounding is there, as in biases before a norm."""
_ZERO = 1e-8  # or less of what a step has in float32: zero, as float64 has it

Values: TypeAlias = Mapping[str, torch.Tensor]
"""What a step computes, by name."""


def differences(found: Values, expected: Values) -> dict[str, float]:
    """The largest difference within each value, relative to the largest number there.

    Infinite where one has a number and the other none, has another kind of number, or
    where whole numbers differ. Names that are equal bit for bit are left out.

    Args:
        found: Values of a step.
        expected: Those of a step to compare with.
    """
    apart = {}
    for name in {**expected, **found}:
        one, other = found.get(name), expected.get(name)
        if one is None or other is None or one.shape != other.shape:
            apart[name] = float("inf")
        elif not torch.equal(one, other):
            apart[name] = _difference(one, other)
    return {name: by for name, by in apart.items() if by}


def rounding_alone(
    names: Iterable[str], found: Values, expected: Values, exact: Values
) -> set[str]:
    """Names of values that are no further from the exact ones than is expected.

    Args:
        names: Of values to judge.
        found: Values of a step.
        expected: Those of a step of the same precision.
        exact: Those of the same step in float64.
    """

    def error(one: Values, name: str) -> float:
        return float((one[name].double() - exact[name].double()).abs().max())

    def spread(name: str) -> float:
        exactly, theirs = (float(v[name].abs().max()) for v in (exact, expected))
        return _SPREAD_OF_ZERO if exactly <= _ZERO * theirs else _SPREAD

    all_have = [n for n in names if all(n in v for v in (found, expected, exact))]
    return {n for n in all_have if error(found, n) <= spread(n) * error(expected, n)}


def same_draws(values: Values, exact: Values, without: Iterable[str]) -> bool:
    """Whether a step in float64 drew what a step drew: they agree but for rounding.

    Other dropout masks make other losses and gradients, so such a step decides nothing.

    Args:
        values: Of the step.
        exact: Of the step in float64.
        without: Names that are in doubt; others must be near, the loss among them.
    """
    left_out = {"random state", *without}
    sure = {name: one for name, one in values.items() if name not in left_out}
    if "loss" not in sure or not sure.keys() <= exact.keys():
        return False
    near = {name: exact[name].to(one.dtype) for name, one in sure.items()}
    return max(differences(near, sure).values(), default=0.0) <= ROUNDING


def rounding_of(amp: str | None) -> float:
    """The largest relative difference that may be rounding.

    Args:
        amp: The type of autocast: kernels of another shape round to it elsewhere.

    >>> rounding_of(None), rounding_of("bf16")
    (0.0001, 0.015625)
    """
    if amp is None:
        return ROUNDING
    return float(max(ROUNDING, _LAST_PLACES * torch.finfo(AMP[amp]).eps))


def in_float64(
    workload: Workload, values_of: Callable[[Workload], Values]
) -> Values | None:
    """What a step computes in float64; None if the model cannot compute in it.

    Args:
        workload: Left as it is; a copy of its model computes.
        values_of: Takes a step.
    """
    try:
        model = copy.deepcopy(workload.model).double()
        batch = pytree.tree_map(_wide, workload.batch)
        return values_of(replace(workload, model=model, batch=batch))
    except Exception:  # whatever a model says that wants float32
        return None


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point() or one.dtype != other.dtype:
        return float("inf")
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return float("inf")
    left, right = one[~nan].double(), other[~nan].double()
    far = torch.where(left == right, 0.0, (left - right).abs())  # infinities, too
    if not far.numel() or not (largest := float(far.max())):
        return 0.0
    return largest / (float(right.abs().max()) or 1.0)


def _wide(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if is_float else leaf
