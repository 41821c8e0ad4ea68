"""An attention that is written out, by tiles of heads.

Shapes: N heads of all samples, Q queries, K keys, D features. Every product, softmax
and gradient is apart for each head, so no sum is split. Scores, [N, Q, K], and their
gradients are never whole; backward makes them again from queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ckplan.applying.tiling.autocast import autocast_of
from ckplan.applying.tiling.once import differentiated_once
from ckplan.errors import ApplyError
from ckplan.plan.tiles import RowTiles


class _Hole:
    """The place of a tensor that autograd keeps."""


class Step(NamedTuple):
    """An op on the scores, and its other arguments."""

    function: Callable[..., Any]
    place: int  # of the scores among the arguments
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype  # of its result
    versions: tuple[int, ...]  # of its other tensors, when it ran
    cast: torch.dtype | None = None  # of autocast, if it was on

    @property
    def tensors(self) -> list[Tensor]:
        """Its other tensors."""
        found = (*self.args, *self.kwargs.values())
        return [one for one in found if isinstance(one, Tensor)]

    def run(self, scores: Tensor, cut: Callable[[Any], Any] | None = None) -> Tensor:
        """Run it, with other arguments cut to a tile if scores are.

        Raises:
            ApplyError: One of its other tensors has changed since it ran.
        """
        if tuple(one._version for one in self.tensors) != self.versions:
            raise changed("a mask")
        cut = cut or (lambda one: one)
        args = [*map(cut, self.args)]
        args.insert(self.place, scores)
        kwargs = {name: cut(one) for name, one in self.kwargs.items()}
        with autocast_of(scores.device, self.cast):
            made: Tensor = self.function(*args, **kwargs)
        return made


def changed(what: str) -> ApplyError:
    """The error where scores cannot be made again."""
    return ApplyError(
        f"cannot make the scores of a tiled attention: {what} changed in place since",
        needed="queries, keys and masks that stay as they are until backward",
        hint="leave this call out of the plan",
    )


@dataclass(frozen=True)
class Attention:
    """What an attention does to its scores."""

    shape: tuple[int, ...]  # of the scores: [samples, heads, Q, K], or [N, Q, K]
    steps: tuple[Step, ...]

    @property
    def masks(self) -> list[Tensor]:
        """The tensors that its steps read beside scores, in order."""
        return [one for step in self.steps for one in step.tensors]

    def with_masks(self, masks: Iterable[Tensor | _Hole]) -> Attention:
        """The same with other tensors, or with none for a while."""
        left = iter(masks)

        def other(one: Any) -> Any:
            return next(left) if isinstance(one, (Tensor, _Hole)) else one

        steps = []
        for step in self.steps:
            args = tuple(map(other, step.args))
            kwargs = {name: other(one) for name, one in step.kwargs.items()}
            made = step._replace(args=args, kwargs=kwargs)
            versions = tuple(one._version for one in made.tensors)
            steps.append(made._replace(versions=versions))
        return replace(self, steps=tuple(steps))

    @property
    def heads(self) -> tuple[int, int]:
        """Samples, and heads of each."""
        return self.shape[0], self.shape[1] if len(self.shape) == 4 else 1

    def probabilities(self, scores: Tensor, part: slice) -> Tensor:
        """What values are multiplied by, for some heads of all samples."""
        first, sizes = self._sizes(part)
        made, shape = scores.view(*sizes, *scores.shape[1:]), scores.shape
        del scores
        for step in self.steps:
            made = step.run(made, lambda one: self._cut(one, first, sizes))
        return made.reshape(shape)

    def _sizes(self, part: slice) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first sample and head of a tile, and how many it has of both."""
        _, heads = self.heads
        if len(self.shape) == 3:
            return (part.start,), (part.stop - part.start,)
        sample, head = divmod(part.start, heads)
        size = part.stop - part.start
        return (sample, head), (-(-size // heads), min(size, heads))

    def _cut(self, one: Any, first: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """The part of a mask for a tile."""
        if not isinstance(one, Tensor):
            return one
        for dim, (begin, size) in enumerate(zip(first, sizes, strict=True)):
            at = one.dim() - len(self.shape) + dim
            if at >= 0 and one.shape[at] > 1:
                one = one.narrow(at, begin, size)
        return one


def run_attention(
    program: Attention, tiles: RowTiles, first: Tensor, second: Tensor, values: Tensor
) -> Tensor:
    """The attention's output, [..., Q, D], as the plain ops make it.

    Args:
        program: What is done to the scores.
        tiles: Their rows are heads.
        first: Queries, [..., Q, D].
        second: Keys, [..., D, K].
        values: [..., K, D].
    """
    flat = [one.reshape(-1, *one.shape[-2:]) for one in (first, second, values)]
    made: Tensor = _ByHeads.apply(*flat, program, tiles)
    return made.view(*values.shape[:-2], *made.shape[1:])


class _ByHeads(torch.autograd.Function):
    """An attention that keeps queries, keys and values alone for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        values: Tensor,
        program: Attention,
        tiles: RowTiles,
    ) -> Tensor:
        masks = program.masks
        ctx.save_for_backward(first, second, values, *masks)
        ctx.program = program.with_masks(_Hole() for _ in masks)
        ctx.tiles = tiles
        made = values.new_empty(len(first), first.shape[1], values.shape[2])
        for part in tiles.of_heads(*program.heads):
            found = program.probabilities(_product(first, second, part), part)
            _write(made, part, found, values[part])
            del found
        return made

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        first, second, values, *masks = ctx.saved_tensors
        program = ctx.program.with_masks(masks)
        sizes = (first, second, values)
        outs = [
            one.new_empty(one.shape) if is_wanted else None
            for one, is_wanted in zip(sizes, ctx.needs_input_grad, strict=False)
        ]
        for part in ctx.tiles.of_heads(*program.heads):
            scores = _product(first, second, part).requires_grad_()
            with torch.enable_grad():
                found = program.probabilities(scores, part)
            _write(outs[2], part, found.detach().transpose(1, 2), given[part])
            edge = get_gradient_edge(found)
            del found
            inner = torch.bmm(given[part], values[part].transpose(1, 2))
            (gradient,) = torch.autograd.grad([edge], [scores], [inner])
            del edge, inner, scores
            _write(outs[1], part, first[part].transpose(1, 2), gradient)
            _write(outs[0], part, gradient, second[part].transpose(1, 2))
            del gradient
        return *outs, None, None


def _product(first: Tensor, second: Tensor, part: slice) -> Tensor:
    with autocast_of(first.device, None):  # operands are cast already
        return torch.bmm(first[part], second[part])


def _write(out: Tensor | None, part: slice, first: Tensor, second: Tensor) -> None:
    if out is not None:
        torch.bmm(first, second, out=out[part])
