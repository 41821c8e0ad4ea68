"""Rerun a module in backward, from a snapshot of the state of its forward.

A checkpoint (``checkpoint.py``) decides when. State that a forward may read or change
is restored for the second run and set forward after it: autocast, buffers, plain
attributes of modules and lists, dicts and sets in them, hooks, the random states of
torch, Python, NumPy and of generators.
State that cannot be restored is checked: inputs, parameters and outside tensors by
their versions, and calls of torch functions one by one. So a module that differs in
the second run raises an error that names the region, never a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckplan.applying.rebuilding.digest import Digest, is_same
from ckplan.applying.rerunning.attributes import Modules
from ckplan.applying.rerunning.call_check import (
    CallCheck,
    CallMemory,
    StopRerunError,
)
from ckplan.applying.rerunning.checkpoint import Casting, Checkpoint, Refill
from ckplan.applying.rerunning.snapshot import Snapshot
from ckplan.applying.rerunning.sources import source_of, sources_on
from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.compiled import still_uncompiled, uncompiled
from ckplan.errors import ApplyError

_LEAVES = (torch.Tensor, bool, int, float, str, type(None))


class Memory:
    """What the forwards of a module have in common; a copy of it begins empty."""

    def __init__(self) -> None:
        self.calls = CallMemory()
        self._modules: Modules | None = None

    def modules_of(self, module: nn.Module) -> Modules:
        """The module and those inside it; other forwards keep those that they have."""
        modules = self._modules
        if modules is None or not modules.are_of(module):
            modules = self._modules = Modules(module)
        return modules

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return type(self), ()


class Rerun:
    """One forward of a module that is rerun in backward."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        memory: Memory,
    ) -> None:
        """Begin the forward.

        Args:
            name: Name of the region in errors.
            module: Module whose state is restored.
            forward: Function to run.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            memory: Of the module's forwards.
        """
        self.name = name
        self._forward = forward
        leaves, self._put_together = _taken_apart(args, kwargs)
        self._inputs = _detached(leaves)
        self._modules = memory.modules_of(module)
        tensors = [x for x in self._inputs if isinstance(x, torch.Tensor)]
        tensors += self._modules.parameters
        self._tensors, self._versions = tensors, [*map(version_of, tensors)]
        self._buffers: list[tuple[torch.Tensor, int, Digest | None]] = []
        devices = {tensor.device for tensor in tensors}
        self._snapshot = Snapshot.of(self._modules, sources_on(devices))
        self._casting = Casting({device.type for device in devices})
        self._calls = CallCheck(memory.calls)

    @property
    def has_hooks_inside(self) -> bool:
        """Whether a module inside its module has hooks around forward."""
        return self._modules.has_hooks_inside

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, on the caller's inputs."""
        checkpoint = Checkpoint(self.name, self._run_again)
        calls = self._calls
        try:
            known = calls.known is not None
            scope = still_uncompiled() if known else uncompiled()
            with scope, checkpoint.saving(), calls:
                return self._forward(*args, **kwargs)
        finally:
            calls.close()
            self._buffers = self._snapshot.settle()

    def _run_again(self, refill: Refill) -> None:
        """Run the forward again, from the state that it began with.

        Raises:
            ApplyError: It reads a tensor that was changed in place, or differs.
        """
        self._check_unchanged()
        snapshot, first = self._snapshot, self._calls
        put_back = {id(buffer) for buffer, _, _ in snapshot.contents}
        written = {id(one()) for one in first.unseen.changed} - put_back
        if written and written - {id(buffer) for buffer, _, _ in self._buffers}:
            raise self._changed("it changes the data of a parameter or an input")
        drawn = [source for source, _ in snapshot.random]
        drawn += [source_of(generator) for generator, _ in first.generators]
        self._modules.look()
        now = Snapshot.of(self._modules, drawn)
        snapshot.restore(now)
        for generator, state in first.generators:
            generator.set_state(state)
        calls = CallCheck(first.memory, first, put_back)
        args, kwargs = self._put_together(self._inputs)
        try:
            with (
                self._casting.again(),
                torch.enable_grad(),
                still_uncompiled(),
                refill.saving(calls.stop),
                calls,
            ):
                self._forward(*args, **kwargs)
        except StopRerunError:
            pass
        except Exception:
            if not calls.different:
                raise
        finally:
            calls.close()
            now.restore()
            known = [one for one, _ in first.generators]
            for generator, state in calls.generators:
                if all(one is not generator for one in known):
                    generator.set_state(state)
        different = calls.different
        if not refill.is_complete:
            different = different or "it saves other tensors"
        if different:
            raise self._changed(different)

    def _check_unchanged(self) -> None:
        tensors, versions = self._tensors, self._versions
        if [*map(version_of, tensors)] == versions and not self._buffers:
            return
        seen = zip(tensors, versions, repeat(None), strict=False)
        for tensor, version, like in (*seen, *self._buffers):
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

    def _changed(self, found: str) -> ApplyError:
        """The error for a rerun that differs."""
        if not self._modules.are_same():
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


def _taken_apart(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]]:
    """What a call was given, one by one, and what puts it together again."""
    leaves: list[Any] = []
    form = _form((tuple(args), kwargs), leaves)
    if all(isinstance(one, _LEAVES) for one in leaves):
        return leaves, partial(_formed, form)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return leaves, partial(pytree.tree_unflatten, treespec=spec)


def _form(value: Any, leaves: list[Any]) -> Any:
    """The form of nested tuples, lists and dicts; what they hold is added to leaves."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, None, [_form(one, leaves) for one in value]
    if kind is dict:
        return kind, [*value], [_form(one, leaves) for one in value.values()]
    leaves.append(value)
    return None


def _formed(form: Any, leaves: Iterable[Any]) -> Any:
    """Leaves in a form."""
    return _in_form(form, iter(leaves))


def _in_form(form: Any, leaves: Iterator[Any]) -> Any:
    if form is None:
        return next(leaves)
    kind, keys, items = form
    values = [_in_form(one, leaves) for one in items]
    return kind(values) if keys is None else dict(zip(keys, values, strict=True))


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
