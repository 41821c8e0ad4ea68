"""Scores of an attention without bytes, and the ops on them that are followed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from ckplan.applying.tiling.attention import Step, changed
from ckplan.applying.tiling.autocast import autocast_of, cast_dtype
from ckplan.errors import ApplyError

_T = torch.Tensor
SOFTMAX = frozenset({_T.softmax, torch.softmax, F.softmax, torch._safe_softmax})
_SCALE = frozenset(
    {_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.div, _T.__truediv__, torch.div}
)
_ADD = frozenset({_T.add, _T.__add__, _T.__radd__, torch.add})
_MASK = frozenset({_T.masked_fill, torch.masked_fill})
_CAST = frozenset({_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type})
FOLLOWED = _SCALE | _ADD | _MASK | SOFTMAX | _CAST

_FACTS = frozenset(
    getattr(_T, name).__get__
    for name in (
        *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes"),
        *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested"),
    )
)
_QUERIES = frozenset(
    {_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.__len__, _T.__hash__}
    | {_T.is_floating_point, _T.is_complex, _T.element_size, torch.is_floating_point}
)


@dataclass(eq=False)
class Source:
    """The operands of a product of heads, and what came of it."""

    first: Tensor  # [..., Q, D]
    second: Tensor  # [..., D, K]
    tell_reader: Callable[[str], None]
    # Its scores, then what followed ops made of them, in order.
    made: list[weakref.ref[LazyScores]] = field(default_factory=list)
    is_whole: bool = False
    versions: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Note the state of the operands."""
        self.versions = self.first._version, self.second._version

    def check(self) -> None:
        """Refuse to compute with operands that changed in place.

        Raises:
            ApplyError: One did.
        """
        if (self.first._version, self.second._version) != self.versions:
            raise changed("a factor")

    def make(self, reader: str) -> None:
        """Make the scores, and all that followed ops made of them, in order."""
        if self.is_whole:
            return
        self.check()
        self.tell_reader(reader)
        with torch.enable_grad(), autocast_of(self.first.device, None):
            for one in (reference() for reference in self.made):
                if one is not None and one.parent is not None and one.step is not None:
                    one.whole = one.step.run(one.parent.whole)
                elif one is not None:
                    one.whole = torch.matmul(self.first, self.second)
        self.is_whole = True


class LazyScores(torch.Tensor):
    """Scores without bytes, or what followed ops made of them."""

    source: Source
    parent: LazyScores | None
    step: Step | None  # that made it of its parent
    whole: Tensor  # set by Source.make

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer questions; give scores to whoever reads them elsewhere."""
        kwargs = kwargs or {}
        if func in _FACTS or func in _QUERIES:
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map_only(
            LazyScores, lambda one: _whole(one, name), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse code below torch functions: it would get no gradients."""
        raise ApplyError(
            f"cannot read the scores of an attention in tiles by {func}",
            needed="readers that are Python code",
            hint="leave this call out of the plan",
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """The ops that made it of the scores, in order."""
        if self.parent is None or self.step is None:
            return ()
        return (*self.parent.steps, self.step)


def make_lazy(
    source: Source, parent: LazyScores | None = None, step: Step | None = None
) -> LazyScores:
    """Scores of a product, or what a step makes of a parent's."""
    shape = (*source.first.shape[:-1], source.second.shape[-1])
    made: LazyScores = torch.Tensor._make_wrapper_subclass(
        LazyScores,
        shape,
        dtype=source.first.dtype if step is None else step.dtype,
        device=source.first.device,
    )
    made.source, made.parent, made.step = source, parent, step
    source.made.append(weakref.ref(made))
    return made


def follow_op(func: Any, args: tuple[Any, ...], kwargs: Any) -> LazyScores | None:
    """What an op makes of lazy scores, if it treats heads apart."""
    place = next((n for n, one in enumerate(args) if is_open(one)), None)
    if place is None or place > 1 or (place and func not in _SCALE | _ADD):
        return None
    lazy, others = args[place], [*args[:place], *args[place + 1 :]]
    given = [one for one in (*others, *kwargs.values()) if isinstance(one, Tensor)]
    if any(not _is_mask(one, lazy) for one in given) or not torch.is_grad_enabled():
        return None
    if func in SOFTMAX and not _is_of_keys(lazy, others, kwargs):
        return None
    if place and func in (_T.div, _T.__truediv__, torch.div):
        return None
    dtype = _result_of(func, place, others, kwargs, lazy)
    if dtype is None:
        return None
    versions = tuple(one._version for one in given)
    cast = cast_dtype(lazy.source.first.device)
    step = Step(func, place, tuple(others), kwargs, dtype, versions, cast)
    return make_lazy(lazy.source, lazy, step)


def _result_of(
    func: Any, place: int, others: list[Any], kwargs: Any, lazy: LazyScores
) -> torch.dtype | None:
    """The dtype of what an op makes of scores; None if it makes no scores of them."""
    device = lazy.source.first.device

    def run(
        shape: tuple[int, ...], where: Any, part: Callable[[Tensor], Tensor]
    ) -> Any:
        like = torch.empty(shape, dtype=lazy.dtype, device=where)
        args, named = tree_map_only(Tensor, part, (tuple(others), kwargs))
        return func(*args[:place], like, *args[place:], **named)

    try:
        made = run(tuple(lazy.shape), "meta", lambda one: one.to("meta"))
        if not isinstance(made, Tensor) or not made.is_meta or made.shape != lazy.shape:
            return None
        if cast_dtype(device) is not None:  # which no op on meta tensors knows of
            ones = (1,) * lazy.dim()
            made = run(ones, device, lambda one: one[(slice(1),) * one.dim()])
    except (RuntimeError, TypeError, ValueError):  # to another device, or an error
        return None
    dtype: torch.dtype = made.dtype
    return dtype


def _is_mask(one: Tensor, lazy: LazyScores) -> bool:
    """Whether a tensor may be added or scale: without gradient, of the same heads."""
    sizes = zip(reversed(one.shape), reversed(lazy.shape), strict=False)
    fits = one.dim() <= lazy.dim() and all(a in (1, b) for a, b in sizes)
    is_there = one.device == lazy.device or not one.dim()
    return is_plain(one) and fits and is_there and not one.requires_grad


def _is_of_keys(lazy: LazyScores, others: list[Any], kwargs: Any) -> bool:
    """Whether a softmax is over keys, so that queries and heads are apart."""
    dim = others[0] if others else kwargs.get("dim")
    return isinstance(dim, int) and dim in (-1, lazy.dim() - 1)


def _whole(lazy: LazyScores, reader: str) -> Tensor:
    """Its values, which its reader gets."""
    lazy.source.make(reader)
    return lazy.whole


def is_plain(one: Any) -> bool:
    """Whether it is a plain tensor, or stands for one."""
    return type(one) in (Tensor, FakeTensor)


def is_open(one: Any) -> bool:
    """Whether it is lazy, and nobody has read it."""
    return type(one) is LazyScores and not one.source.is_whole
