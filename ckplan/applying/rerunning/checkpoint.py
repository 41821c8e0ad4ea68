"""Save nothing of a forward; run it again when backward needs what it saved.

This is ``torch.utils.checkpoint`` without reentrance, with its early stop: saved
tensors are numbered as autograd saves them, and a second run fills the numbers that
backward may still ask for. What a region decides by itself is left out: which inputs
are held, and which state is restored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeAlias
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.kept import changed
from ckplan.errors import ApplyError

Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


class Numbered:
    """A saved tensor, by its number; a second run fills it, and its use empties it."""

    __slots__ = ("__weakref__", "checkpoint", "tensor", "version")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tensor: torch.Tensor | None = None
        self.version = 0


class Checkpoint:
    """What one forward saved."""

    def __init__(self, name: str, run_again: Callable[[Refill], None]) -> None:
        """Nothing is saved yet.

        Args:
            name: Name of the region in errors.
            run_again: Runs the forward in ``Refill.saving``, until that is complete.
        """
        self.name = name
        self._run_again = run_again
        self._failed: ApplyError | None = None
        self.saved: list[ref[Numbered]] = []
        self.kinds: list[Kind] = []

    def saving(self) -> AbstractContextManager[None]:
        """Context of the forward."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> Numbered:
        numbered = Numbered(self)
        self.saved.append(ref(numbered))
        self.kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return numbered

    def fill(self) -> None:
        """Run again, and fill the saved tensors that are still to be used.

        Autograd holds the hooks of the second graph, which must hold nothing of the
        first. A forward that cannot run again never will: what it holds is let go, as
        an argument may hold its own graph, and the error is raised again.
        """
        if self._failed is not None:
            raise _again(self._failed)
        refill = Refill(self)
        try:
            self._run_again(refill)
        except ApplyError as error:
            self._failed, self._run_again = _again(error), _nothing
            raise
        finally:
            refill.close()


class Refill:
    """What a second run saved so far."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint: Checkpoint | None = checkpoint
        self._num_saved = 0
        self.is_complete = False
        self.differs = False  # another shape, type or device than in the first run

    def saving(
        self, interrupt: Callable[[], BaseException]
    ) -> AbstractContextManager[None]:
        """Context of the second run.

        Args:
            interrupt: Makes the exception that ends the run, as soon as it is complete
                or differs.
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():  # custom functions may pack
                first = self._checkpoint
                assert first is not None, "internal error: it has ended"
                if self.is_complete or self.differs:
                    raise interrupt()  # the forward caught the one that ended it
                number = self._num_saved
                if first.kinds[number] != (tensor.shape, tensor.dtype, tensor.device):
                    self.differs = True
                    raise interrupt()
                if tensor.grad_fn is not None:
                    tensor = tensor.detach()  # as ``bare``, for each saved tensor
                numbered = first.saved[number]()
                if numbered is not None:
                    numbered.tensor = tensor
                    numbered.version = version_of(tensor)
                self._num_saved = number = number + 1
                if number == len(first.saved):
                    self.is_complete = True
                    raise interrupt()
                return tensor

        return saved_tensors_hooks(pack, _same)

    def close(self) -> None:
        """End the second run."""
        self._checkpoint = None


def _unpack(numbered: Numbered) -> torch.Tensor:
    if numbered.tensor is None:
        numbered.checkpoint.fill()
    tensor, numbered.tensor = numbered.tensor, None
    assert tensor is not None, "internal error: a complete run fills all"
    version = version_of(tensor)
    if version != numbered.version:
        raise changed(numbered.checkpoint.name, tensor, numbered.version, version)
    return tensor


def _again(error: ApplyError) -> ApplyError:
    """The same error without its frames, which hold tensors."""
    return ApplyError(error.what, needed=error.needed, hint=error.hint)


def _nothing(refill: Refill) -> None:
    del refill


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Casting:
    """The types that autocast and torch choose now, to be the same in a second run."""

    def __init__(self, device_types: set[str]) -> None:
        self._default_dtype = torch.get_default_dtype()
        self._cached = torch.is_autocast_cache_enabled()
        self._types = [
            (device, torch.get_autocast_dtype(device), _is_autocast_enabled(device))
            for device in sorted({"cpu", *device_types} - {"meta"})
        ]

    def again(self) -> ExitStack:
        """Context in which autocast casts as it did then.

        A run that is ended early may leave a default type behind; the context's end
        sets the one from before.
        """
        stack = ExitStack()
        stack.callback(_set_default_dtype, torch.get_default_dtype())
        _set_default_dtype(self._default_dtype)
        for device, dtype, casts in self._types:
            if casts or _is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(device, dtype, casts, cache_enabled=self._cached)
                )
        return stack


def _set_default_dtype(dtype: torch.dtype) -> None:
    if torch.get_default_dtype() is not dtype:
        torch.set_default_dtype(dtype)


_is_autocast_enabled = torch.is_autocast_enabled
