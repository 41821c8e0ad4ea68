"""Note the ops of a call whose rows may be apart, without computing them.

They are noted at every call, on fake tensors of the input's own shape, so a module that
computes something else today is not taken for what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.applying.tiling.autocast import autocast_of, cast_dtype
from ckplan.applying.tiling.norm_program import NormProgram, norm_of
from ckplan.applying.tiling.row_around import (
    TRANSPOSES,
    VIEWS,
    WholeOps,
    is_constant,
)
from ckplan.applying.tiling.row_products import format_of, pointwise
from ckplan.applying.tiling.row_program import (
    Elementwise,
    NotRowWise,
    Operands,
    Product,
    RowProgram,
    Value,
    values_read,
)
from ckplan.plan.tiles import BEFORE_PRODUCTS, DROPOUT, ELEMENTWISE
from ckplan.training.fake_logs import without_logs_of_fakes

_aten = torch.ops.aten
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


def program_of(forward: Callable[..., Any], given: Tensor) -> RowProgram | NormProgram:
    """Note what a forward computes of a tensor, without computing it.

    Args:
        forward: Takes one tensor.
        given: Its input.

    Raises:
        NotRowWise: It is more than products of the rows with constant matrices, or
            1x1 convolutions, elementwise ops between, and what may run as it is before
            and after; and it is no norm that is written out.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Else autocast would keep fake copies of parameters for later ops.
    cast = autocast_of(given.device, cast_dtype(given.device))
    with without_logs_of_fakes(), fake, cast, torch.enable_grad():
        like = torch.empty_strided(
            given.shape, given.stride(), dtype=given.dtype, device=given.device
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

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self._program, self._given = RowProgram(), given
        self._casts: dict[int, Tensor] = {}  # id of autocast's copy -> its constant
        self._lead = WholeOps(given, "input", self._casts)
        self._tail: WholeOps | None = None
        self._inputs: list[int] = []  # of the products: values of the lead
        self._hidden: dict[int, int] = {}  # id of a tensor -> step
        self._transposed: dict[int, Tensor] = {}  # id of a view -> its weight
        self._likes: dict[int, Tensor] = {}  # id of a constant -> fake
        self._ops: list[Any] = []  # with their tensors, so that no id is used twice
        self._dtype = given.dtype
        self._is_of_convolutions = False
        self._is_wide: tuple[int, ...] = ()  # rows, columns, and spatial ones

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and note it."""
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(map(is_constant, args)):
            raise NotRowWise(
                f"it runs {func.overloadpacket.__name__}"
            )  # before it does
        made = func(*map(self._like, args), **kwargs)
        if not torch.is_grad_enabled():
            raise NotRowWise(f"it runs {func} without gradients")
        if func.namespace != "prim":  # a question, such as which device
            self._ops.append((func, args, kwargs, made))
        return made

    def _like(self, one: Any) -> Any:
        """A fake tensor in place of a constant.

        Results of fake kernels are cached for these alone: half the time.
        """
        if not is_constant(one):
            return one
        if id(one) not in self._likes:
            self._likes[id(one)] = torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device=one.device
            )
        return self._likes[id(one)]

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name = func.overloadpacket.__name__
        if func is _aten.detach.default:
            return  # autograd keeps a result; ops that read it are refused
        if self._is_of_constant(func, args, made):
            return
        if func in _MATRIX_PRODUCTS and not kwargs:
            bias, first, second = (None, *args) if len(args) == 2 else args
            self._product(first, second, bias, made)
        elif self._is_of_convolutions and _is_pointwise(func, args):
            self._program.spatial = tuple(made.shape[2:])
            self._product(args[0], args[1], args[2], made)
        elif self._tail is not None and self._runs_in_tail(func, name, args):
            self._tail.add(func, args, kwargs, made)
        elif self._runs_in_lead(func, name, args, kwargs):
            self._lead.add(func, args, kwargs, made)
        elif func in VIEWS:
            self._view(args[0], made)
        elif name in ELEMENTWISE and not func._schema.is_mutable:
            self._elementwise(func, args, kwargs, made)
        elif name in DROPOUT:
            raise NotRowWise(
                "dropout before its last product draws a number for every hidden value "
                "at once, tiles draw others"
            )
        else:
            raise NotRowWise(f"it runs {name}")

    def _is_of_constant(self, func: Any, args: Any, made: Any) -> bool:
        """Whether an op casts a constant, as autocast does, or transposes one."""
        if func is _aten._to_copy.default and is_constant(args[0]):
            self._casts[id(made)] = args[0]
        elif func in TRANSPOSES and _is_matrix(self._constant(args[0])):
            self._transposed[id(made)] = self._constant(args[0])
        else:
            return False
        return True

    def _runs_in_tail(self, func: Any, name: str, args: Any) -> bool:
        """Whether an op is dropout of the output, or a view of it."""
        known = args[0] in self._tail if self._tail is not None else False
        return known and (name in DROPOUT or func in (*VIEWS, *TRANSPOSES))

    def _runs_in_lead(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an op is one before the products, such as a norm, or a view."""
        if func in (*VIEWS, *TRANSPOSES):
            return args[0] in self._lead
        tensors = [*_tensors((*args, *kwargs.values()))]
        known = any(one in self._lead for one in tensors)
        is_first = not self._inputs or func is _aten._to_copy.default
        return known and is_first and name in BEFORE_PRODUCTS

    def _view(self, source: Tensor, made: Tensor) -> None:
        """A view of the same rows."""
        same = made.dim() > 0 and made.shape[-1] == source.shape[-1]
        if self._program.spatial or not same or id(source) not in self._hidden:
            raise NotRowWise("it changes the shape of a value")
        self._hidden[id(made)] = self._hidden[id(source)]

    def _product(
        self, first: Tensor, second: Tensor, bias: Tensor | None, made: Tensor
    ) -> None:
        """A product of matrices, or a 1x1 convolution."""
        program = self._program
        is_transposed = id(second) in self._transposed or made.dim() > 2
        weight = self._transposed.get(id(second), self._constant(second))
        bias = self._constant(bias)
        is_factor = is_constant(weight) and weight.dim() == made.dim()
        if not is_factor or not (bias is None or _is_bias(bias, made)):
            raise NotRowWise("a product has factors that are no parameters")
        if self._tail is not None:
            raise NotRowWise("it has products after its last one")
        if first in self._lead:
            self._check_rows(first)
        of = Operands(
            self._operand(weight),
            is_transposed,
            None if bias is None else self._operand(bias),
        )
        if first in self._lead:
            self._add(Product(of), made)
        elif id(first) in self._hidden:
            program.final, program.result = of, self._hidden[id(first)]
            self._tail = WholeOps(made, "output", self._casts)
        else:
            raise NotRowWise("a product is of something else than its rows")
        if made.dim() > 2 and not _has_layout_of(first, made):
            raise NotRowWise("a convolution in it changes the memory layout")

    def _constant(self, one: Any) -> Any:
        """The constant that a tensor is a copy of, or the tensor itself."""
        return self._casts.get(id(one), one)

    def _check_rows(self, first: Tensor) -> None:
        """Check the input of a product; the first one tells which it is."""
        value = self._lead.rows_of(first)
        self._inputs.append(value)
        if len(self._inputs) == 1:
            self._dtype = first.dtype
        elif value != self._inputs[0] and not self._is_cast_again(value):
            raise NotRowWise("its first products are of different tensors")
        self._program.layout = format_of(first)
        if not first.is_contiguous(memory_format=format_of(first)):
            raise NotRowWise("its input is not contiguous")

    def _is_cast_again(self, value: int) -> bool:
        """Whether a value is the first products' input, cast once more."""
        if not value or not self._inputs[0]:
            return False
        one, other = (self._lead.steps[n - 1] for n in (value, self._inputs[0]))
        return one.function is _aten._to_copy.default and one == other

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
        if self._tail is not None:
            raise NotRowWise("it runs ops after its last product")
        self._add(step, made)

    def _add(self, step: Product | Elementwise, made: Tensor) -> None:
        wide = tuple(made.shape)
        if not self._program.spatial:
            wide = made.numel() // max(made.shape[-1], 1), made.shape[-1]
        self._is_wide = self._is_wide or wide
        if made.dtype != self._dtype or wide != self._is_wide:
            raise NotRowWise("its hidden values differ in width or dtype")
        self._hidden[id(made)] = len(self._program.steps)
        self._program.steps.append(step)

    def _operand(self, tensor: Tensor) -> int:
        if any(one is tensor for one in self._program.operands):
            raise NotRowWise("it uses a parameter twice")
        is_cast = any(one is tensor for one in self._casts.values())
        if not (is_cast or tensor.dtype == self._dtype) or not tensor.is_contiguous():
            raise NotRowWise("a parameter has another dtype, or is not contiguous")
        self._program.operands.append(tensor)
        return len(self._program.operands) - 1

    def finish(self, made: Any) -> RowProgram | NormProgram:
        """The program, if the forward returned its last product, or a norm."""
        functions = {op[0] for op in self._ops}
        if functions.isdisjoint((*_MATRIX_PRODUCTS, _aten.convolution.default)):
            return norm_of(self._ops, self._given, made)
        program = self._program
        self._is_of_convolutions = all(
            op[0] not in _MATRIX_PRODUCTS for op in self._ops
        )
        for op in self._ops:
            self._note(*op)
        used = {one for step in program.steps for one in values_read(step)}
        unused = {*range(len(program.steps))} - used - {program.result}
        if self._tail is None or not self._tail.is_last(made) or unused:
            raise NotRowWise("it returns something else than its last product")
        if isinstance(program.steps[program.result], Product):
            raise NotRowWise("it has no elementwise op between its products")
        program.dtype = self._dtype
        program.inputs = len(set(self._inputs))
        if program.inputs not in (1, len(self._inputs)):
            raise NotRowWise("some of its first products share a copy of its input")
        program.lead = self._lead.steps[: self._inputs[0]]
        program.tail = self._tail.steps
        return program


def _tensors(given: tuple[Any, ...]) -> Iterator[Tensor]:
    return (one for one in given if isinstance(one, Tensor))


def _is_matrix(tensor: Any) -> bool:
    return is_constant(tensor) and tensor.dim() == 2


def _is_bias(tensor: Tensor, made: Tensor) -> bool:
    return is_constant(tensor) and tensor.shape == made.shape[1:2]


def _is_pointwise(func: Any, args: Any) -> bool:
    """Whether an op is a 1x1 convolution over all channels, or its transpose."""
    if func is not _aten.convolution.default:
        return False
    given, weight, _, *geometry = args
    is_point = weight.shape[1:] == (given.shape[1], *(1 for _ in geometry[0]))
    return is_point and tuple(geometry) == pointwise(given.dim())


def _has_layout_of(one: Tensor, made: Tensor) -> bool:
    """Whether the result of a convolution is laid out as tiles will write it."""
    like = torch.empty_like(made, memory_format=format_of(one))
    pairs = zip(like.stride(), made.stride(), made.shape, strict=True)
    return all(a == b for a, b, size in pairs if size > 1)
