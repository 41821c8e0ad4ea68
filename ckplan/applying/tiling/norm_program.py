"""What a norm that is written out computes: elementwise ops, and sums of rows.

Values have the input's shape, [..., D], or one number for each row, [..., 1], or are
made of parameters alone, [D]. So rows are apart, and columns are once the sums of rows,
the statistics, are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ckplan.applying.tiling.row_around import is_constant
from ckplan.applying.tiling.row_program import (
    Elementwise,
    NotRowWise,
    Value,
    values_read,
)
from ckplan.applying.tiling.row_steps import apply_step
from ckplan.plan.tiles import IN_NORMS, STATISTICS

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Use:
    """The input, as an argument."""

    number: int  # of all uses, in the order in which backward makes their gradients


@dataclass(frozen=True, slots=True)
class Operand:
    """A parameter, as an argument."""

    number: int


@dataclass(frozen=True)
class NormProgram:
    """The steps of a norm, in order; the last one makes its output."""

    steps: tuple[Elementwise, ...]
    operands: tuple[Tensor, ...]  # [D]
    uses: int  # of the input
    statistics: frozenset[int]  # steps: sums of rows
    dtype: torch.dtype  # of the output
    shape: tuple[int, ...]  # of the input
    given: torch.dtype  # of the input

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All tensors that the call reads beside its input."""
        return self.operands

    def run(
        self,
        uses: Sequence[Tensor],
        operands: Sequence[Tensor],
        known: Mapping[int, Tensor] | None = None,
        noted: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Compute the output for some rows, or some columns.

        Args:
            uses: The input, for each of its uses: rows [r, D], or columns [R, d].
            operands: The parameters, [D] or [d].
            known: Step -> a statistic, [R, 1]; of columns, all of them.
            noted: Where to put the statistics.

        Returns:
            The output.
        """
        given = known or {}
        values: dict[int, Tensor] = dict(given)
        steps = self._steps_of_columns if given else self._steps_of_rows
        for number, dead in steps.items():
            if number not in given:
                step = _with(self.steps[number], uses, operands)
                values[number] = apply_step(step, values)
            if noted is not None and number in self.statistics:
                noted[number] = values[number].detach()
            for one in dead:
                del values[one]
        return values[len(self.steps) - 1]

    @cached_property
    def _steps_of_rows(self) -> dict[int, list[int]]:
        return self._last_uses(frozenset())

    @cached_property
    def _steps_of_columns(self) -> dict[int, list[int]]:
        return self._last_uses(self.statistics)

    def _last_uses(self, known: frozenset[int]) -> dict[int, list[int]]:
        """Steps that the output needs -> the steps whose values are read no more."""
        needed = {len(self.steps) - 1}
        last: dict[int, int] = {}
        for number in reversed(range(len(self.steps))):
            if number in needed and number not in known:
                for one in values_read(self.steps[number]):
                    last.setdefault(one, number)
                    needed.add(one)
        dead: dict[int, list[int]] = {number: [] for number in sorted(needed)}
        for one, number in last.items():
            dead[number].append(one)
        return dead


def _with(
    step: Elementwise, uses: Sequence[Tensor], operands: Sequence[Tensor]
) -> Elementwise:
    """A step with tensors in place of input and parameters."""

    def given(one: Any) -> Any:
        if isinstance(one, Use):
            return uses[one.number]
        return operands[one.number] if isinstance(one, Operand) else one

    kwargs = {name: given(one) for name, one in step.kwargs.items()}
    return Elementwise(step.function, tuple(map(given, step.args)), kwargs)


def norm_of(ops: list[Any], given: Tensor, made: Any) -> NormProgram:
    """What a forward without products computes, of its ops on fake tensors.

    Args:
        ops: The ops: functions, arguments and results, in order.
        given: Its input.
        made: What it returns.

    Raises:
        NotRowWise: It is no norm.
    """
    noted = _Noted(given)
    for func, args, kwargs, result in ops:
        if func is not _aten.detach.default:  # autograd keeps a result
            noted.add(func, args, kwargs, result)
    return noted.finish(made)


class _Noted:
    """Notes the steps of a norm."""

    def __init__(self, given: Tensor) -> None:
        if not given.is_contiguous() or given.shape[-1] < 2:
            raise NotRowWise("its input is not contiguous, or has no columns")
        self._given = given
        self._step_of: dict[int, int] = {}  # id of a tensor -> step
        self._steps: list[Elementwise] = []
        self._operands: list[Tensor] = []
        self._statistics: set[int] = set()

    def add(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Note one op."""
        if func._schema.is_mutable:
            func = self._out_of_place(func, args)
        name = func.overloadpacket.__name__
        if name not in IN_NORMS | STATISTICS or not isinstance(made, Tensor):
            raise NotRowWise(f"it runs {name}")
        if not self._is_known(made):
            raise NotRowWise("it changes the shape of a value")
        if name in STATISTICS:
            args, kwargs = self._sum(func, args, kwargs, made)
            self._statistics.add(len(self._steps))
        step = Elementwise(
            func,
            tuple(map(self._noted, args)),
            {name: self._noted(one) for name, one in kwargs.items()},
        )
        self._step_of[id(made)] = len(self._steps)
        self._steps.append(step)

    def _is_known(self, made: Tensor) -> bool:
        """Whether a value has the input's shape, one number by row, or by column."""
        *rows, columns = self._given.shape
        known = (*rows, columns), (*rows, 1), (columns,)
        return tuple(made.shape) in known and made.is_contiguous()

    def _out_of_place(self, func: Any, args: Any) -> Any:
        """The same op, but for what it writes to: numbers of rows are few."""
        name, (first, *_) = func.overloadpacket.__name__, args
        plain = name.removesuffix("_")
        if id(first) not in self._step_of or first.shape[-1] != 1:
            raise NotRowWise(f"it runs {name} in place")
        if plain == name or plain not in IN_NORMS:
            raise NotRowWise(f"it runs {name}")
        return getattr(getattr(_aten, plain), func._overloadname)

    def _sum(self, func: Any, args: Any, kwargs: Any, made: Tensor) -> Any:
        """Arguments of a sum of rows, whatever the number of dimensions."""
        names = [one.name for one in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        source, dims = given.pop(names[0]), given.pop("dim", None)
        same = isinstance(source, Tensor) and source.shape == self._given.shape
        last = dims is not None and [d % made.dim() for d in dims] == [made.dim() - 1]
        if not (same and last and given.get("keepdim")):
            raise NotRowWise("it sums up something else than its rows")
        return (source,), {**given, "dim": [-1]}

    def _noted(self, one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if one is self._given:
            return Use(-1)  # numbered in the end
        if id(one) in self._step_of:
            return Value(self._step_of[id(one)])
        if not is_constant(one) or one.dim() > 1 or one.numel() == 1:
            raise NotRowWise("it reads other tensors than its input and parameters")
        for number, known in enumerate(self._operands):
            if known is one:
                return Operand(number)
        self._operands.append(one)
        return Operand(len(self._operands) - 1)

    def finish(self, made: Any) -> NormProgram:
        """The norm, if the forward returned the result of its last step."""
        last = len(self._steps) - 1
        if not self._statistics or self._step_of.get(id(made)) != last:
            raise NotRowWise("it is no product, ops, and a product, and no norm")
        needed = {last}
        for number in reversed(range(last + 1)):
            if number not in needed:
                raise NotRowWise("it computes what nobody reads")
            needed.update(values_read(self._steps[number]))
        if made.shape != self._given.shape:
            raise NotRowWise("its output has another shape than its input")
        steps, uses = _numbered(self._steps)
        return NormProgram(
            steps,
            tuple(self._operands),
            uses,
            frozenset(self._statistics),
            made.dtype,
            tuple(self._given.shape),
            self._given.dtype,
        )


def _numbered(steps: list[Elementwise]) -> tuple[tuple[Elementwise, ...], int]:
    """Steps whose uses of the input are numbered, and how many there are.

    Gradients come in the order of autograd: those of later ops first, and of one op in
    the order of its arguments.
    """
    count = 0

    def next_use(one: Any) -> Any:
        nonlocal count
        if not isinstance(one, Use):
            return one
        count += 1
        return Use(count - 1)

    found: list[Elementwise] = []
    for step in reversed(steps):
        args = tuple(map(next_use, step.args))
        kwargs = {name: next_use(one) for name, one in step.kwargs.items()}
        found.append(replace(step, args=args, kwargs=kwargs))
    return tuple(reversed(found)), count
