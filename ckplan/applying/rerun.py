"""Run a module again in backward, in the world that its forward saw.

``torch.utils.checkpoint`` decides when, and puts autocast back. Around it, everything
else that a forward may depend on or change is put back for the second run and put
forward after it: buffers, plain attributes of modules and lists, dicts and sets in
them, the random states of torch, Python, NumPy and of generators.
What cannot be put back is watched: inputs, parameters and tensors from elsewhere by
their versions, and the calls of torch functions one by one, as replays are. So a module
that does something else the second time is an error that names the region, never a
wrong gradient.
"""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ckplan.applying.calls import (
    Slots,
    UnknownArgumentError,
    asks_only,
    geometry_of,
    switches,
    version_of,
)
from ckplan.applying.recompute import cuda_random_state
from ckplan.errors import ApplyError

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_STOP = "_StopRecomputationError"  # torch has all that it wanted
_MOST_ITEMS = 10_000  # larger containers are taken for data, which forwards only read
_NOT_COMPARED = 0
_NOT_FOLLOWED = (torch.Tensor.detach, torch._C._set_grad_enabled)  # torch's own doing


class Rerun:
    """One forward of a module that is to run again."""

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
            name: What errors call the region.
            module: Whose state is put back.
            forward: What runs.
            args: As the caller gave them.
            kwargs: Likewise.
        """
        self.name = name
        self._forward = forward
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._given = [_detached(leaf) for leaf in leaves]
        self._modules = list(module.modules())
        named = (module._parameters.values() for module in self._modules)
        parameters = [p for found in named for p in found if p is not None]
        held = [x for x in self._given if isinstance(x, torch.Tensor)]
        self._versions = [(x, version_of(x)) for x in (*parameters, *held)]
        devices = {tensor.device for tensor in (*held, *parameters)}
        self._sources = [*_SOURCES, *_sources_on(devices)]
        self._world = _World.of(self._modules, self._sources)
        self.calls = _Calls()
        self.devices = [torch.empty(0, device=device) for device in devices]

    def __call__(self, *_: torch.Tensor) -> Any:
        """Run the forward; the first time on what the caller gave."""
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
        else:
            args, kwargs = pytree.tree_unflatten(self._given, self._spec)
        return self._forward(*args, **kwargs)

    def contexts(
        self,
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """What the forward runs in, and what runs again runs in."""
        return _Seen(self), _Again(self)

    def end(self) -> None:
        """The forward is over: hold only what it changed."""
        self.calls.close()
        self._versions += self._world.settle()

    def begin_again(self) -> tuple[_World, _Calls]:
        """Put everything back.

        Raises:
            ApplyError: A tensor that it reads was changed in place.
        """
        self._check_versions()
        generators = [_Generator(g) for g, _ in self.calls.generators]
        now = _World.of(self._modules, [*self._sources, *generators])
        self._world.restore()
        for generator, state in self.calls.generators:
            generator.set_state(state)
        return now, _Calls(self.calls, {id(b) for b, _, _ in self._world.contents})

    def _check_versions(self) -> None:
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise ApplyError(
                    f"cannot run {self.name} again: a tensor of shape "
                    f"{tuple(tensor.shape)} that it reads was changed in place "
                    f"(version {version} then, {version_of(tensor)} now)",
                    needed="parameters and inputs that stay as they are until backward",
                    hint="update parameters after backward, or leave this call out",
                )

    def changed(self, found: str) -> ApplyError:
        """The error for a forward that does something else."""
        return ApplyError(
            f"cannot run {self.name} again: its forward does something else than "
            f"before ({found})",
            needed="a forward that does the same on the same inputs",
            hint="rebuild it op by op (by: program), or leave this call out",
        )


class _Seen(AbstractContextManager[None]):
    """Around the forward."""

    def __init__(self, rerun: Rerun) -> None:
        self._rerun = rerun

    def __enter__(self) -> None:
        self._rerun.calls.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._rerun.calls.__exit__(*error)
        self._rerun.end()


class _Again(AbstractContextManager[None]):
    """Around every further run: there is one for each backward."""

    def __init__(self, rerun: Rerun) -> None:
        self._rerun = rerun
        self._open: list[tuple[_World, _Calls]] = []

    def __enter__(self) -> None:
        now, calls = self._rerun.begin_again()
        self._open.append((now, calls))
        calls.__enter__()

    def __exit__(self, *error: Any) -> None:
        now, calls = self._open.pop()
        calls.__exit__(*error)
        calls.close()
        now.restore()
        if calls.different:
            raise self._rerun.changed(calls.different) from None
        if calls.stopped is not None:
            raise calls.stopped from None  # the forward may have caught it


@dataclass
class _World:
    """What a forward may read and change beside its inputs, at one moment."""

    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    containers: list[tuple[Any, Any]]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[tuple[torch.Tensor, torch.Tensor, int]]
    random: list[tuple[_Source, Any]]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], sources: Iterable[_Source]) -> _World:
        """What there is now."""
        attributes, buffers = [], []
        containers: list[tuple[Any, Any]] = []
        for module in modules:
            everything = vars(module)
            plain = {k: v for k, v in everything.items() if k not in _REGISTRIES}
            attributes.append((everything, plain))
            containers += _containers(plain.values())
            if module._buffers:
                buffers.append((module._buffers, dict(module._buffers)))
        named = (*(b for _, b in buffers), *(plain for _, plain in attributes))
        tensors = [t for found in named for t in found.values() if _is_state(t)]
        contents = [(b, b.detach().clone(), version_of(b)) for b in tensors]
        states = [(source, source.state()) for source in sources]
        return cls(attributes, containers, buffers, contents, states)

    def settle(self) -> list[tuple[torch.Tensor, int]]:
        """Let go of what is as it was; returns buffers of which that is true."""
        same = [(b, v) for b, copy, v in self.contents if _is_same(b, copy, v)]
        unchanged = {id(buffer) for buffer, _ in same}
        self.contents = [one for one in self.contents if id(one[0]) not in unchanged]
        self.random = [one for one in self.random if not one[0].is_at(one[1])]
        return same

    def restore(self) -> None:
        """Make everything what it was."""
        for everything, plain in self.attributes:
            for key in everything.keys() - plain.keys() - _REGISTRIES:
                del everything[key]
            everything.update(plain)
        for container, content in self.containers:
            _fill(container, content)
        for named, before in self.buffers:
            named.clear()
            named.update(before)
        for buffer, copy, _ in self.contents:
            buffer.data.copy_(copy)  # .data: what autograd saved stays valid
        for source, state in self.random:
            source.put(state)


class _Source:
    """Where random numbers come from: here, Python's own generator."""

    def state(self) -> Any:
        return random.getstate()

    def put(self, state: Any) -> None:
        random.setstate(state)

    def is_at(self, state: Any) -> bool:
        """Whether nothing was drawn since."""
        return bool(self.state() == state)


