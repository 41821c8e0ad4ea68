"""Rerun a module in backward, from a snapshot of the state of its forward.

``torch.utils.checkpoint`` decides when, and restores autocast. All other state that a
forward may read or change is restored for the second run and set forward after it:
buffers, plain attributes of modules and lists, dicts and sets in
them, hooks, the random states of torch, Python, NumPy and of generators.
State that cannot be restored is checked: inputs, parameters and outside tensors by
their versions, and calls of torch functions one by one. So a module that differs in
the second run raises an error that names the region, never a wrong gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ckplan.applying.rebuilding.digest import Digest, is_same
from ckplan.applying.rerunning.snapshot import Snapshot, source_of, sources_on
from ckplan.applying.tensors.arguments import (
    Slots,
    UnknownArgumentError,
    geometry_of,
    is_query,
    switches,
    version_of,
)
from ckplan.applying.tensors.compiled import uncompiled
from ckplan.applying.tensors.random_state import random_state
from ckplan.errors import ApplyError

_STOP = "_StopRecomputationError"  # torch has all tensors that it needs
_NOT_COMPARED = 0
_NOT_FOLLOWED = (
    torch.Tensor.detach,
    torch._C._set_grad_enabled,
)  # torch calls these itself


class Rerun:
    """One forward of a module that is rerun in backward."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Begin the forward.

        Args:
            name: Name of the region in errors.
            module: Module whose state is restored.
            forward: Function to run.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        self.name = name
        self._forward = forward
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._given = _detached(leaves)
        self._modules = list(module.modules())
        named = (module._parameters.values() for module in self._modules)
        parameters = [p for found in named for p in found if p is not None]
        retained = [x for x in self._given if isinstance(x, torch.Tensor)]
        self._seen: list[tuple[torch.Tensor, int, Digest | None]] = [
            (x, version_of(x), None) for x in (*parameters, *retained)
        ]
        devices = {tensor.device for tensor in (*retained, *parameters)}
        self._world = Snapshot.of(self._modules, sources_on(devices))
        self.calls = _Calls()
        self.devices = [torch.empty(0, device=device) for device in devices]

    def __call__(self, *_: torch.Tensor) -> Any:
        """Run the forward; the first time on the caller's inputs."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
        else:
            args, kwargs = pytree.tree_unflatten(self._given, self._spec)
        return self._forward(*args, **kwargs)

    def contexts(
        self,
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Contexts of the forward and of its rerun."""
        return _Seen(self), _Again(self)

    def end(self) -> None:
        """End the forward; retain only state that it changed."""
        self.calls.close()
        self._seen += self._world.settle()

    def begin_again(self) -> tuple[Snapshot, _Calls]:
        """Restore all state.

        Raises:
            ApplyError: A tensor that it reads was changed in place.
        """
        self._check_unchanged()
        drawn = [source for source, _ in self._world.random]
        drawn += [source_of(generator) for generator, _ in self.calls.generators]
        now = Snapshot.of(self._modules, drawn)
        self._world.restore()
        for generator, state in self.calls.generators:
            generator.set_state(state)
        return now, _Calls(self.calls, {id(b) for b, _, _ in self._world.contents})

    def _check_unchanged(self) -> None:
        for tensor, version, like in self._seen:
            now = version_of(tensor)
            if now != version or (like is not None and not is_same(like, tensor)):
                how = f"version {version} then, {now} now"
                raise ApplyError(
                    f"cannot run {self.name} again: a tensor of shape "
                    f"{tuple(tensor.shape)} that it reads was changed in place "
                    f"({how if now != version else 'by a norm, or past its version'})",
                    needed="parameters and inputs that do not change until backward",
                    hint="update parameters after backward, or leave this call out",
                )

    def changed(self, found: str) -> ApplyError:
        """The error for a rerun that differs."""
        if [*self._modules[0].modules()] != self._modules:
            return ApplyError(
                f"cannot run {self.name} again: its forward made or replaced a module",
                needed="modules that are there before, as after a first forward",
                hint="call the model on a batch before the plan is applied",
            )
        return ApplyError(
            f"cannot run {self.name} again: its forward differs from the first one "
            f"({found})",
            needed="a forward that gives the same result on the same inputs",
            hint="rebuild it op by op (by: program), or leave this call out",
        )


class _Seen(AbstractContextManager[None]):
    """Context of the forward."""

    def __init__(self, rerun: Rerun) -> None:
        self._rerun = rerun
        self._uncompiled = uncompiled()

    def __enter__(self) -> None:
        self._uncompiled.__enter__()
        self._rerun.calls.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._rerun.calls.__exit__(*error)
        self._uncompiled.__exit__(*error)
        self._rerun.end()


