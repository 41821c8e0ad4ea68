"""Wrappers of a module's ``forward``, set as instance attributes.

A wrapper holds the module, not its bound method, so that a deep copy of the model runs
the copied weights. Replicas from ``nn.DataParallel`` share the wrapper, so a hook
reports which replica runs.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ckplan.applying.hooks.attached import Attached
from ckplan.applying.rerunning.rerun import Memory, Rerun
from ckplan.applying.tensors.compiled import uncompiled_function


class _Beginning(threading.local):
    """Modules whose forwards begin now in this thread, by wrapper id."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}


_beginning = _Beginning()


class ForwardWrapper(Attached):
    """Runs the wrapped forward, also in copies of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous = module.__dict__.get("forward")  # another library's wrapper
        self.taken_off = False
        self.session, self.handles = None, []

    def __getattr__(self, name: str) -> Any:
        """Say what to do where torch reads the code of a forward, to export it."""
        what = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in ("__code__", "__globals__"):
            what += ": torch.export and torch.jit take a model without a plan, "
            what += "ckplan.remove(model)"
        raise AttributeError(what)

    def take_off(self) -> None:
        """Restore the module's forward; only call it if others hold this wrapper."""
        super().take_off()
        self.taken_off = True
        if self.module.__dict__.get("forward") is self:
            del self.module.forward
            before = self.previous
            while isinstance(before, ForwardWrapper) and before.taken_off:
                before = before.previous  # of another plan, or region
            if before is not None:
                self.module.forward = before

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook of the module, or of a replica of it."""
        if module is not self.module:
            _beginning.modules[id(self)] = module

    def now(self) -> nn.Module:
        """The module whose forward begins: a replica if its hook just ran."""
        return _beginning.modules.pop(id(self), self.module)

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """The wrapped forward of a module."""
        return self.previous or partial(type(module).forward, module)

    @property
    def __signature__(self) -> inspect.Signature:
        """Trainers look up which arguments a model takes."""
        return inspect.signature(self.forward_of(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped forward."""
        module, args = self.whose(args)
        return self.forward_of(module)(*args, **kwargs)

    def whose(self, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
        """The module, and its arguments; trainers may have bound this to it."""
        now, bound = self.now(), args[0] if args else None
        if not isinstance(bound, nn.Module):
            return now, args
        own = getattr(vars(bound).get("forward"), "__func__", None) is self
        return (bound, args[1:]) if own or bound is self.module else (now, args)


class GuardedForward(ForwardWrapper):
    """Reports an interrupted forward: hooks are not called on Ctrl-C.

    Under ``torch.compile`` it runs uncompiled: tensors that backward needs of a region
    must be the tensors that its ops made.
    """

    def __init__(self, module: nn.Module, interrupted: Callable[[], None]) -> None:
        super().__init__(module)
        self._interrupted = interrupted

    @uncompiled_function
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._interrupted()
            raise


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks from outside torch and ckplan."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    homes = (getattr(hook, "__module__", "") or "" for hook in hooks)
    return any(home.partition(".")[0] not in ("torch", "ckplan") for home in homes)


class RerunForward(ForwardWrapper):
    """Reruns a module in backward."""

    def __init__(self, module: nn.Module, chosen: Callable[[], str | None]) -> None:
        super().__init__(module)
        self._chosen = chosen  # name of the region that begins, or None
        self._told = False
        self._memory = Memory()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; with gradients enabled, keep only its inputs."""
        name = None if self.taken_off else self._chosen()
        if name is None:
            return super().__call__(*args, **kwargs)
        return self._again(name, args, kwargs)

    def _tell_hooks(self, name: str) -> None:
        """Warn once that hooks inside are rerun in backward."""
        inside = (m for m in self.module.modules() if m is not self.module)
        if any(map(_has_hooks, inside)):
            self._told = True
            warnings.warn(
                f"{name} has hooks inside, which run again in backward; a region that "
                "is rebuilt op by op (by: program) runs them once",
                stacklevel=2,
            )

    @uncompiled_function
    def _again(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, args = self.whose(args)
        forward = self.forward_of(module)
        rerun = Rerun(name, module, forward, args, kwargs, self._memory)
        if rerun.has_hooks_inside and not self._told:
            self._tell_hooks(name)
        return rerun.run(args, kwargs)
