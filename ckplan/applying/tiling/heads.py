"""Run the head and the loss of an unmodified model in tiles."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ckplan.applying.hooks.choices import Choice
from ckplan.applying.tiling.cross_entropy import tiled_cross_entropy
from ckplan.applying.tiling.handle import Tiled
from ckplan.applying.tiling.lazy import LazyLogits, Logits, make_lazy
from ckplan.applying.tiling.recognizing import recognize
from ckplan.applying.tiling.watched import is_watched
from ckplan.errors import ApplyError, PlanError, did_you_mean
from ckplan.plan.tiles import CLOSE_BITS, SAME_BITS, Tiles


class TiledHead(Tiled):
    """A head whose loss runs in tiles, with its counters."""

    def __init__(
        self, module: nn.Module, name: str, tiles: Tiles, choice: Choice | None = None
    ) -> None:
        super().__init__(module, name, choice)
        self.tiles = tiles
        self._expected: float | Tensor = 1.0  # the gradient that the loss got last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return lazy logits, if gradients are enabled and nobody watches ops."""
        module, args = self.whose(args)
        hidden = args[0] if args else kwargs.get("input")
        if torch.compiler.is_compiling() or not self._applies(module, hidden):
            return self.forward_of(module)(*args, **kwargs)
        return self._lazy(module, hidden)

    def __str__(self) -> str:
        """One line."""
        return f"{self.name}: {self.tiled} losses in tiles, {self.whole} logits whole"

    def _applies(self, module: nn.Module, hidden: Any) -> bool:
        """Whether to wait with the logits of a call."""
        return (
            not self.taken_off
            and self.previous is None
            and not is_watched()
            and type(module) is nn.Linear
            and type(hidden) is Tensor
            and type(module.weight) is nn.Parameter
            and hidden.dim() >= 2
            and hidden.numel() > 0
            and hidden.layout == torch.strided
            and (hidden.requires_grad or module.weight.requires_grad)
        )

    def _lazy(self, module: nn.Module, hidden: Tensor) -> LazyLogits:
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device)
        weight: Tensor = module.weight
        autocast = {"device_type": device, "dtype": dtype, "enabled": is_cast}
        casts = is_cast and hidden.dtype != torch.float64
        logits = Logits(
            hidden,
            weight,
            module.bias,
            autocast,
            self._loss,
            self._tell_reader,
            torch.Size((*hidden.shape[:-1], len(weight))),
            dtype if casts else hidden.dtype,
        )
        return make_lazy(logits)

    def _loss(
        self, lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The loss in tiles, if the call is understood."""
        options = None
        if not is_watched():
            close = self.tiles.bits == CLOSE_BITS
            options = recognize(lazy, args, kwargs, may_be_close=close)
        if options is None:
            return None
        logits = lazy.logits
        logits.check()
        try:
            with torch.autocast(**logits.autocast):
                loss = tiled_cross_entropy(
                    logits.hidden,
                    logits.weight,
                    bias=logits.bias,
                    **options,
                    tiles=(self.tiles.tokens, self.tiles.vocabulary),
                    expected_gradient=self._expected,
                )
        except ApplyError:
            return None  # torch has its own words for it
        self.tiled += 1
        if self.choice is not None:
            self.choice.runs += 1
        if loss.dim():
            return loss.reshape(-1)
        if loss.requires_grad:
            loss.register_hook(self._learn)
        return loss

    def _learn(self, gradient: Tensor) -> None:
        """Note the gradient of the loss: the next one is most likely the same."""
        one = gradient.detach()
        self._expected = float(one) if one.device.type == "cpu" else one.clone()

    def _tell_reader(self, reader: str, has_loss: bool) -> None:
        """Warn once that logits are made whole."""
        self.whole += 1
        if self.choice is not None:
            self.choice.kept += 1
        if self.whole == 1:
            rest = "results are the same, memory is not"
            if has_loss:
                rest = "a gradient through them is added to that of the loss in tiles"
            what = f"the logits of {self.name} were read by {reader}"
            warnings.warn(f"{what}: they are made whole; {rest}", stacklevel=5)


def check_head(name: str, module: nn.Module) -> None:
    """Refuse modules whose products are not known.

    Raises:
        PlanError: It is no plain ``nn.Linear``.
    """
    if type(module) is not nn.Linear:
        raise _no_head(name, module, "as a head")


def _no_head(name: str, module: nn.Module, what: str) -> PlanError:
    return PlanError(
        f"cannot tile {name or '.'}: it is a {type(module).__name__} {what}",
        needed="a plain nn.Linear, not wrapped or tiled already",
        hint="apply adapters and wrappers to other layers, or leave the head whole",
    )


def tile_head(
    model: nn.Module,
    head: str | None = None,
    *,
    tiles: tuple[int, int] = (16, 16),
    bits: str = SAME_BITS,
) -> TiledHead:
    """Run the head and the loss of an unmodified model in tiles.

    The head returns logits without bytes. If ``F.cross_entropy`` reads them, directly
    or after a cast to float32, a view, a shift by one or a soft cap, loss and gradients
    come from ``tiled_cross_entropy``. Any other reader gets the logits, made by the
    plain ops, and a warning names it once. Results are those of the plain model; only
    if a second loss reads the logits after the first ran in tiles, the gradients of the
    two meet later than in the plain model, and are rounded there.
    Without gradients, the head runs as it is.

    Args:
        model: The model; its names, ``state_dict`` and results stay as they are.
        head: Name of the ``nn.Linear`` that makes the logits. None: what
            ``model.get_output_embeddings()`` of transformers returns.
        tiles: Numbers of tiles of tokens and of the vocabulary.
        bits: ``close``: also losses of 16-bit logits that are not cast to float32 run
            in tiles, which round their gradients in another place.

    Returns:
        A handle: ``remove()`` undoes it, so does leaving it as a context;
        ``tiled`` counts losses that ran in tiles, ``whole`` calls whose logits were
        made after all.

    Raises:
        ApplyError: There is no such head.
        PlanError: It is no plain ``nn.Linear``, its forward is replaced already, or a
            number of tiles is below 1.
    """
    name, module = _find(model, head)
    check_head(name, module)
    if "forward" in vars(module):
        raise _no_head(name, module, "with a replaced forward")
    wrapper = TiledHead(module, name, Tiles(*tiles, bits))
    module.forward = wrapper
    return wrapper


def _find(model: nn.Module, head: str | None) -> tuple[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise ApplyError(
            f"cannot tile the head of a {type(model).__name__}",
            needed="a module",
            hint="ckplan.tile_head(model, 'lm_head')",
        )
    modules = dict(model.named_modules())
    if head is None:
        known = getattr(model, "get_output_embeddings", lambda: None)()
        head = next((name for name, one in modules.items() if one is known), None)
    if head is not None and head in modules:
        return head, modules[head]
    linear = [name for name, one in modules.items() if type(one) is nn.Linear]
    near = did_you_mean(head or "lm_head", linear) or next(iter(linear[-1:]), None)
    raise ApplyError(
        f"{type(model).__name__} has no module {head!r}"
        if head
        else f"cannot tell which module of {type(model).__name__} is its head",
        needed="the name of the nn.Linear that makes the logits",
        hint=f"ckplan.tile_head(model, {near or 'lm_head'!r})",
    )
