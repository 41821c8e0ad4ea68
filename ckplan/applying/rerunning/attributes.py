"""Attributes of the modules of a region: what a forward may read and change."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from ckplan.applying.rerunning.marks import DictMarks
from ckplan.applying.rerunning.sources import source_in

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = [name for name in REGISTRIES if name.startswith("_forward_")]
_KEPT_IN = ("_forward_hooks", "_forward_pre_hooks")  # the others only say how to call
_MOST_ITEMS = 10_000  # larger containers count as data that forwards only read
_is = operator.is_
_values_of = dict.values

Seen: TypeAlias = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A module's ``__dict__``, its content then, and that without registries."""


class Content:
    """Every attribute of some modules, and what their registries hold, at a moment."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Note what is there now."""
        self._modules = modules
        self._registries = [
            named
            for one in modules
            for named in (one._parameters, one._buffers, one._modules)
        ]
        dicts = self._dicts()
        self._marks = DictMarks(dicts)
        self._lengths = [*map(len, dicts)]
        self._keys = [*chain.from_iterable(dicts)]
        self._values = [*chain.from_iterable(map(_values_of, dicts))]

    def is_now(self) -> bool:
        """Whether the same objects are there, in the same order."""
        if self._marks.are_of(map(vars, self._modules)) and self._marks.are_now():
            return True
        dicts = self._dicts()
        marks = DictMarks(dicts)
        values = chain.from_iterable(map(_values_of, dicts))
        same = (
            [*map(len, dicts)] == self._lengths
            and all(map(_is, values, self._values))
            and [*chain.from_iterable(dicts)] == self._keys
        )
        if same:
            self._marks = marks
        return same

    def _dicts(self) -> list[dict[str, Any]]:
        return [*map(vars, self._modules), *self._registries]


class Containers:
    """Containers that some modules hold, and what they held at a moment."""

    def __init__(self, found: Sequence[tuple[Any, Any]]) -> None:
        """Note containers, with copies of their content."""
        self.found = found
        self._containers = [container for container, _ in found]
        contents = [content for _, content in found]
        self._lengths = [*map(len, contents)]
        self._items = [*chain.from_iterable(map(_flat, contents))]

    def are_now(self) -> bool:
        """Whether they hold the same items, in the same order."""
        containers = self._containers
        if [*map(len, containers)] != self._lengths:
            return False
        items: list[Any] = []
        for container in containers:
            items += container
            if isinstance(container, dict):
                items += container.values()
        return all(map(_is, items, self._items))


class Modules:
    """A module and those inside it, with what was found of them last.

    Most forwards change no attribute, so what was found is mostly found again: that is
    checked object by object and for all modules at once, which is cheaper than to look
    at every attribute anew.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find the modules of a module."""
        self._found = [Attributes(one) for one in module.modules()]
        self._look()

    def _look(self) -> None:
        for one in self._found:
            one.look()
        self.content = Content([one.module for one in self._found])
        self.attributes = [one.seen for one in self._found]
        self.named_parameters = [
            (one.module._parameters, one.parameters)
            for one in self._found
            if one.parameters
        ]
        self.buffers = [(one.module._buffers, one.buffers) for one in self._found]
        self.tensors = [
            tensor
            for one in self._found
            for tensor in (*one.buffers.values(), *one.tensors)
            if tensor is not None
        ]
        named = (found.values() for _, found in self.named_parameters)
        self.parameters = [p for found in named for p in found if p is not None]
        self._simple = [one for one in self._found if one.is_simple]
        self._others = [one for one in self._found if not one.is_simple]
        self._hookless = [hooks for one in self._simple for hooks in one.hookless]
        self._note_inside()

    def _note_inside(self) -> None:
        """Note what the modules hold whose content may change."""
        others = self._others
        self.containers = Containers([x for one in others for x in one.containers])
        self.sources = [source for one in others for source in one.sources]
        self.hookless = self._hookless + [x for one in others for x in one.hookless]
        outermost = self._found[0]
        self.has_hooks_inside = any(
            one.has_hooks for one in others if one is not outermost
        )

    def look(self) -> bool:
        """Look at the modules again.

        Returns:
            Whether no module was replaced, added or removed.
        """
        if self.content.is_now() and not any(self._hookless):
            if any(self.hookless) or not self.containers.are_now():
                for one in self._others:
                    one.look_inside_again()
                self._note_inside()
            return True
        self._look()
        return self.are_same()

    def are_of(self, module: nn.Module) -> bool:
        """Look again: whether these are those of a module; replicas have their own."""
        return self._found[0].module is module and self.look()

    def are_same(self) -> bool:
        """Whether no module was replaced, added or removed."""
        return all(one.has_same_children() for one in self._found)


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
        self.has_hooks = self.is_simple = False

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
        if are_same(self.everything, self._seen):
            self.look_inside_again()
            return
        self._seen = dict(self.everything)
        self.plain = {k: v for k, v in self._seen.items() if k not in REGISTRIES}
        hooks = (self._seen.get(name) for name in _HOOKS)
        self._hooks = tuple(found for found in hooks if found is not None)
        self.look_inside()

    def look_inside_again(self) -> None:
        """Look at containers and hooks again, if their content is another."""
        if any(self.hookless) or not all(holds(*one) for one in self.containers):
            self.look_inside()

    def look_inside(self) -> None:
        """Look at containers and hooks, whose content may change."""
        inside = list(_containers(self.plain.values()))
        hooked = [(hooks, dict(hooks)) for hooks in self._hooks if hooks]
        self.containers, self.has_hooks = inside + hooked, bool(hooked)
        both = (self._seen.get(name) for name in _KEPT_IN)
        self.hookless = [hooks for hooks in both if hooks is not None and not hooks]
        self.held = [
            value
            for values in (self.plain, *(content for _, content in inside))
            for value in (values.values() if isinstance(values, dict) else values)
        ]
        self.sources = [
            source for value in self.held if (source := source_in(value)) is not None
        ]
        self.tensors = [v for v in self.plain.values() if isinstance(v, torch.Tensor)]
        self.is_simple = not (inside or hooked or self.sources)


def are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether two dicts have the same keys in the same order, and the same objects."""
    same = len(now) == len(before) and all(map(_is, now.values(), before.values()))
    return same and now.keys() == before.keys()


def holds(container: Any, content: Any) -> bool:
    """Whether a container has the same items as a copy of its content."""
    now: Any = container if isinstance(container, dict) else list(container)
    same = len(now) == len(content)
    return same and all(map(_is, _flat(now), _flat(content)))


def _flat(content: Any) -> list[Any]:
    return [*content, *content.values()] if isinstance(content, dict) else content


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
