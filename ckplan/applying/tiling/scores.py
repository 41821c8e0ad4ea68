"""Scores of an attention that is written out, which are never whole.

While a module runs, products of two tensors of heads give ``LazyScores``: without
bytes, but with the ops that follow, each of which treats heads apart. A product of
their softmax with values runs by tiles of heads (``attention.py``). Any other reader
gets the scores, made by the plain ops from the same operands, so results never differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ckplan.applying.tiling.attention import Attention, Step, changed, run_attention
from ckplan.errors import ApplyError
from ckplan.plan.tiles import RowTiles

_T = torch.Tensor
_MATMUL = frozenset({_T.matmul, _T.__matmul__, torch.matmul, torch.bmm, _T.bmm})
_SOFTMAX = frozenset({_T.softmax, torch.softmax, F.softmax})
_SCALE = frozenset(
    {_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.div, _T.__truediv__, torch.div}
)
_ADD = frozenset({_T.add, _T.__add__, _T.__radd__, torch.add})
_MASK = frozenset({_T.masked_fill, torch.masked_fill})
_CAST = frozenset({_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type})
_FOLLOWED = _SCALE | _ADD | _MASK | _SOFTMAX | _CAST

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
        device = self.first.device.type
        with torch.enable_grad(), torch.autocast(device, enabled=False):
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


class FollowScores(TorchFunctionMode):
    """Runs attentions of the code within it by tiles of heads."""

    def __init__(self, tiles: RowTiles, tell_later: Callable[[str], None]) -> None:
        """Prepare to follow.

        Args:
            tiles: Their rows are heads.
            tell_later: Told the function that reads scores when the code has ended.
        """
        super().__init__()
        self.tiles, self._tell_later = tiles, tell_later
        self.tiled = 0
        self.readers: list[str] = []  # names of functions that read whole scores
        self._has_ended = False

    def __exit__(self, *error: Any) -> None:
        """Follow no more."""
        self._has_ended = True
        super().__exit__(*error)

    def _tell(self, reader: str) -> None:
        self.readers.append(reader)
        if self._has_ended:
            self._tell_later(reader)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow the op, run an attention in tiles, or leave the op as it is."""
        kwargs = kwargs or {}
        if func in _MATMUL and len(args) == 2 and not kwargs:
            first, second = args
            if _is_plain(first) and _are_heads(first, second):
                return _make_lazy(Source(first, second, self._tell))
            if _is_open(first) and _is_plain(second):
                found = self._attention(first, second)
                if found is not None:
                    return found
        elif func is F.dropout and args and _is_open(args[0]) and _is_idle(kwargs):
            return args[0]
        elif func in _FOLLOWED and args:
            found = _follow(func, args, kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _attention(self, lazy: LazyScores, values: Tensor) -> Tensor | None:
        """The product with values, if there is a softmax and heads are the same."""
        source, steps = lazy.source, lazy.steps
        has_softmax = any(one.function in _SOFTMAX for one in steps)
        fits = (*lazy.shape[:-2], lazy.shape[-1]) == values.shape[:-1]
        if not has_softmax or not fits or values.dtype != lazy.dtype:
            return None
        if not _may_follow(values):
            return None
        source.check()
        self.tiled += 1
        program = Attention(tuple(lazy.shape), steps)
        return run_attention(program, self.tiles, source.first, source.second, values)


def _whole(lazy: LazyScores, reader: str) -> Tensor:
    """Its values, which its reader gets."""
    lazy.source.make(reader)
    return lazy.whole


def _is_plain(one: Any) -> bool:
    """Whether it is a plain tensor, or stands for one."""
    return type(one) in (Tensor, FakeTensor)


def _is_open(one: Any) -> bool:
    """Whether it is lazy, and nobody has read it."""
    return type(one) is LazyScores and not one.source.is_whole


def _are_heads(first: Tensor, second: Any) -> bool:
    """Whether a product may be one of queries and keys of heads."""
    return (
        _is_plain(second)
        and first.dim() in (3, 4)
        and first.shape[:-2] == second.shape[:-2]
        and first.shape[-1] == second.shape[-2]
        and first.dtype == second.dtype
        and first.is_floating_point()
        and first.numel() > 0 < second.numel()
        and first.device == second.device
        and (first.requires_grad or second.requires_grad)
        and _may_follow(first)
    )


def _may_follow(one: Tensor) -> bool:
    """Whether ops run as they are, with gradients."""
    is_cast = torch.is_autocast_enabled(one.device.type)
    return torch.is_grad_enabled() and not is_cast


def _make_lazy(
    source: Source, parent: LazyScores | None = None, step: Step | None = None
) -> LazyScores:
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


def _follow(func: Any, args: tuple[Any, ...], kwargs: Any) -> LazyScores | None:
    """What an op makes of lazy scores, if it treats heads apart."""
    place = next((n for n, one in enumerate(args) if _is_open(one)), None)
    if place is None or place > 1 or (place and func not in _SCALE | _ADD):
        return None
    lazy, others = args[place], [*args[:place], *args[place + 1 :]]
    given = [one for one in (*others, *kwargs.values()) if isinstance(one, Tensor)]
    if any(not _is_mask(one, lazy) for one in given) or not _may_follow(lazy):
        return None
    if func in _SOFTMAX and not _is_of_keys(lazy, others, kwargs):
        return None
    if place and func in (_T.div, _T.__truediv__, torch.div):
        return None
    like = torch.empty(tuple(lazy.shape), dtype=lazy.dtype, device="meta")
    metas = tree_map_only(Tensor, lambda one: one.to("meta"), (tuple(others), kwargs))
    try:
        made = func(*metas[0][:place], like, *metas[0][place:], **metas[1])
    except (RuntimeError, TypeError, ValueError):  # to another device, or an error
        return None
    if not isinstance(made, Tensor) or not made.is_meta or made.shape != like.shape:
        return None
    versions = tuple(one._version for one in given)
    step = Step(func, place, tuple(others), kwargs, made.dtype, versions)
    return _make_lazy(lazy.source, lazy, step)


def _is_mask(one: Tensor, lazy: LazyScores) -> bool:
    """Whether a tensor may be added or scale: without gradient, of the same heads."""
    sizes = zip(reversed(one.shape), reversed(lazy.shape), strict=False)
    fits = one.dim() <= lazy.dim() and all(a in (1, b) for a, b in sizes)
    is_there = one.device == lazy.device or not one.dim()
    return _is_plain(one) and fits and is_there and not one.requires_grad


def _is_idle(kwargs: dict[str, Any]) -> bool:
    """Whether dropout keeps everything."""
    return not kwargs.get("training", True) or not kwargs.get("p", 0.5)


def _is_of_keys(lazy: LazyScores, others: list[Any], kwargs: Any) -> bool:
    """Whether a softmax is over keys, so that queries and heads are apart."""
    dim = others[0] if others else kwargs.get("dim")
    return isinstance(dim, int) and dim in (-1, lazy.dim() - 1)
