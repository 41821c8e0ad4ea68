"""What a forward on fake tensors tells of calls that may run in tiles.

A trace knows shapes, not layouts of memory, and ops, not the functions of torch that
ran them. Both decide how a call runs in tiles, or whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ckplan.applying.tiling.row_products import format_of
from ckplan.applying.tiling.scores import FollowScores
from ckplan.graph.graph import Graph
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.row_ops import RowOps
from ckplan.tracing.faking.fake_outputs import make_fake_mode
from ckplan.training.losses import call_model
from ckplan.training.workload import Workload, tensors_of

Layouts = tuple[torch.memory_format, ...]

PLAIN: Layouts = (torch.contiguous_format,)
_LAYOUTS = {  # of pictures and of volumes, by spatial dimensions
    2: (torch.contiguous_format, torch.channels_last),
    3: (torch.contiguous_format, torch.channels_last_3d),
}


class Told(NamedTuple):
    """What a forward told."""

    layouts: dict[str, Layouts]  # of what modules with convolutions are given
    whole: dict[int, str]  # attentions that would run whole -> why, in words


def layouts_of(found: RowOps) -> Layouts:
    """The layouts that the input of a call may have."""
    return _LAYOUTS.get(len(found.spatial), PLAIN)


def told_by_forward(
    graph: Graph, build: Callable[[], Workload], calls: Mapping[int, RowOps]
) -> Told:
    """Run a forward on fake tensors, if a call holds convolutions or an attention.

    Where it does not run, all layouts are possible, and attentions are followed.

    Args:
        graph: A step.
        build: Makes its workload, on plain tensors, with content or without.
        calls: Calls of it that may run in tiles.
    """
    names = {call: graph.calls[call].fqn for call in calls}
    either = {names[c]: layouts_of(one) for c, one in calls.items() if one.spatial}
    attentions = [call for call, found in calls.items() if found.heads is not None]
    if not (either or attentions):
        return Told({}, {})
    seen: dict[str, set[torch.memory_format]] = {name: set() for name in either}
    follow = {
        names[call]: FollowScores(RowTiles(1, 1), lambda reader: None)
        for call in attentions
    }
    try:
        workload = build()
        with ExitStack() as until:
            for name, module in workload.model.named_modules():
                if name in seen:
                    note = partial(_note_layout, seen[name])
                    until.callback(
                        module.register_forward_pre_hook(note, with_kwargs=True).remove
                    )
                if name in follow:
                    until.enter_context(_followed(module, follow[name]))
            until.enter_context(make_fake_mode())
            until.enter_context(torch.enable_grad())
            call_model(workload)
    except Exception:
        return Told(either, {})
    return Told(
        {
            name: tuple(one for one in those if one in seen[name]) or those
            for name, those in either.items()
        },
        {
            call: f"its scores are read by {', '.join(one.readers) or 'other code'}"
            for call in attentions
            if not (one := follow[names[call]]).tiled
        },
    )


@contextmanager
def _followed(module: nn.Module, follow: FollowScores) -> Iterator[None]:
    """A scope in which the attention of a module is followed."""
    before, forward = dict(vars(module)), module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with follow:
            return forward(*args, **kwargs)

    module.forward = run
    try:
        yield
    finally:
        del module.forward
        if "forward" in before:
            module.forward = before["forward"]


def _note_layout(
    seen: set[torch.memory_format], module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Note the layout of what a module is given."""
    seen.update(map(format_of, tensors_of((args, kwargs))))