class _NumPy(_Source):
    """NumPy's global one, where somebody has imported it."""

    def state(self) -> Any:
        numpy = sys.modules.get("numpy")
        return None if numpy is None else numpy.random.get_state()

    def put(self, state: Any) -> None:
        if state is not None:
            sys.modules["numpy"].random.set_state(state)

    def is_at(self, state: Any) -> bool:
        return pickle.dumps(self.state()) == pickle.dumps(state)


class _Torch(_Source):
    """Torch's own, of the CPU."""

    def state(self) -> Any:
        return torch.get_rng_state()

    def put(self, state: Any) -> None:
        torch.set_rng_state(state)

    def is_at(self, state: Any) -> bool:
        return torch.equal(self.state(), state)


@dataclass(frozen=True)
class _Cuda(_Torch):
    """Torch's own, of a device."""

    device: torch.device

    def state(self) -> Any:
        return cuda_random_state(self.device)

    def put(self, state: Any) -> None:
        torch.cuda.set_rng_state(state, self.device)


@dataclass(frozen=True)
class _Generator(_Torch):
    """One that the forward was given or made."""

    generator: torch.Generator

    def state(self) -> Any:
        return self.generator.get_state()

    def put(self, state: Any) -> None:
        self.generator.set_state(state)


_SOURCES = (_Source(), _NumPy(), _Torch())


def _sources_on(devices: Iterable[torch.device]) -> list[_Source]:
    return [_Cuda(device) for device in devices if device.type == "cuda"]


class _DifferentError(RuntimeError):
    """Stops a run that does something else; its region says so at the end."""


class _Calls(TorchFunctionMode):
    """Follows the calls of torch functions, and compares them with earlier ones."""

    def __init__(
        self, expected: _Calls | None = None, put_back: Collection[int] = ()
    ) -> None:
        """Begin a run; ``put_back`` has the ids of tensors that are as they were."""
        super().__init__()
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.different = ""  # the first call that was another
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
        if asks_only(func) or func in _NOT_FOLLOWED:
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
        """The run is over: hold nothing but digests."""
        self._slots.close()
        self._expected = None

    def _follow(self, func: Any, args: Any, kwargs: Any) -> None:
        try:
            arguments = self._slots.freeze((args, kwargs))
            digest = hash((func, arguments, switches()))
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
        """The same tensor as in the first run must hold the same values."""
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
        if all(known is not generator for known, _ in self.generators):
            self.generators.append((generator, generator.get_state()))
            if self._expected is not None:
                before = self._expected.generators
                if all(known is not generator for known, _ in before):
                    self.different = self.different or "another random generator"


def _detached(leaf: Any) -> Any:
    """An input without the graph behind it: holding that would be a cycle."""
    if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
        return leaf.detach().requires_grad_(leaf.requires_grad)
    return leaf


def _containers(values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Lists, dicts, sets and deques, each with a copy of what is in it."""
    for value in values:
        if isinstance(value, (list, set, deque, dict)):
            if len(value) > _MOST_ITEMS:
                continue
            items = dict(value) if isinstance(value, dict) else list(value)
            yield value, items
            yield from _containers(items.values() if isinstance(items, dict) else items)


def _fill(container: Any, content: Any) -> None:
    """Give a container its content again, if that is another now."""
    if isinstance(container, dict):
        now: Any = dict(container)
    else:
        now = list(container)
    if len(now) == len(content) and all(map(_is, _flat(now), _flat(content))):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _flat(content: Any) -> list[Any]:
    return [*content, *content.values()] if isinstance(content, dict) else content


def _is(one: object, other: object) -> bool:
    return one is other


def _is_state(value: Any) -> bool:
    """Whether it is a buffer, or a plain attribute that acts as one."""
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_same(buffer: torch.Tensor, copy: torch.Tensor, version: int) -> bool:
    """Whether a buffer is as it was; ``.data`` is changed without a new version."""
    if version_of(buffer) != version:
        return False
    looks = type(buffer) is torch.Tensor and buffer.device.type == "cpu"
    return not looks or torch.equal(buffer, copy)
