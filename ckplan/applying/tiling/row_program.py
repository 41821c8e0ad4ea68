"""What a call whose rows are apart computes: products, and elementwise ops between.

The ops are noted at every call, on fake tensors of the input's own shape, so a module
that computes something else today is not taken for what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.plan.tiles import DROPOUT, ELEMENTWISE

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_TRANSPOSES = (_aten.t.default, _aten.transpose.int, _aten.permute.default)


class NotRowWise(Exception):  # noqa: N818 - control flow, caught by the caller
    """The call is not understood; the text says why."""


class Operands(NamedTuple):
    """The tensors of one product: indices into ``RowProgram.operands``."""

    weight: int
    is_transposed: bool  # as in nn.Linear, whose weight is [outputs, inputs]
    bias: int | None


@dataclass(frozen=True, slots=True)
class Product:
    """``input @ weight + bias``."""

    of: Operands


@dataclass(frozen=True, slots=True)
class Value:
    """A hidden value, as an argument: the result of an earlier step."""

    step: int


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An op on hidden values, and numbers."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class RowProgram:
    """The steps of a call, in order; the last product makes its output."""

    operands: list[Tensor] = field(default_factory=list)
    steps: list[Product | Elementwise] = field(default_factory=list)
    final: Operands | None = None
    result: int = -1  # the step whose value the final product reads
    shape: tuple[int, ...] = ()  # of the output
    # Dropout of the output and views of it: values are the output, then the results.
    tail: list[Elementwise] = field(default_factory=list)

    def last_uses(self) -> list[list[int]]:
        """Step -> the earlier steps whose values no later step reads."""
        last = {self.result: len(self.steps)}
        for number, step in reversed([*enumerate(self.steps)]):
            for one in values_read(step):
                last.setdefault(one, number)
        return [
            [s for s, at in last.items() if at == n] for n in range(len(self.steps))
        ]

    @property
    def first(self) -> list[tuple[int, Operands]]:
        """The steps that are products of the input."""
        return [(n, s.of) for n, s in enumerate(self.steps) if isinstance(s, Product)]

    def weight(self, operands: tuple[Tensor, ...], of: Operands) -> Tensor:
        """A weight as [inputs, outputs]."""
        found = operands[of.weight]
        return found.t() if of.is_transposed else found


def values_read(step: Product | Elementwise) -> list[int]:
    """The values that a step reads, by number."""
    if isinstance(step, Product):
        return []
    found = (*step.args, *step.kwargs.values())
    return [one.step for one in found if isinstance(one, Value)]


def program_of(forward: Callable[..., Any], hidden: Tensor) -> RowProgram:
    """Note what a forward computes of a tensor, without computing it.

    Args:
        forward: Takes one tensor.
        hidden: Its input.

    Raises:
        NotRowWise: It is more than products of the rows with constant matrices, and
            elementwise ops between.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.enable_grad():
        like = torch.empty_strided(
            hidden.shape, hidden.stride(), dtype=hidden.dtype, device=hidden.device
        ).requires_grad_()
        noted = _Noting(like)
        try:
            with noted:
                made = forward(like)
        except NotRowWise:
            raise
        except Exception as error:
            raise NotRowWise(f"it cannot run without values: {error}") from None
    return noted.finish(made)