class _Again(AbstractContextManager[None]):
    """Context of every rerun: there is one for each backward."""

    def __init__(self, rerun: Rerun) -> None:
        self._rerun = rerun
        self._open: list[tuple[Snapshot, _Calls, AbstractContextManager[object]]] = []

    def __enter__(self) -> None:
        now, calls = self._rerun.begin_again()
        compiling = uncompiled()
        self._open.append((now, calls, compiling))
        compiling.__enter__()
        calls.__enter__()

    def __exit__(self, *error: Any) -> None:
        now, calls, compiling = self._open.pop()
        calls.__exit__(*error)
        compiling.__exit__(*error)
        calls.close()
        now.restore()
        if calls.different:
            raise self._rerun.changed(calls.different) from None
        if calls.stopped is not None:
            raise calls.stopped from None  # the forward may have caught it


class _DifferentError(RuntimeError):
    """Stops a rerun that differs; its region raises the error at the end."""


class _Calls(TorchFunctionMode):
    """Compares the calls of torch functions with those of the first run."""

    def __init__(
        self, expected: _Calls | None = None, put_back: Collection[int] = ()
    ) -> None:
        """Begin a run; ``put_back`` has the ids of restored tensors."""
        super().__init__()
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.different = ""  # the first call that differs
        self.stopped: type[Exception] | None = None
        self._expected = expected
        self._put_back = put_back
        self._digests: list[int] = []
        self._met: list[tuple[weakref.ref[torch.Tensor], int]] = []  # and versions
        self._slots = Slots(self._meet)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.stopped is not None:
            raise self.stopped
        if is_query(func) or func in _NOT_FOLLOWED:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            self._draw(generator)
        self._follow(func, args, kwargs)
        if self.different:
            raise _DifferentError(self.different)
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ == _STOP:
                self.stopped = type(error)  # itself would be a cycle
            raise
        self._slots.returned(out)
        return out

    def close(self) -> None:
        """End the run; keep only digests."""
        self._slots.close()
        self._expected = None

    def _follow(self, func: Any, args: Any, kwargs: Any) -> None:
        try:
            arguments = self._slots.freeze(args, kwargs)
            digest = hash((func, arguments, switches(func)))
        except (UnknownArgumentError, TypeError):
            digest = _NOT_COMPARED
        self._note(digest, getattr(func, "__name__", str(func)))

    def _meet(self, tensor: torch.Tensor) -> None:
        try:
            digest = hash(geometry_of(tensor))
        except UnknownArgumentError:
            digest = _NOT_COMPARED
        what = f"a tensor of shape {tuple(tensor.shape)}"
        self._note(digest, what)
        self._check_version(tensor, what)

    def _check_version(self, tensor: torch.Tensor, what: str) -> None:
        """Check that a tensor of the first run has the same values."""
        place, version = len(self._met), version_of(tensor)
        self._met.append((weakref.ref(tensor), version))
        if self._expected is None or self.different or id(tensor) in self._put_back:
            return
        before = self._expected._met[place : place + 1]
        if any(one() is tensor and old != version for one, old in before):
            self.different = f"it reads {what} that was changed in place"

    def _note(self, digest: int, what: str) -> None:
        place = len(self._digests)
        self._digests.append(digest)
        if self._expected is None or self.different:
            return
        expected = self._expected._digests
        known = place < len(expected)
        if not known or expected[place] != digest:
            self.different = what

    def _draw(self, generator: torch.Generator) -> None:
        known = self.generators if self._expected is None else self._expected.generators
        if any(one is generator for one, _ in known):
            return
        if self._expected is None:
            state = random_state(generator.device, generator)
            self.generators.append((generator, state))
        else:
            self.different = self.different or "another random generator"


def _detached(leaves: Iterable[Any]) -> list[Any]:
    """Inputs without their graph, which would form a reference cycle.

    What was given twice is one tensor again, as attention asks: ``query is key``. What
    was no leaf is none: autocast keeps its casts of leaves. A view by ``[...]`` has all
    strides as they were, those of a batch of one, too.
    """
    alone: dict[int, Any] = {}
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            if id(leaf) not in alone:
                bare = leaf.detach().requires_grad_()
                strided = leaf.layout == torch.strided
                alone[id(leaf)] = bare[...] if strided else bare
            leaf = alone[id(leaf)]
        found.append(leaf)
    return found
