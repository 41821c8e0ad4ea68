"""Logits that are made only if somebody reads them.

A ``LazyLogits`` has shape, dtype and gradient function of the logits, but no bytes. It
follows the few ops that stand between a head and its loss. The loss runs in tiles. Any
other reader gets the logits, made by the plain ops, so results never differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ckplan.applying.tiling.autocast import autocast_of
from ckplan.applying.tiling.once import differentiated_once
from ckplan.errors import ApplyError

_T = torch.Tensor
DIVIDE = frozenset({_T.div, _T.__truediv__, torch.div})
MULTIPLY = frozenset({_T.mul, _T.__mul__, _T.__rmul__, torch.mul})
TANH = frozenset({_T.tanh, torch.tanh})
CAST = frozenset({_T.float, _T.to})
VIEW = frozenset({_T.view, _T.reshape})
SLICE = frozenset({_T.__getitem__})
COPY = frozenset({_T.contiguous})
_FOLLOWED = DIVIDE | MULTIPLY | TANH | CAST | VIEW | SLICE | COPY

_FACTS = frozenset(
    getattr(_T, name).__get__
    for name in (
        *("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf"),
        *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested"),
        *("grad_fn", "itemsize", "nbytes"),
    )
)
_QUERIES = frozenset(
    {_T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.__len__}
    | {_T.is_floating_point, _T.is_complex, _T.element_size, _T.get_device}
    | {torch.is_floating_point, torch.numel, torch.is_complex, _T.__hash__}
)


class Step(NamedTuple):
    """An op that was followed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size  # of its result
    dtype: torch.dtype

    def run(self, tensor: Tensor) -> Tensor:
        """Run the op."""
        made: Tensor = self.function(tensor, *self.args, **self.kwargs)
        return made


@dataclass(eq=False)
class Logits:
    """The logits of one call of a head, whole or not."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    autocast: dict[str, Any]  # of the call
    # Computes the loss in tiles; None if it is not known how.
    loss: Callable[[LazyLogits, tuple[Any, ...], dict[str, Any]], Tensor | None]
    # Told the function that reads the logits, and whether a loss ran in tiles before.
    tell_reader: Callable[[str, bool], None]
    shape: torch.Size
    dtype: torch.dtype
    versions: tuple[int, ...] = ()
    # Its stand-in, then what followed ops made of it, in order.
    made: list[weakref.ref[LazyLogits]] = field(default_factory=list)
    is_whole: bool = False
    has_loss: bool = False  # one that ran in tiles

    def __post_init__(self) -> None:
        """Note the state of the operands."""
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(one._version for one in self.operands)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Hidden state, weight, and bias if there is one."""
        found = (self.hidden, self.weight, self.bias)
        return tuple(one for one in found if one is not None)

    def check(self) -> None:
        """Refuse to compute with operands that changed since the head ran.

        Raises:
            ApplyError: An operand changed in place, or its memory is gone.
        """
        gone = any(
            one.numel() and not one.untyped_storage().size() for one in self.operands
        )
        if gone or self._versions() != self.versions:
            raise ApplyError(
                "cannot make the logits of a tiled head: its weight or input was "
                f"{'freed' if gone else 'changed'} since the head ran",
                needed="readers of the logits that come before that, such as before "
                "the optimizer's step",
                hint="read the logits earlier, or leave the head whole",
            )

    def run_head(self) -> Tensor:
        """Run the head as it ran, under its own autocast."""
        with torch.enable_grad(), torch.autocast(**self.autocast):
            return F.linear(self.hidden, self.weight, self.bias)

    def make(self) -> None:
        """Make the logits, and all that followed ops made of them, in order."""
        self.check()
        for reference in self.made:
            one = reference()
            if one is None:
                continue
            with torch.enable_grad():
                if one.parent is None or one.step is None:
                    one.whole = self.run_head()
                else:
                    with autocast_of(self.hidden.device, None):
                        one.whole = one.step.run(one.parent.whole)
        self.is_whole = True


class LazyLogits(torch.Tensor):
    """Logits without bytes, or what followed ops made of them."""

    logits: Logits
    parent: LazyLogits | None
    step: Step | None  # that made it of its parent
    whole: Tensor  # set by Logits.make

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow the op, compute the loss in tiles, or make the logits."""
        kwargs = kwargs or {}
        if func in _FACTS or func in _QUERIES:
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, cls) and not first.logits.is_whole:
            found = None
            if func is F.cross_entropy:
                found = first.logits.loss(first, args, kwargs)
                first.logits.has_loss |= found is not None
            elif func in _FOLLOWED and args:
                found = _follow(first, func, args[1:], kwargs)
            if found is not None:
                return found
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map_only(
            LazyLogits, lambda one: _whole(one, name), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give values to code below torch functions; its gradients go by ``_Node``."""
        del types
        args, kwargs = tree_map_only(
            LazyLogits,
            lambda one: _whole(one, str(func)).detach(),
            (args, kwargs or {}),
        )
        return func(*args, **kwargs)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The ops that made it of the logits, in order."""
        if self.parent is None or self.step is None:
            return ()
        return (*self.parent.steps, self.step)


def make_lazy(logits: Logits) -> LazyLogits:
    """Stand-in for the logits of a call."""
    operands = logits.hidden, logits.weight, logits.bias
    made: LazyLogits = _Node.apply(logits, None, None, *operands)
    return made


def _whole(lazy: LazyLogits, reader: str) -> Tensor:
    if not lazy.logits.is_whole:
        lazy.logits.tell_reader(reader, lazy.logits.has_loss)
        lazy.logits.make()
    return lazy.whole


def _follow(
    lazy: LazyLogits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LazyLogits | None:
    """What an op makes of lazy logits, if its other arguments are no tensors."""
    if any(isinstance(one, torch.Tensor) for one in tree_leaves((args, kwargs))):
        return None
    like = torch.empty(tuple(lazy.shape), dtype=lazy.dtype, device="meta")
    made = function(like, *args, **kwargs)
    if not made.is_meta:  # to another device
        return None
    step = Step(function, args, kwargs, made.shape, made.dtype)
    followed: LazyLogits = _Node.apply(lazy.logits, lazy, step, lazy)
    return followed


class _Node(torch.autograd.Function):
    """Makes a lazy tensor, and gradients for code that reads it below torch functions.

    Torch functions never use this backward: they read plain tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Logits,
        parent: LazyLogits | None,
        step: Step | None,
        *sources: Tensor | None,
    ) -> LazyLogits:
        del sources
        ctx.logits, ctx.parent, ctx.step = logits, parent, step
        like = logits if step is None else step
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits, like.shape, dtype=like.dtype, device=logits.hidden.device
        )
        made.logits, made.parent, made.step = logits, parent, step
        logits.made.append(weakref.ref(made))
        return made

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, needed = ctx.logits, ctx.needs_input_grad[3:]
        sources: tuple[Tensor | None, ...]
        with torch.enable_grad():
            if ctx.step is None:
                sources = (logits.hidden, logits.weight, logits.bias)
                made = logits.run_head()
            else:
                sources = (ctx.parent.whole.detach().requires_grad_(),)
                made = ctx.step.run(*sources)
        logits.check()
        wanted = [
            one for one, is_needed in zip(sources, needed, strict=True) if is_needed
        ]
        found = iter(torch.autograd.grad(made, wanted, gradient))
        return (*(None,) * 3, *(next(found) if one else None for one in needed))
