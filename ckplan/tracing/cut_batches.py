"""Cut the batches of a running loop, to record it where whole batches do not fit.

A batch is cut where it enters the loop. That is where a ``DataLoader`` hands it out, so
labels that only the loss reads are cut with it. In a loop without a ``DataLoader`` it
is where a model is called; then the model must get the labels, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from ckplan.errors import CkplanError, WorkloadError
from ckplan.training.failures import first_line, location_hint
from ckplan.training.workload import tensors_of

LEAST_DIVISOR = 2
_LEAST_ROWS = 2  # one row broadcasts: a loss on whole labels would not fail


class BatchCutter:
    """Cuts every batch of a loop to the same share of its rows."""

    def __init__(self, divisor: int) -> None:
        """Cut nothing yet.

        Args:
            divisor: The first cut keeps one row of so many, the second one half of it.

        Raises:
            WorkloadError: The divisor cuts nothing.
        """
        if divisor < LEAST_DIVISOR:
            raise WorkloadError(
                f"cannot cut batches to one row of {divisor}",
                needed=f"a divisor of {LEAST_DIVISOR} or more",
                hint="--reduce 8, in Python reduce=8: 64 rows are recorded at 8 and 4",
            )
        self.from_loader = False  # whether a DataLoader hands out the batches
        self.is_open = False
        self.divisor = divisor
        self._sizes: dict[int, None] = {}  # rows of uncut batches, since `begin`
        self._halved = False
        self._inside = False  # whether a module runs
        self._first: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def begin(self) -> None:
        """Begin the first cut of the steps that are recorded."""
        self._halved = False
        if self.from_loader:
            self._sizes.clear()

    def halve(self) -> None:
        """Begin the second cut."""
        self._halved = True

    def rows(self) -> tuple[int, int, int]:
        """Rows of a batch: after the second cut, after the first one, uncut.

        Raises:
            WorkloadError: No batch was cut, or the shares of two batches differ.
        """
        if not self._sizes:
            raise WorkloadError(
                "cannot record smaller batches: the loop has none that can be cut",
                needed="a DataLoader whose batches are tensors, or containers of "
                "them; or a model that is called with tensors",
                hint="a smaller batch, by the options of the script itself",
            )
        whole = max(self._sizes)
        few, many = self._kept(whole)
        for other in self._sizes:
            kept = self._kept(other)
            if any(
                a * other != b * whole for a, b in zip((few, many), kept, strict=True)
            ):
                raise WorkloadError(
                    f"cannot cut batches of {whole} and of {other} rows to the same "
                    f"share: {many} of {whole} and {kept[1]} of {other} remain",
                    needed=f"batches whose rows {2 * self.divisor} divides",
                    hint="another divisor, or other batches",
                )
        return few, many, whole

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """A scope in which batches are cut."""
        iterator, module = dataloader._BaseDataLoaderIter, nn.Module
        patches = [
            (iterator, "__next__", self._handing_out(iterator.__next__)),
            (module, "__call__", self._calling(module.__call__)),
        ]
        with ExitStack() as stack:
            for owner, name, made in patches:
                stack.enter_context(mock.patch.object(owner, name, made))
            self.is_open = True
            stack.callback(setattr, self, "is_open", False)
            yield

    def explain(self, error: BaseException | None) -> None:
        """Say what an error of the loop can come from, if that is the cut.

        Raises:
            WorkloadError: The loop failed, and its batches were cut.
        """
        if not isinstance(error, Exception) or isinstance(error, CkplanError):
            return
        if not self._sizes:
            return
        whole = max(self._sizes)
        raise WorkloadError(
            f"the loop failed on the first {self._kept(whole)[not self._halved]} of "
            f"{whole} rows: {type(error).__name__}: {first_line(error)}",
            needed="a step that takes any number of rows: its batches from a "
            "DataLoader, or its labels given to the model",
            hint=location_hint(error),
        ) from error

    def _handing_out(self, next_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``next`` of loaders: the first rows of the first batch, again and again."""

        def next_batch(iterator: Any) -> Any:
            batch = next_of(iterator)  # so that an epoch is as long as ever
            with _disable_current_modes():  # cutting is no part of the step
                if (rows := _rows_of(batch)) is None:
                    return batch
                if iterator not in self._first:
                    cut = _first_rows(batch, rows, self._checked(rows)[1])
                    self._first[iterator] = rows, cut
                self.from_loader = True
                rows, first = self._first[iterator]
                self._sizes[rows] = None
                few, many = self._kept(rows)
                return _first_rows(first, many, few if self._halved else many)

        return next_batch

    def _calling(self, call_of: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of modules, whose inputs are cut if no loader hands out batches."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.from_loader or self._inside or not torch.is_grad_enabled():
                return call_of(module, *args, **kwargs)
            rows = next(iter(self._sizes), None) or _rows_of((args, kwargs))
            if rows is not None:
                few, many = self._checked(rows)
                self._sizes[rows] = None
                with _disable_current_modes():
                    kept = few if self._halved else many
                    args, kwargs = _first_rows((args, kwargs), rows, kept)
            self._inside = True
            try:
                return call_of(module, *args, **kwargs)
            finally:
                self._inside = False

        return call

    def _kept(self, rows: int) -> tuple[int, int]:
        many = rows // self.divisor
        return many // 2, many

    def _checked(self, rows: int) -> tuple[int, int]:
        few, many = self._kept(rows)
        if few >= _LEAST_ROWS:
            return few, many
        most = rows // (2 * _LEAST_ROWS)
        raise WorkloadError(
            f"cannot cut a batch of {rows} rows to one row of {self.divisor}, and to "
            "half of that",
            needed=f"a cut that leaves {2 * _LEAST_ROWS} rows or more",
            hint=f"--reduce {most}" if most >= LEAST_DIVISOR else "a larger batch",
        )


def cutter_of(divisor: int | None, num_steps: int) -> BatchCutter | None:
    """The cutter of a recorder, if its batches are to be cut.

    Raises:
        WorkloadError: The divisor cuts nothing, or several steps are to be recorded.
    """
    if divisor is None:
        return None
    if num_steps > 1:
        raise WorkloadError(
            "cannot record the largest of several batches that are all cut",
            needed="one of both: several steps, or a smaller batch",
            hint="--reduce, without --steps; the first batch is the one that is cut",
        )
    return BatchCutter(divisor)


def check_alike(few: Mapping[str, str], many: Mapping[str, str], rows: Any) -> None:
    """Refuse two recorded batches that differ in more than their rows.

    Args:
        few: Shapes of the batch after the second cut, by name.
        many: Those after the first one.
        rows: As ``BatchCutter.rows`` returns them.

    Raises:
        WorkloadError: With the first shapes that differ in another way.
    """
    shapes = chain(few.items(), many.items())
    for name in dict.fromkeys(name for name, _ in shapes):
        one, other = few.get(name, "nothing"), many.get(name, "nothing")
        sizes = [
            [*map(int, re.findall(r"\d+", x.partition("[")[2]))] for x in (one, other)
        ]
        alike = len(sizes[0]) == len(sizes[1]) and all(
            low == high or low * rows[1] == high * rows[0]
            for low, high in zip(*sizes, strict=True)
        )
        if not alike or one.partition("[")[0] != other.partition("[")[0]:
            raise WorkloadError(
                f"cannot extrapolate to {rows[2]} rows: '{name}' is {other} in a step "
                f"of {rows[1]} rows and {one} in a step of {rows[0]}",
                needed="batches that differ in their rows only, of equal lengths",
                hint="a script that pads its batches to one length",
            )


def _rows_of(batch: Any) -> int | None:
    """The first size of the first tensor; None if there is no tensor with sizes."""
    return next((t.shape[0] for t in tensors_of(_plain(batch)) if t.dim()), None)


def _first_rows(batch: Any, rows: int, kept: int) -> Any:
    """The first rows of what has ``rows`` of them; one tensor stays one tensor."""
    copied: dict[int, torch.Tensor] = {}

    def cut(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            is_made = part.grad_fn is not None  # by parameters of the loop
            if is_made or part.dim() == 0 or part.shape[0] != rows:
                return part
            if id(part) not in copied:
                first = part.detach()[:kept].clone()
                copied[id(part)] = first.requires_grad_(part.requires_grad)
            return copied[id(part)]
        if isinstance(part, Mapping):
            return _like(part, {key: cut(one) for key, one in part.items()})
        if isinstance(part, (list, tuple)):
            if len(part) == rows and not tensors_of(_plain(part)):
                return type(part)(part[:kept])  # such as texts
            parts = map(cut, part)
            return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
        return part

    return cut(batch)


def _plain(part: Any) -> Any:
    """Mappings of any type as dicts, in which tensors are found."""
    if isinstance(part, Mapping):
        return {key: _plain(one) for key, one in part.items()}
    return [*map(_plain, part)] if isinstance(part, (list, tuple)) else part


def _like(part: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type with other values."""
    if type(part) is dict:
        return values
    made: Any = copy.copy(part)
    for key, value in values.items():
        made[key] = value
    return made