class _Noting(TorchDispatchMode):
    """Notes the ops of a forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._program = RowProgram()
        self._like = hidden
        self._rows = hidden.numel() // max(hidden.shape[-1], 1)
        self._inputs = {id(hidden)}
        self._hidden: dict[int, int] = {}  # id of a tensor -> step
        self._transposed: dict[int, Tensor] = {}  # id of a view -> its weight
        self._outputs: set[int] = set()
        self._tail: dict[int, int] = {}  # id of a tensor -> value of the tail
        self._keep: list[Any] = [hidden]  # so that no id is used twice
        self._is_wide: tuple[int, ...] = ()  # rows, columns

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and note it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not torch.is_grad_enabled():
            raise NotRowWise(f"it runs {func} without gradients")
        if func.namespace != "prim":  # a question, such as which device
            self._keep.append((args, made))
            self._note(func, args, kwargs, made)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name = func.overloadpacket.__name__
        if self._program.final is not None and self._is_of_tail(func, name, args):
            self._add_to_tail(func, args, kwargs, made)
        elif func in _VIEWS:
            self._view(args[0], made)
        elif func is _aten.detach.default:
            return  # autograd keeps a result; ops that read it are refused
        elif func in _TRANSPOSES and _is_matrix(args[0]):
            self._transposed[id(made)] = args[0]
        elif func in (_aten.mm.default, _aten.addmm.default) and not kwargs:
            bias, first, second = (None, *args) if len(args) == 2 else args
            self._product(first, second, bias, made)
        elif name in ELEMENTWISE and not func._schema.is_mutable:
            self._elementwise(func, args, kwargs, made)
        elif name in DROPOUT:
            raise NotRowWise(
                "dropout before its last product draws a number for every hidden value "
                "at once, tiles draw others"
            )
        else:
            raise NotRowWise(f"it runs {name}")

    def _is_of_tail(self, func: Any, name: str, args: Any) -> bool:
        """Whether an op is dropout of the output, or a view after that."""
        is_view = func in _VIEWS and bool(self._program.tail)
        return (name in DROPOUT and id(args[0]) in self._tail) or is_view

    def _add_to_tail(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        tail = self._program.tail

        def noted(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            if id(one) not in self._tail:
                raise NotRowWise("its output meets other tensors")
            return Value(self._tail[id(one)])

        if func._schema.is_mutable and not self._tail.get(id(args[0])):
            raise NotRowWise("it changes its output in place")
        if not tail:
            self._program.shape = args[0].shape
        step = Elementwise(
            func, tuple(map(noted, args)), {k: noted(v) for k, v in kwargs.items()}
        )
        tail.append(step)
        same = args[0] if func._schema.is_mutable else made
        self._tail[id(same)] = self._tail[id(made)] = len(tail)

    def _view(self, source: Tensor, made: Tensor) -> None:
        """A view of the same rows, or another shape of the output."""
        same = made.dim() > 0 and made.shape[-1] == source.shape[-1]
        if id(source) in self._outputs:
            self._note_output(made)
        elif same and id(source) in self._inputs:
            self._inputs.add(id(made))
        elif same and id(source) in self._hidden:
            self._hidden[id(made)] = self._hidden[id(source)]
        else:
            raise NotRowWise("it changes the shape of a value")

    def _product(
        self, first: Tensor, second: Tensor, bias: Tensor | None, made: Tensor
    ) -> None:
        program = self._program
        is_transposed = id(second) in self._transposed
        weight = self._transposed.get(id(second), second)
        if not _is_matrix(weight) or not (bias is None or _is_vector(bias, made)):
            raise NotRowWise("a product has factors that are no parameters")
        if program.final is not None or made.shape[0] != self._rows:
            raise NotRowWise("it has products after its last one")
        of = Operands(
            self._operand(weight),
            is_transposed,
            None if bias is None else self._operand(bias),
        )
        if id(first) in self._inputs:
            self._add(Product(of), made)
        elif id(first) in self._hidden:
            program.final, program.result = of, self._hidden[id(first)]
            self._note_output(made)
        else:
            raise NotRowWise("a product is of something else than its rows")

    def _note_output(self, made: Tensor) -> None:
        self._outputs.add(id(made))
        self._tail[id(made)] = 0

    def _elementwise(self, func: Any, args: Any, kwargs: Any, made: Tensor) -> None:
        def noted(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            if id(one) not in self._hidden or one.shape != made.shape:
                raise NotRowWise(f"{func.overloadpacket.__name__} reads other tensors")
            return Value(self._hidden[id(one)])

        step = Elementwise(
            func, tuple(map(noted, args)), {k: noted(v) for k, v in kwargs.items()}
        )
        if self._program.final is not None:
            raise NotRowWise("it runs ops after its last product")
        self._add(step, made)

    def _add(self, step: Product | Elementwise, made: Tensor) -> None:
        wide = self._rows, made.shape[-1]
        self._is_wide = self._is_wide or wide
        if made.dtype != self._like.dtype or wide != self._is_wide:
            raise NotRowWise("its hidden values differ in width or dtype")
        self._hidden[id(made)] = len(self._program.steps)
        self._program.steps.append(step)

    def _operand(self, tensor: Tensor) -> int:
        if any(one is tensor for one in self._program.operands):
            raise NotRowWise("it uses a parameter twice")
        if tensor.dtype != self._like.dtype or not tensor.is_contiguous():
            raise NotRowWise("a parameter has another dtype, or is not contiguous")
        self._program.operands.append(tensor)
        return len(self._program.operands) - 1

    def finish(self, made: Any) -> RowProgram:
        """The program, if the forward returned its last product."""
        program = self._program
        used = {one for step in program.steps for one in values_read(step)}
        unused = {*range(len(program.steps))} - used - {program.result}
        last = self._tail.get(id(made)) == len(program.tail)
        if not last or program.final is None or unused:
            raise NotRowWise("it returns something else than its last product")
        if isinstance(program.steps[program.result], Product):
            raise NotRowWise("it has no elementwise op between its products")
        program.shape = program.shape or made.shape
        return program


def _is_matrix(tensor: Any) -> bool:
    return _is_constant(tensor) and tensor.dim() == 2


def _is_vector(tensor: Tensor, made: Tensor) -> bool:
    return _is_constant(tensor) and tensor.shape == made.shape[-1:]


def _is_constant(tensor: Any) -> bool:
    """Whether it is a parameter, or another tensor that was there before."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return plain and not isinstance(tensor, FakeTensor)
