"""What a plan attaches to one module; it is found again by its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Attached:
    """Hooks of a plan on one module: its methods ``begin`` and ``end``.

    A copy of a module takes along all that its hooks hold. So each holds its own
    handles alone: those of the whole plan lead to every other module.
    """

    session: Any  # of the plan; ``session.Session``
    handles: list[RemovableHandle]

    def hook_begin(self, module: nn.Module) -> None:
        """Call ``begin`` before a module's forward, first of all."""
        begin = self.begin  # type: ignore[attr-defined]
        handle = module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        self.handles.append(handle)

    def hook_end(self, module: nn.Module, *, last: bool = False) -> None:
        """Call ``end`` after a module's forward, first or last; even if it raised."""
        end = self.end  # type: ignore[attr-defined]
        handle = module.register_forward_hook(
            end, prepend=not last, with_kwargs=True, always_call=True
        )
        self.handles.append(handle)

    def take_off(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def attached_to(module: nn.Module) -> Iterator[Attached]:
    """What plans attached to a module, once for each hook."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return (one for one in owners if isinstance(one, Attached))


def attached_by(session: object, model: nn.Module) -> Iterator[Attached]:
    """What the plan with this session attached to a model and modules in it."""
    attached = (one for module in model.modules() for one in attached_to(module))
    return (one for one in attached if one.session is session)
