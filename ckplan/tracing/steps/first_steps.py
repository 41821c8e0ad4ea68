"""The first steps of a model with a plan, which are not timed."""

from __future__ import annotations

from torch import nn

from ckplan.applying import status
from ckplan.training.step import TrainingStep

WARM_STEPS = 2  # the first one is recorded
_MOST_STEPS = 5  # of models whose first steps fill caches, and so call torch otherwise


def take_first_steps(step: TrainingStep, model: nn.Module | None, expected: int) -> int:
    """Take the first steps, some more while their forwards are recorded anew.

    Args:
        step: A step of the model.
        model: Its model; None if it has no plan.
        expected: How many forwards each step records anyway.

    Returns:
        How many more than expected the last one recorded.
    """
    more = 0
    for number in range(1, 1 + _MOST_STEPS):
        before = _num_recorded(model)
        step.run()
        more = _num_recorded(model) - before - expected
        if number >= WARM_STEPS and more <= 0:
            break
    return max(more, 0)


def _num_recorded(model: nn.Module | None) -> int:
    """How many forwards of the regions of its plan were recorded."""
    if model is None:
        return 0
    return sum(region.recorded for region in status(model).regions)
