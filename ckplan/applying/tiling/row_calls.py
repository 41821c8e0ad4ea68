"""Run the calls of a module whose rows are apart in tiles."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ckplan.applying.hooks.choices import Choice
from ckplan.applying.tiling.autocast import autocast_of
from ckplan.applying.tiling.handle import Tiled
from ckplan.applying.tiling.norm_passes import run_norm
from ckplan.applying.tiling.norm_program import NormProgram
from ckplan.applying.tiling.row_noting import program_of
from ckplan.applying.tiling.row_passes import RowWise
from ckplan.applying.tiling.row_program import NotRowWise, RowProgram
from ckplan.applying.tiling.row_steps import run_lead, run_whole
from ckplan.applying.tiling.scores import FollowScores
from ckplan.applying.tiling.watched import is_watched
from ckplan.errors import ApplyError, PlanError, did_you_mean
from ckplan.plan.tiles import RowTiles

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class TiledRows(Tiled):
    """A module whose calls run in tiles of rows, with its counters."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        tiles: RowTiles,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(module, name, choice)
        self.tiles = tiles
        self._is_attention = False  # the last call was one

    def __str__(self) -> str:
        """One line."""
        return f"{self.name}: {self.tiled} calls in tiles, {self.whole} whole"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in tiles, if gradients are enabled and nobody watches ops."""
        module, args = self.whose(args)
        forward = self.forward_of(module)
        given = (*args, *kwargs.values())
        if (
            torch.compiler.is_compiling()
            or self.taken_off
            or self.previous is not None
            or is_watched()
        ):
            return forward(*args, **kwargs)
        if any(isinstance(one, Tensor) and not one.numel() for one in given):
            self._count()  # an expert without rows holds nothing
            return forward(*args, **kwargs)
        if self._is_attention:
            return self._by_heads(forward, args, kwargs, "it has no attention any more")
        try:
            program = _noted(module, forward, args, kwargs)
        except NotRowWise as error:
            return self._by_heads(forward, args, kwargs, str(error))
        if not any(one.requires_grad for one in (given[0], *program.parameters)):
            return forward(*args, **kwargs)
        self.tiled += 1
        self._count()
        with autocast_of(given[0].device, None):  # ops were noted with their casts
            if isinstance(program, NormProgram):
                return run_norm(program, self.tiles, given[0])
            operands = *run_lead(program, given[0]), *program.cast_operands
            made = RowWise.apply(program, self.tiles, *operands)
            return run_whole(program.tail, made)

    def _by_heads(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: str,
    ) -> Any:
        """Run a call by tiles of heads, if an attention is written out in it."""
        follow = FollowScores(
            self.tiles, lambda name: self._tell(f"its scores were read by {name}")
        )
        with follow:
            made = forward(*args, **kwargs)
        self._is_attention = follow.tiled > 0
        self.tiled += follow.tiled
        if follow.tiled:
            self._count()
        elif follow.readers:
            self._tell(f"the scores of its attention are read by {follow.readers[0]}")
        else:
            self._tell(why)
        return made

    def _count(self) -> None:
        """Count a call that holds no more than it should."""
        if self.choice is not None:
            self.choice.runs += 1

    def _tell(self, why: str) -> None:
        """Count a call that stays whole, and warn of the first."""
        self.whole += 1
        if self.choice is not None:
            self.choice.kept += 1
        if self.whole == 1:
            what = f"{self.name or '.'} runs whole, not in tiles: {why}"
            warnings.warn(f"{what}; results are the same, memory is not", stacklevel=4)


def _noted(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RowProgram | NormProgram:
    """What a call computes, if its rows are apart."""
    given = (*args, *kwargs.values())
    _check_input(given)
    _check_hooks(module)
    (name,) = kwargs or (None,)
    with _attributes_kept(module):
        return program_of(
            lambda one: forward(**{name: one}) if name else forward(one), given[0]
        )


def _check_input(given: tuple[Any, ...]) -> None:
    if len(given) != 1 or type(given[0]) not in (Tensor, nn.Parameter):
        raise NotRowWise("it is called with something else than one tensor")
    (hidden,) = given
    if not hidden.is_floating_point() or hidden.dim() < 2:
        raise NotRowWise("its input has no rows of numbers")
    if hidden.layout != torch.strided:
        raise NotRowWise("its input is sparse")


def _check_hooks(module: nn.Module) -> None:
    """Refuse modules inside that somebody listens to: they would not run."""
    if torch_module._has_any_global_hook():
        raise NotRowWise("there are hooks on all modules")
    for one in module.modules():
        replaced = one is not module and "forward" in vars(one)
        if one is not module and (replaced or any(getattr(one, h) for h in _HOOKS)):
            raise NotRowWise(f"a {type(one).__name__} in it has hooks")


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a forward on fake tensors assigns, and refuse such a forward."""
    own = [vars(one) for one in module.modules()]
    held = [value for one in own for value in one.values()]
    dicts = [(one, one.copy()) for one in (*own, *held) if type(one) is dict]
    lists = [(one, one.copy()) for one in held if type(one) is list]
    try:
        yield
    finally:
        changed = [pair for pair in dicts if not _is_same(*pair)]
        grown = [pair for pair in lists if not _has_same(*pair)]
        for now, then in changed:
            now.clear()
            now.update(then)
        for items, kept in grown:
            items[:] = kept
    if changed or grown:
        raise NotRowWise("its forward assigns attributes")


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two hold the same objects."""
    return one.keys() == other.keys() and all(one[k] is other[k] for k in one)


def _has_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def check_row_wise(name: str, module: nn.Module) -> None:
    """Refuse modules that can hold no products, attention or norm of their own.

    Raises:
        PlanError: It is one of torch's own without parameters, such as an activation.
    """
    is_torchs = type(module).__module__.startswith("torch.nn.")
    has_own = any(True for _ in module.parameters()) or isinstance(module, nn.RMSNorm)
    if not is_torchs or has_own:
        return
    raise PlanError(
        f"cannot tile {name or '.'}: a {type(module).__name__} has no parameters",
        needed="an MLP: products with parameters, and elementwise ops between; or an "
        "attention or a norm that is written out",
        hint="leave this call out of the plan",
    )


def tile_rows(
    model: nn.Module, name: str, *, tiles: tuple[int, int] = (8, 8)
) -> TiledRows:
    """Run an MLP, an attention or a norm in tiles: what is inside is never whole.

    An MLP is a module that multiplies its one input by matrices of parameters, applies
    elementwise ops to the products, and multiplies the result by one more; or all are
    1x1 convolutions. In an attention that is written out, from queries and keys to a
    product with values, scores are never whole: tiles of rows are tiles of heads. A
    norm that is written out has sums of its rows, and elementwise ops. What a call
    computes is looked at every time. A call that computes anything else, runs
    without gradients, or that modes or hooks inside would see, runs as it is; where
    gradients are on, a warning says why.

    Args:
        model: The model; its names, ``state_dict`` and results stay as they are.
        name: Name of the module in it.
        tiles: Numbers of tiles: of rows, and of columns of the hidden values.

    Returns:
        A handle: ``remove()`` undoes it, so does leaving it as a context; ``tiled`` and
        ``whole`` count calls.

    Raises:
        ApplyError: There is no such module.
        PlanError: Its forward is replaced already, or a number of tiles is below 1.
    """
    counts = RowTiles(*tiles)
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    if name not in modules:
        near = did_you_mean(name, modules)
        raise ApplyError(
            f"{type(model).__name__} has no module {name!r}",
            needed="the name of an MLP, as in named_modules()",
            hint=f"did you mean {near!r}?"
            if near
            else "ckplan.tile_rows(model, 'mlp')",
        )
    module = modules[name]
    if "forward" in vars(module):
        raise PlanError(
            f"cannot tile {name or '.'}: the forward of this "
            f"{type(module).__name__} is replaced already",
            needed="a module that nothing has wrapped or tiled",
            hint="remove what wraps it, or leave it whole",
        )
    wrapper = TiledRows(module, name, counts)
    module.forward = wrapper
    return wrapper
