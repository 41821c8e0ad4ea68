"""Find side effects of module calls outside tensors: generators, attributes, arguments.

State is compared whenever a call begins or ends, so a change belongs to the innermost
call that was running. States are compared by identity and size. No references are held,
as they would extend the lifetimes of tensors.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ckplan.applying.rerunning.sources import NUMPY, PYTHON, source_in
from ckplan.training.randomness import torch_rng_restorer

_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)  # asked first, as that is quick
_OPAQUE = (type, nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_DEEPEST = 3
_MOST_ITEMS = 256
_GENERATORS = {"Python": PYTHON, "NumPy": NUMPY}  # which reruns do not restore


@dataclass(slots=True)
class _Frame:
    """A running call, and its state at the last comparison."""

    module: nn.Module
    state: dict[str, Any]
    plain: set[str]  # names of attributes that the engine restores
    outline: dict[str, Any]  # quick comparison, for enclosing calls
    arguments: list[Any] = field(default_factory=list)
    before: list[Any] = field(default_factory=list)


class SideEffects:
    """Finds changes of state between two comparisons."""

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self._random = _states_of_generators()

    def enter(self, module: nn.Module) -> None:
        """Record the start of a call."""
        self._frames.append(_Frame(module, *_state_of(module), _outline_of(module)))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the containers among a call's inputs; the recorder sees tensors."""
        found = [x for x in (*args, *kwargs.values()) if _is_container(x)]
        frame = self._frames[-1]
        frame.arguments, frame.before = found, list(map(identity_of, found))

    def leave(self) -> None:
        """Record the end of the innermost call."""
        self._frames.pop()

    def changes(self) -> Iterator[tuple[str, str]]:
        """(kind of hazard, reason) of changes since the last comparison.

        The engine restores "plain state" before it reruns a module.
        """
        now = _states_of_generators()
        for name, state in self._random.items():
            if state is not None and not _GENERATORS[name].are_same(state, now[name]):
                yield "random", f"draws random numbers of {name}"
        self._random = now
        if not self._frames:
            return
        frame = self._frames[-1]
        for around in self._frames[:-1]:
            if around.module is not frame.module:
                yield from _changes_of_another(around)
        state, plain = _state_of(frame.module)
        for name in {**frame.state, **state} if state != frame.state else ():
            if frame.state.get(name, _MISSING) != state.get(name, _MISSING):
                known = name in frame.plain and name in plain
                kind = "plain state" if known else "state"
                yield kind, f"changes its attribute '{name}'"
        frame.state, frame.plain = state, plain
        frame.outline = _outline_of(frame.module)
        after = list(map(identity_of, frame.arguments))
        for argument, old, new in zip(
            frame.arguments, frame.before, after, strict=True
        ):
            if old != new:
                yield "state", f"changes an argument of type {type(argument).__name__}"
        frame.before = after


def _changes_of_another(frame: _Frame) -> Iterator[tuple[str, str]]:
    """Changes of an enclosing module by the code of an inner call.

    A rerun of the inner module does not restore them. The enclosing module's own next
    comparison finds them, too.
    """
    outline, title = _outline_of(frame.module), type(frame.module).__name__
    if outline == frame.outline:
        return
    for name in {**frame.outline, **outline}:
        if frame.outline.get(name, _MISSING) != outline.get(name, _MISSING):
            yield "state", f"changes the attribute '{name}' of the {title} around it"
    frame.outline = outline


_MISSING = object()


def _states_of_generators() -> dict[str, Any]:
    """By library; None for one that is not imported."""
    return {name: source.state() for name, source in _GENERATORS.items()}


def identity_of(value: Any, depth: int = 0) -> Any:
    """A comparable summary of a value that holds no reference to it."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, torch.Tensor):
        return id(value)  # the recorder sees ops that write into it
    if isinstance(value, _PLAIN):
        return value
    if depth == _DEEPEST or isinstance(value, _OPAQUE):
        return id(value)
    source = source_in(value)
    if source is not None:
        return pickle.dumps(source.state())
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return len(value), _items(value, depth)
    if isinstance(value, Mapping):
        return len(value), _items(value.keys(), depth), _items(value.values(), depth)
    inside = getattr(value, "__dict__", None)
    return (id(value), identity_of(inside, depth)) if inside else id(value)


def _items(values: Any, depth: int) -> Any:
    if len(values) > _MOST_ITEMS:
        return None
    return tuple([identity_of(item, depth + 1) for item in values])


def _is_container(value: Any) -> bool:
    return not isinstance(value, (torch.Tensor, *_PLAIN, *_OPAQUE))


def _state_of(module: nn.Module) -> tuple[dict[str, Any], set[str]]:
    """Summaries of attributes, and the names of plain values and their containers."""
    own = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
    found = {name: identity_of(value) for name, value in own.items()}
    # The recorder sees in-place writes, but not replaced buffers.
    buffers = {name: id(value) for name, value in module._buffers.items()}
    return found | buffers, {name for name, value in own.items() if _is_plain(value)}


def _outline_of(module: nn.Module) -> dict[str, Any]:
    """A quick summary, taken at every inner call: attributes and their items."""
    found = {name: id(value) for name, value in module._buffers.items()}
    for name, value in vars(module).items():
        if name not in _OF_TORCH:
            plain = type(value) in _PLAIN_TYPES
            found[name] = value if plain else _outlined(value)
    return found


def _outlined(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, (list, set, deque, dict)):
        return id(value)
    if len(value) > _MOST_ITEMS:
        return len(value)
    return [id(x) for x in (value.values() if isinstance(value, dict) else value)]


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a rerun restores a value, and the value holds no tensor."""
    if isinstance(value, _PLAIN) or source_in(value) is not None:
        return True
    if not isinstance(value, (list, set, deque, dict)):
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    small = depth < _DEEPEST and len(items) <= _MOST_ITEMS
    return small and all(_is_plain(item, depth + 1) for item in items)


@contextmanager
def preserve_rng_state() -> Iterator[Callable[[], None]]:
    """A scope that restores all global generators at its end.

    Yields:
        A function that restores them at once.
    """
    numpy = sys.modules.get("numpy.random")
    python, torch_restart = random.getstate(), torch_rng_restorer()
    of_numpy = numpy.get_state() if numpy else None

    def restart() -> None:
        random.setstate(python)
        torch_restart()
        if numpy:
            numpy.set_state(of_numpy)

    try:
        yield restart
    finally:
        restart()
