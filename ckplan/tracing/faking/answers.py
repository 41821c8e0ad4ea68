"""Answers to libraries that ask whether a tensor is fake or a step is traced.

A library may take another path for fake tensors, as ``transformers`` does with masks of
attention. Here it gets the answer of a training step, whenever and however it imported
the question: modules that define one give a substitute to whoever is not torch or
ckplan, and modules that took one before get the substitute in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import _guards
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

_INSIDERS = ("torch", "functorch", "ckplan")
_scopes: list[None] = []  # one for each open scope


class _Substitute(type):
    """Answers ``isinstance(x, FakeTensor)``: never in a scope, as torch after it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return not _scopes and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, kind: type) -> bool:
        return not _scopes and issubclass(kind, FakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class _NoFakeTensor(metaclass=_Substitute):
    """Stands for ``FakeTensor`` in libraries."""


def _always(ask: Callable[..., Any], answer: object) -> Callable[..., Any]:
    @wraps(ask)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return answer if _scopes else ask(*args, **kwargs)

    return asked


_QUESTIONS: tuple[tuple[Any, str, object], ...] = (
    (fake_tensor, "is_fake", False),
    (fake_tensor, "maybe_get_fake_mode", None),
    (_guards, "detect_fake_mode", None),
    (_guards, "active_fake_mode", None),
    (_python_dispatch, "is_in_torch_dispatch_mode", False),
    (_python_dispatch, "is_in_any_mode_without_ignore_compile_internals", False),
    (_python_dispatch, "any_torch_dispatch_mode_on_stack", False),
)
"""Functions that tell that a step is traced: module, name, answer in training.

``torch.compiler.is_compiling``, ``torch.jit.is_tracing`` and their like are not among
them, as fake tensors do not change their answers.
"""


@contextmanager
def answers_of_training() -> Iterator[None]:
    """A scope in which libraries cannot ask whether tensors are fake."""
    by: dict[int, tuple[object, Any]] = {id(FakeTensor): (FakeTensor, _NoFakeTensor)}
    for module, name, answer in _QUESTIONS:
        ask = getattr(module, name, None)
        if ask is not None:
            by[id(ask)] = ask, _always(ask, answer)
    with ExitStack() as stack:
        for module in (torch._subclasses, fake_tensor, _guards, _python_dispatch):
            substitutes = dict(_substitutes(vars(module), by))
            stack.callback(setattr, module, "__class__", type(module))
            module.__class__ = _asked(module, substitutes)
        for module_name, module in list(sys.modules.items()):
            if not _is_insider(module_name):
                names = getattr(module, "__dict__", {})
                for name, substitute in list(_substitutes(names, by)):
                    stack.enter_context(mock.patch.dict(names, {name: substitute}))
        _scopes.append(None)
        stack.callback(_scopes.pop)
        yield


def _substitutes(
    names: Mapping[str, Any], by: Mapping[int, tuple[object, Any]]
) -> Iterator[tuple[str, Any]]:
    for name, value in names.items():
        if id(value) in by:
            yield name, by[id(value)][1]


def _asked(module: ModuleType, substitutes: Mapping[str, Any]) -> type[ModuleType]:
    """A class of a module that gives outsiders the substitutes."""

    class Asked(type(module)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in substitutes and _is_outside(sys._getframe(1)):
                return substitutes[name]
            return super().__getattribute__(name)

    return Asked


def _is_outside(asking: FrameType) -> bool:
    return not _is_insider(asking.f_globals.get("__name__", ""))


def _is_insider(module: str) -> bool:
    return module.partition(".")[0] in _INSIDERS
