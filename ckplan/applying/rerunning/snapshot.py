"""Snapshot of the state that a forward may read and change beside its inputs.

Parameters, as far as others take their place, and whether they require gradients,
buffers, plain attributes of modules and lists, dicts and sets in them, hooks around
forwards, and the random states of torch, Python, NumPy and of generators, those that
modules hold included.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ckplan.applying.rebuilding.digest import Digest, digest
from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.random_state import random_state, set_random_state

_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = [name for name in _REGISTRIES if name.startswith("_forward_")]
_MOST_ITEMS = 10_000  # larger containers count as data that forwards only read


@dataclass
class Snapshot:
    """State that a forward may read and change beside its inputs."""

    attributes: list[tuple[dict[str, Any], dict[str, Any], int]]  # and how many
    containers: list[tuple[Any, Any]]
    hookless: list[dict[int, Any]]  # where there are no hooks
    parameters: list[tuple[dict[str, Any], dict[str, Any]]]
    trained: list[tuple[nn.Parameter, bool]]  # whether they require gradients
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[tuple[torch.Tensor, torch.Tensor, int]]
    random: list[tuple[Source, Any]]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], sources: Iterable[Source]) -> Snapshot:
        """Take a snapshot of the current state."""
        modules = list(modules)
        attributes, parameters, buffers = [], [], []
        containers: list[tuple[Any, Any]] = []
        hookless: list[dict[int, Any]] = []
        retained: list[Any] = []
        for module in modules:
            everything = vars(module)
            plain = {k: v for k, v in everything.items() if k not in _REGISTRIES}
            attributes.append((everything, plain, len(everything)))
            inside = list(_containers(plain.values()))
            containers += inside
            for name in _HOOKS:
                if hooks := everything.get(name):
                    containers.append((hooks, dict(hooks)))
                elif hooks is not None:
                    hookless.append(hooks)
            for values in (plain, *(content for _, content in inside)):
                retained += values.values() if isinstance(values, dict) else values
            if module._parameters:
                parameters.append((module._parameters, dict(module._parameters)))
            buffers.append((module._buffers, dict(module._buffers)))
        leaves = (p for _, named in parameters for p in named.values())
        trained = [(p, p.requires_grad) for p in leaves if _is_leaf(p)]
        tensors = state_of(modules)
        contents = [(b, _elements(b).clone(), version_of(b)) for b in tensors]
        owned = (
            source for value in retained if (source := source_in(value)) is not None
        )
        states = [(source, source.state()) for source in (*sources, *owned)]
        return cls(
            attributes,
            containers,
            hookless,
            parameters,
            trained,
            buffers,
            contents,
            states,
        )

    def settle(self) -> list[tuple[torch.Tensor, int, Digest | None]]:
        """Free the state that did not change.

        Returns:
            Unchanged buffers, with their versions and digests.
        """
        same = [
            (b, version, digest(b) if b.device.type == "cpu" else None)
            for b, copy, version in self.contents
            if _is_same(b, copy, version)
        ]
        unchanged = {id(buffer) for buffer, *_ in same}
        self.contents = [one for one in self.contents if id(one[0]) not in unchanged]
        self.random = [one for one in self.random if not one[0].is_at(one[1])]
        return same

    def restore(self) -> None:
        """Restore the state."""
        for everything, plain, size in self.attributes:
            everything.update(plain)
            if len(everything) > size:
                for key in everything.keys() - plain.keys() - _REGISTRIES:
                    del everything[key]
        for container, content in self.containers:
            _fill(container, content)
        for hooks in filter(None, self.hookless):
            hooks.clear()
        for named, before in self.parameters:
            others = {k: v for k, v in before.items() if _is_other(named.get(k), v)}
            named.update(others)
        _train(self.trained)
        for named, before in self.buffers:
            named.clear()
            named.update(before)
        for buffer, copy, _ in self.contents:
            _elements(buffer).copy_(copy)
        for source, state in self.random:
            source.put(state)


@dataclass(frozen=True)
class Source:
    """A random source: functions that read, set and compare its state."""

    state: Callable[[], Any]
    set_state: Callable[[Any], None]
    are_same: Callable[[Any, Any], bool] = operator.eq

    def put(self, state: Any) -> None:
        """Set the state."""
        self.set_state(state)

    def is_at(self, state: Any) -> bool:
        """Whether nothing was drawn since a state."""
        return self.are_same(self.state(), state)


def _look_same(one: Any, other: Any) -> bool:
    """Whether two NumPy states are equal: they contain arrays."""
    return pickle.dumps(one) == pickle.dumps(other)


def _numpy_state() -> Any:
    """NumPy's global random source, if NumPy is imported."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _torch_source(
    device: torch.device, generator: torch.Generator | None = None
) -> Source:
    """A generator, or a device's own."""
    place = device, generator
    state, set_state = partial(random_state, *place), partial(set_random_state, *place)
    return Source(state, set_state, torch.equal)


