"""Steps that are compared: what each computes, and whether it is always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ckplan.compiling.search import Progress
from ckplan.compiling.step import loss_of_model
from ckplan.errors import CkplanError, WorkloadError
from ckplan.training.allocator import CPU, log_allocations, requested_within
from ckplan.training.failures import describe_failure, location_hint
from ckplan.training.workload import Workload, device_of
from ckplan.verifying.compiled_differences import Values, differences

_REPEATS = 5
_SPREAD = 2.0
"""How much further a step with a plan may be from one without than they from others."""


@dataclass(frozen=True)
class Results:
    """What one step computes, and the bytes it allocates at once."""

    values: dict[str, torch.Tensor]  # "loss", "gradient x", "buffer x", "random state"
    peak_bytes: int


@dataclass(frozen=True)
class Chance:
    """What differs between steps without a plan, though nothing of them changes.

    Several threads add to one number, as for a row of an embedding that is looked up
    more than once, in the order in which they get there.
    """

    apart: Mapping[str, float] = field(default_factory=dict)  # by name, relative
    # Of these, what a step with a plan has with the bits of one without, or as near.
    equal: frozenset[str] = frozenset()
    as_near: frozenset[str] = frozenset()


CERTAIN = Chance()


def repeated(
    planned: Values,
    plain: Values,
    take: Callable[[], Values],
    progress: Progress | None = None,
) -> Chance:
    """Repeat the step without a plan, where one with a plan has other bits.

    Args:
        planned: What the step with a plan computes.
        plain: What the step without one computes.
        take: Takes the step without a plan once more.
        progress: Told of the work.
    """
    names = [name for name in names_apart(planned, plain) if name in planned]
    apart: dict[str, float] = {}
    equal: set[str] = set()
    for number in range(_REPEATS if names else 0):
        if equal.issuperset(names):
            break
        if progress is not None:
            progress("results differ: repeating unplanned steps", number, _REPEATS)
        again = take()
        for name in names:
            if by := differences(_only(again, name), _only(plain, name)).get(name):
                apart[name] = max(by, apart.get(name, 0.0))
            if name in again and torch.equal(again[name], planned[name]):
                equal.add(name)
    from_plain = differences(planned, plain)
    as_near = (n for n, by in apart.items() if from_plain.get(n, 0.0) <= _SPREAD * by)
    return Chance(apart, frozenset(equal), frozenset(as_near) - equal)


def names_apart(found: Values, expected: Values) -> list[str]:
    """Names of values that are not equal bit for bit, or that only one step has."""
    return [
        name
        for name in {**expected, **found}
        if name not in found
        or name not in expected
        or not torch.equal(found[name], expected[name])
    ]


def results_of(
    workload: Workload,
    call: Callable[[], torch.Tensor],
    seed: int,
    title: str = "compiled",
) -> Results:
    """Results of a first step, and the peak of a second one, from the same state.

    Raises:
        WorkloadError: The step, of which the title says what kind it is, fails.
    """
    try:
        values = values_of(workload, call, seed)
        with _same_buffers(workload.model):
            peak_bytes = _peak_bytes(workload, lambda: _step(workload, call, seed))
    except CkplanError:
        raise
    except Exception as error:  # whatever a model raises
        raise WorkloadError(
            f"the {title} step {describe_failure(error)}",
            needed="a model that takes a step of training on its batch, as "
            f"{title} code",
            hint=location_hint(error),
        ) from error
    return Results(values, peak_bytes)


def place_of(workload: Workload) -> torch.device:
    """The device of a workload's parameters and buffers."""
    return device_of([*workload.model.parameters(), *workload.model.buffers()])


def _peak_bytes(workload: Workload, take: Callable[[], object]) -> int:
    """Most bytes that a step takes; on a card, that it asks for, beyond those before.

    There, the blocks that it gets can be larger: what is left of them is not split off.
    """
    device = place_of(workload)
    if device == CPU:
        with log_allocations() as log:
            take()
        return log.peak_bytes
    with requested_within(device) as requested:
        take()
    return requested.peak_bytes


def _random_state(device: torch.device) -> torch.Tensor:
    """The state of the CPU's generator, and of the card's behind it."""
    here = torch.get_rng_state()
    if device == CPU:
        return here
    return torch.cat([here, torch.cuda.get_rng_state(device)])


def values_of(
    workload: Workload, call: Callable[[], torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """What one step computes, on the CPU.

    Buffers are left as they were, for the next to begin.
    """
    model, kept = workload.model, partial(torch.Tensor.to, device=CPU, copy=True)
    with _same_buffers(model):
        values = {"loss": kept(_step(workload, call, seed))}
        values["random state"] = _random_state(place_of(workload))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                values[f"gradient {name}"] = kept(parameter.grad)
        values |= {f"buffer {n}": kept(one) for n, one in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return values


def _step(
    workload: Workload, call: Callable[[], torch.Tensor], seed: int
) -> torch.Tensor:
    workload.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = call()
    loss.backward()
    return loss.detach()


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Give buffers the values back that they had before."""
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, one in model.named_buffers():
            one.copy_(buffers[name])


def _only(values: Values, name: str) -> dict[str, torch.Tensor]:
    return {name: values[name]} if name in values else {}


def eager_results(workload: Workload, seed: int) -> Results | None:
    """Results of an uncompiled step; None if it draws: compiled code draws others.

    Raises:
        WorkloadError: It fails, or trains nothing.
    """

    def loss() -> torch.Tensor:
        found = loss_of_model(workload.model, workload)
        if not found.requires_grad:
            raise WorkloadError(
                "the loss requires no gradient: the step trains nothing",
                needed="a loss that depends on a parameter with requires_grad",
                hint="look for torch.no_grad(), .detach() or frozen parameters",
            )
        return found

    found = results_of(workload, loss, seed, "uncompiled")
    torch.manual_seed(seed)
    untouched = _random_state(place_of(workload))
    return found if torch.equal(found.values["random state"], untouched) else None
