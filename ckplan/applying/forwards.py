"""What stands in for a module's ``forward``: an attribute of the instance.

It holds the module, not its bound method, so that a deep copy of the model runs the
copied weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class StandIn:
    """Runs what it stands in for; finds it anew in every copy of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous = module.__dict__.get("forward")  # somebody else's stand-in

    @property
    def forward(self) -> Callable[..., Any]:
        """What it stands in for."""
        return self.previous or partial(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        """Trainers look up which arguments a model takes."""
        return inspect.signature(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.forward(*args, **kwargs)


class GuardedForward(StandIn):
    """Tells when a forward is interrupted: hooks are not called on Ctrl-C.

    Under ``torch.compile`` it runs uncompiled: what backward wants of a region must be
    the tensors that its ops made.
    """

    def __init__(self, module: nn.Module, interrupted: Callable[[], None]) -> None:
        super().__init__(module)
        self._interrupted = interrupted

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        try:
            return self.forward(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._interrupted()
            raise


class RerunForward(StandIn):
    """Runs a module again in backward through ``torch.utils.checkpoint``."""

    def __init__(self, module: nn.Module, chosen: Callable[[], bool]) -> None:
        super().__init__(module)
        self._chosen = chosen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; under gradients, keep its inputs only."""
        if not self._chosen():
            return self.forward(*args, **kwargs)
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            context_fn=self._contexts,
            **kwargs,
        )

    def _contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersKept(self.module)


class _BuffersKept:
    """Leaves buffers as they are: running statistics must not be updated twice.

    A backward of a backward enters it again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._before = [(b, b.detach().clone()) for b in self._module.buffers()]

    def __exit__(self, *_: object) -> None:
        for buffer, value in self._before:
            buffer.data.copy_(value)  # .data: what autograd saved stays valid
        self._before = []
