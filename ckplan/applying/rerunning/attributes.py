"""Attributes of the modules of a region: what a forward may read and change."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ckplan.applying.rerunning.sources import source_in

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = [name for name in REGISTRIES if name.startswith("_forward_")]
_MOST_ITEMS = 10_000  # larger containers count as data that forwards only read
_is = operator.is_

Seen: TypeAlias = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A module's ``__dict__``, its content then, and that without registries."""


class Modules:
    """A module and those inside it, with what was found of them last.

    Most forwards change no attribute, so what was found is mostly found again: that is
    checked object by object, which is cheaper than to look at every attribute anew.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find the modules of a module."""
        self._found = [Attributes(one) for one in module.modules()]

    def are_of(self, module: nn.Module) -> bool:
        """Whether these are the modules of a module: replicas have their own."""
        return self._found[0].module is module and self.are_same()

    def are_same(self) -> bool:
        """Whether no module was replaced, added or removed."""
        return all(one.has_same_children() for one in self._found)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters; shared ones as often as they are used."""
        named = (one.module._parameters.values() for one in self._found)
        return [p for found in named for p in found if p is not None]

    def __iter__(self) -> Iterator[Attributes]:
        """The modules, each looked at again."""
        for one in self._found:
            one.look()
            yield one


class Attributes:
    """The attributes of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plain: dict[str, Any] = {}  # attributes by name, without registries
        self.parameters: dict[str, nn.Parameter | None] = {}
        self.buffers: dict[str, torch.Tensor | None] = {}
        self._children = tuple(module._modules.values())
        self._seen: dict[str, Any] = {}  # all attributes, as they were last
        self._hooks: tuple[dict[int, Any], ...] = ()
        self._is_simple = False

    def has_same_children(self) -> bool:
        """Whether the modules right inside are those of before."""
        now = self.module._modules.values()
        return len(now) == len(self._children) and all(map(_is, now, self._children))

    @property
    def seen(self) -> Seen:
        """What was seen last; later looks make new dicts of what changed."""
        return self.everything, self._seen, self.plain

    def look(self) -> None:
        """Look at the attributes again, if they are not those of before."""
        self.everything = vars(self.module)
        parameters, buffers = self.module._parameters, self.module._buffers
        if not are_same(parameters, self.parameters):
            self.parameters = dict(parameters)
        if not are_same(buffers, self.buffers):
            self.buffers = dict(buffers)
        if are_same(self.everything, self._seen) and not any(self._hooks):
            if not self._is_simple:
                self._look_inside()
            return
        self._seen = dict(self.everything)
        self.plain = {k: v for k, v in self._seen.items() if k not in REGISTRIES}
        hooks = (self._seen.get(name) for name in _HOOKS)
        self._hooks = tuple(found for found in hooks if found is not None)
        self._look_inside()

    def _look_inside(self) -> None:
        """Look at containers and hooks, whose content may change."""
        inside = list(_containers(self.plain.values()))
        hooked = [(hooks, dict(hooks)) for hooks in self._hooks if hooks]
        self.containers = inside + hooked
        self.hookless = [hooks for hooks in self._hooks if not hooks]
        self.held = [
            value
            for values in (self.plain, *(content for _, content in inside))
            for value in (values.values() if isinstance(values, dict) else values)
        ]
        self.sources = [
            source for value in self.held if (source := source_in(value)) is not None
        ]
        self.tensors = [v for v in self.plain.values() if isinstance(v, torch.Tensor)]
        self._is_simple = not (inside or hooked or self.sources)


def are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two dicts have the same keys in the same order, and the same objects."""
    same = len(now) == len(before) and all(map(_is, now.values(), before.values()))
    return same and now.keys() == before.keys()


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


def state_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Buffers of modules, and plain attributes used as buffers; these are copied."""
    for module in modules:
        attributes = vars(module).values()  # registries are dicts, and no tensors
        yield from filter(is_state, (*module._buffers.values(), *attributes))


def is_state(value: Any) -> bool:
    """Whether a tensor is a buffer, or a plain attribute used as one."""
    return isinstance(value, torch.Tensor) and not value.requires_grad
