"""See what module calls change beside tensors: generators, attributes, arguments.

Looked at between the ops of one call and the next, so a change belongs to the innermost
call whose code was running. Nothing is held, lest a tensor outlive its time: states are
compared by identity and size.
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

from ckplan.applying.rerunning.snapshot import source_in
from ckplan.training.randomness import torch_rng_restorer

_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_OPAQUE = (type, nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_DEEPEST = 3
_MOST_ITEMS = 256


@dataclass(slots=True)
class _Frame:
    """A call that runs, and the state that it was last seen to leave."""

    module: nn.Module
    state: dict[str, Any]
    plain: set[str]  # names in it of what the engine puts back
    outline: dict[str, Any]  # what can be told soon, of calls around the one that runs
    arguments: list[Any] = field(default_factory=list)
    before: list[Any] = field(default_factory=list)


class SideEffects:
    """Sees changes of state from one look to the next."""

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self._random = non_torch_rng_states()

    def enter(self, module: nn.Module) -> None:
        """A call begins."""
        self._frames.append(_Frame(module, *_state_of(module), _outline_of(module)))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the call that began was given; tensors are seen op by op."""
        found = [x for x in (*args, *kwargs.values()) if _is_container(x)]
        frame = self._frames[-1]
        frame.arguments, frame.before = found, list(map(identity_of, found))

    def leave(self) -> None:
        """The innermost call ended."""
        self._frames.pop()

    def changes(self) -> Iterator[tuple[str, str]]:
        """Kinds of hazards and what changed since the last look.

        Plain state is what a module that runs again finds as it was.
        """
        now = non_torch_rng_states()
        for name, state in now.items():
            if self._random.get(name, state) != state:
                yield "random", f"draws random numbers of {name}"
        self._random = now
        if not self._frames:
            return
        frame = self._frames[-1]
        for around in self._frames[:-1]:
            if around.module is not frame.module:
                yield from _changes_of_another(around)
        state, plain = _state_of(frame.module)
        for name in {**frame.state, **state}:
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
    """What the code of a call inside changed of a module that is not put back with it.

    That module's own next look finds it, too.
    """
    outline, title = _outline_of(frame.module), type(frame.module).__name__
    for name in {**frame.outline, **outline}:
        if frame.outline.get(name, _MISSING) != outline.get(name, _MISSING):
            yield "state", f"changes the attribute '{name}' of the {title} around it"
    frame.outline = outline


_MISSING = object()


def non_torch_rng_states() -> dict[str, Any]:
    """Generators that nobody puts back, by what people call them."""
    found: dict[str, Any] = {"Python": hash(random.getstate())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        _, keys, place, *_ = numpy.get_state()
        found["NumPy"] = (hash(keys.tobytes()), place)
    return found


def identity_of(value: Any, depth: int = 0) -> Any:
    """What can be told of a value without holding it."""
    if isinstance(value, torch.Tensor):
        return id(value)  # what is written into it is seen op by op
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
    """What can be told of it, and the names of plain values and containers of them."""
    own = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
    found = {name: identity_of(value) for name, value in own.items()}
    # What is written in place is seen op by op; what is replaced is not.
    buffers = {name: id(value) for name, value in module._buffers.items()}
    return found | buffers, {name for name, value in own.items() if _is_plain(value)}


def _outline_of(module: nn.Module) -> dict[str, Any]:
    """What can be told of it at every look at a call inside: values and their items."""
    own = (item for item in vars(module).items() if item[0] not in _OF_TORCH)
    found = {name: _outlined(value) for name, value in own}
    return found | {name: id(value) for name, value in module._buffers.items()}


def _outlined(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, (list, set, deque, dict)):
        return id(value)
    if len(value) > _MOST_ITEMS:
        return len(value)
    return [id(x) for x in (value.values() if isinstance(value, dict) else value)]


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is put back where a module runs again, and holds no tensor."""
    if isinstance(value, _PLAIN) or source_in(value) is not None:
        return True
    if not isinstance(value, (list, set, deque, dict)):
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    small = depth < _DEEPEST and len(items) <= _MOST_ITEMS
    return small and all(_is_plain(item, depth + 1) for item in items)


@contextmanager
def preserve_rng_state() -> Iterator[Callable[[], None]]:
    """Gives what puts all global generators back, and does so at the end."""
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
