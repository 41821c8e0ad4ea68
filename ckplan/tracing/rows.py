"""How many rows the batch of a workload has, and whether they are samples."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ckplan.errors import CkplanError, WorkloadError
from ckplan.tracing.copying import copied
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.training.loading import WorkloadSpec
from ckplan.training.losses import output_and_loss
from ckplan.training.workload import Workload, rows_of, with_rows

_OF_SEQUENCES = nn.RNNBase, nn.MultiheadAttention


def spec_rows(spec: WorkloadSpec) -> int:
    """Rows of the batch that a workload makes, which is built without bytes.

    Raises:
        WorkloadError: The rows cannot be found, or are time to a module, or the
            workload cannot be built.
    """
    make, name = spec.load(), None
    try:
        with fake_tensors():
            workload = make()
            if spec.batch_dim is None:
                name = _module_of_time(workload)
    except CkplanError:  # it needs real values
        workload = make()
    return _rows(workload, name)


def model_rows(workload: Workload, *, named: bool) -> int:
    """The same for a model that exists, of which a copy without bytes runs.

    Args:
        workload: With the dimension of its rows.
        named: Whether the user named that dimension: it is not checked.
    """
    name = None
    if not named and _sequence_modules(workload.model):
        with suppress(Exception), fake_tensors() as scope:  # profiling says what fails
            name = _module_of_time(copied(workload, scope))
    return _rows(workload, name)


def _rows(workload: Workload, name: str | None) -> int:
    if name is None:
        return rows_of(with_rows(workload, max(rows_of(workload), 1)))
    kind = type(workload.model.get_submodule(name)).__name__
    raise WorkloadError(
        "cannot take dimension 0 of the batch as its samples: it is time to "
        + (f"{name!r} ({kind})" if name else f"the model ({kind})"),
        needed="the dimension that counts samples",
        hint="--batch-dim 1 (batch_dim=1 in Python); or --batch-dim 0, if it is right",
    )


def _sequence_modules(model: nn.Module) -> dict[nn.Module, str]:
    found = model.named_modules()
    return {module: name for name, module in found if isinstance(module, _OF_SEQUENCES)}


def _module_of_time(workload: Workload) -> str | None:
    """A module to which the rows of a fake workload are time; None if none is seen."""
    names, rows = _sequence_modules(workload.model), rows_of(workload)
    if not names:
        return None
    few = max(rows // 2, 1)
    try:
        pair = [_shapes_at(workload, n, names) for n in (few, 2 * few)]
    except Exception:
        return None  # profiling says what is wrong
    for (module, one), (_, other) in zip(*pair, strict=False):
        time = 0 if len(one) == 2 or not module.batch_first else 1
        sizes = enumerate(zip(one[:2], other[:2], strict=False))
        if [dim for dim, (a, b) in sizes if a != b] == [time]:
            return names[module]
    return None


def _shapes_at(
    workload: Workload, rows: int, modules: Mapping[nn.Module, str]
) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """The shape of the first input of every call of some modules, in order."""
    seen: list[tuple[nn.Module, tuple[int, ...]]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        if isinstance(first, torch.Tensor):
            seen.append((module, tuple(first.shape)))

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in modules]
    try:
        output_and_loss(with_rows(workload, rows))
    finally:
        for hook in hooks:
            hook.remove()
    return seen
