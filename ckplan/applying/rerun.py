"""Run a whole module again: the fallback for what cannot be rebuilt op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class RerunForward:
    """Stands in for a module's ``forward``; finds it anew in every copy of the module.

    It holds the module, not its bound method, so that a deep copy of the model runs the
    copied weights.
    """

    def __init__(self, module: nn.Module, chosen: Callable[[], bool]) -> None:
        self._module = module
        self._previous = module.__dict__.get("forward")  # somebody else's stand-in
        self._chosen = chosen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; under gradients, keep its inputs only."""
        forward = self._previous or partial(type(self._module).forward, self._module)
        if not self._chosen():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )

    def _contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _buffers_kept(self._module)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Leave buffers as they are: running statistics must not be updated twice."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # .data: what autograd saved stays valid