_EVERYWHERE = (
    Source(random.getstate, random.setstate),
    Source(_numpy_state, _set_numpy_state, _look_same),
    _torch_source(torch.device("cpu")),
)


def state_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Buffers of modules, and plain attributes used as buffers; these are copied."""
    for module in modules:
        attributes = vars(module).values()  # registries are dicts, and no tensors
        yield from filter(_is_state, (*module._buffers.values(), *attributes))


def source_of(generator: torch.Generator) -> Source:
    """A generator that a forward was given or made."""
    return _torch_source(generator.device, generator)


def source_in(value: Any) -> Source | None:
    """The generator of Python's or NumPy's that a value is, if it is one."""
    if isinstance(value, random.Random):
        system = isinstance(value, random.SystemRandom)  # which has no state
        return None if system else Source(value.getstate, value.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        state = partial(getattr, bits, "state"), partial(setattr, bits, "state")
        return Source(*state, _look_same)
    if numpy is not None and isinstance(value, numpy.RandomState):
        return Source(value.get_state, value.set_state, _look_same)
    return None


def sources_on(devices: Iterable[torch.device]) -> list[Source]:
    """Random sources of a forward on some devices, except its own generators."""
    cuda = (_torch_source(device) for device in devices if device.type == "cuda")
    return [*_EVERYWHERE, *cuda]


def _containers(
    values: Iterable[Any], known: set[int] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Lists, dicts, sets and deques, each once, with a copy of its content."""
    known = set() if known is None else known
    for value in values:
        if isinstance(value, (list, set, deque, dict)) and id(value) not in known:
            known.add(id(value))
            if len(value) > _MOST_ITEMS:
                continue
            items = dict(value) if isinstance(value, dict) else list(value)
            yield value, items
            inside = items.values() if isinstance(items, dict) else items
            yield from _containers(inside, known)


def _fill(container: Any, content: Any) -> None:
    """Restore the content of a container if it changed."""
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


def _is_other(now: Any, before: Any) -> bool:
    """Whether a parameter took another's place, as ``functional_call`` puts it there.

    What shards a model puts tensors of its own kinds and sizes there, and means it.
    """
    both = type(now) is type(before) is nn.Parameter
    return both and now is not before and now.shape == before.shape


def _is_leaf(value: Any) -> bool:
    """Whether its ``requires_grad`` can be set."""
    return isinstance(value, nn.Parameter) and value.is_leaf


def _train(trained: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Set whether parameters require gradients."""
    for parameter, requires_grad in trained:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def _is_state(value: Any) -> bool:
    """Whether a tensor is a buffer, or a plain attribute used as one."""
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _elements(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer's elements, each once where it is expanded.

    Through ``.data``, so that writes do not invalidate saved tensors of autograd.
    """
    bare = buffer.data
    for dim, (size, stride) in enumerate(zip(bare.shape, bare.stride(), strict=True)):
        if size > 1 and not stride:
            bare = bare.narrow(dim, 0, 1)
    return bare


def _is_same(buffer: torch.Tensor, copy: torch.Tensor, version: int) -> bool:
    """Whether a buffer is unchanged; writes to ``.data`` add no version."""
    return version_of(buffer) == version and shows_same(buffer, copy)


def shows_same(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the bytes are unchanged, if comparing is cheap."""
    checks_digest = type(buffer) is torch.Tensor and buffer.device.type == "cpu"
    return not checks_digest or torch.equal(_elements(buffer), copy)
