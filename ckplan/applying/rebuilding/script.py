"""Straight-line Python for a part of a recompute program.

What the interpreter of a program would look up at every step is decided once, here:
which values are read, copied, kept and freed, and where an op takes another view of a
value than the one that is there. ``torch.fx`` makes code of its graphs in this way.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Final, TypeAlias

import torch

from ckplan.applying.moving.mover import decode
from ckplan.applying.rebuilding.step import Step
from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.generated import generate
from ckplan.applying.tensors.retained import (
    Place,
    Ref,
    Retained,
    copy_of,
    place_of,
    tensors_in,
    view_of,
)
from ckplan.simulating.program import Flow

_INLINE = (int, bool, str, type(None))


class _RetainedKind:
    """Kind of a value that the region retains: checked at every read."""


RETAINED: Final = _RetainedKind()

Kind: TypeAlias = Place | _RetainedKind | None
"""What is known of a tensor that is there: its place in the storage, if anything."""

Code: TypeAlias = Callable[..., torch.Tensor]
"""Called with values, encoded values, random states, a function that sets one, and the
name of the region in errors."""


@dataclass(slots=True)
class Script:
    """The lines of one function, written action by action.

    Values are numbered across nested regions: those of the ``n``-th begin at ``n``
    times the number of values.
    """

    flow: Flow
    steps: Mapping[int, Step]
    drawn: Collection[int]  # steps whose random state the forward kept
    default_dtype: torch.dtype  # at the beginning and end of every function
    runs: dict[int, int]  # step -> how often it is still to run
    kinds: dict[int, Kind]  # of the values that are there
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)  # what the code refers to
    computes: bool = False  # whether the function runs ops, beside views
    _loaded: set[int] = field(default_factory=set)  # values in local variables
    _stored: set[int] = field(default_factory=set)  # values that were there before
    _grad_mode: bool | None = None
    _dtype: torch.dtype | None = None  # the default that is set now

    def begin(self) -> None:
        """Begin a function; the values that are there are in its first argument."""
        self.lines, self.names, self._grad_mode = [], {}, None
        self.computes, self._dtype = False, self.default_dtype
        self._loaded, self._stored = set(), set(self.kinds)

    def run(
        self, base: int, step: int, copies: Collection[int], keep: Collection[int]
    ) -> None:
        """Rerun a step in the nested region whose values begin at ``base``."""
        op, self.computes = self.steps[step], True
        there = {value: self._load(base + value) for value in self.flow.inputs[step]}
        for value in copies:
            tensor, there[value] = there[value], f"y{base + value}"
            retained = self.kinds[base + value] is RETAINED
            copy = f"copied({tensor}, region)" if retained else f"copy_of({tensor})"
            self._add(f"{there[value]} = {copy}")
        args = [self._argument(base, argument, there) for argument in op.args]
        kwargs = {
            key: self._argument(base, value, there) for key, value in op.kwargs.items()
        }
        self._draw_again(step)
        if self._grad_mode is not op.in_grad_mode:
            self._grad_mode = op.in_grad_mode
            self._add(f"set_grad_enabled({op.in_grad_mode})")
        self._set_default_dtype(op.default_dtype)
        function = getattr(op.func, "_op", op.func)  # saves a Python frame
        call = (
            f"{self._constant(function)}({', '.join([*args, *_as_keywords(kwargs)])})"
        )
        made = self._outputs(base, step, keep)
        if not made:
            self._add(call)
        elif not op.depth:
            self._add(f"x{made[0][1]} = {call}")
        else:
            self._add(f"o = {call}" if op.depth == 1 else f"o = tensors_in({call})")
            for place, key in made:
                self._add(f"x{key} = o[{place}]")
            self._add("del o")
        for place, key in made:
            self._make(key, op.returned[place].place)
        self._overwrite(base, step, there, copies, keep)

    def _outputs(
        self, base: int, step: int, keep: Collection[int]
    ) -> list[tuple[int, int]]:
        """Place and key of the outputs to keep; of one storage, the first."""
        made: dict[int, int] = {}
        overwritten = self.flow.overwrites[step].values()
        for place, value in enumerate(self.flow.returned[step]):
            if value in keep and value not in overwritten:
                made.setdefault(base + value, place)
        return [(place, key) for key, place in made.items()]

    def _overwrite(
        self,
        base: int,
        step: int,
        there: Mapping[int, str],
        copies: Collection[int],
        keep: Collection[int],
    ) -> None:
        """Name the values that a step made in place."""
        for old, new in self.flow.overwrites[step].items():
            if new in keep:
                kind, tensor = self.kinds[base + old], there[old]
                if kind is RETAINED:
                    kind, tensor = None, f"{tensor}.tensor"
                self._add(f"x{base + new} = {tensor}")
                self._make(base + new, kind)
        if copies:
            self._add("del " + ", ".join(there[value] for value in copies))

    def decode(self, key: int, value: int) -> None:
        """Decode a value and free its encoded form."""
        self.computes = True
        self._add(f"x{key} = decode(encoded.pop({value}))")
        self._make(key, None)

    def fetch(self, key: int, source: int) -> None:
        """Take a value from the outer region."""
        self._add(f"x{key} = {self._load(source)}")
        self._make(key, self.kinds[source])

    def free(self, key: int) -> None:
        """Free a value."""
        if self.kinds.pop(key, _ABSENT) is _ABSENT:
            return
        if key in self._loaded:
            self._loaded.remove(key)
            self._add(f"del x{key}")
        if key in self._stored:
            self._stored.remove(key)
            self._add(f"del values[{key}]")

    def take(self, key: int, place: Place) -> None:
        """Make the function's result: a view of a value."""
        if self._grad_mode:
            self._add("set_grad_enabled(False)")
        self._set_default_dtype(self.default_dtype)
        self._load(key)
        self._add(f"r = {self._view(key, f'x{key}', place)}")

    def end(self) -> Code:
        """End the function: store what is to stay, and return the result."""
        for key in sorted(self._loaded - self._stored):
            self._add(f"values[{key}] = x{key}")
        lines = ["def burst(values, encoded, states, draw, region):"]
        lines += [f" {line}" for line in (*self.lines, "return r")]
        return generate(lines, self.names, _GLOBALS, "<recompute program>")

    def _add(self, line: str) -> None:
        self.lines.append(line)

    def _set_default_dtype(self, dtype: torch.dtype) -> None:
        if dtype is not self._dtype:
            self._dtype = dtype
            self._add(f"set_default_dtype({self._constant(dtype)})")

    def _make(self, key: int, kind: Kind) -> None:
        self._loaded.add(key)
        self.kinds[key] = kind

    def _load(self, key: int) -> str:
        """The local variable of a value that is there."""
        if key not in self._loaded:
            self._loaded.add(key)
            self._add(f"x{key} = values[{key}]")
        return f"x{key}"

    def _draw_again(self, step: int) -> None:
        """Set the random state that a step had in forward; the last use frees it."""
        self.runs[step] -= 1
        if step in self.drawn:
            last = not self.runs[step]
            state = f"states.pop({step})" if last else f"states[{step}]"
            op = self.steps[step]
            device = self._constant(op.device)
            self._add(f"draw({device}, {self._constant(op.generator)}, {state})")

    def _argument(self, base: int, argument: Any, there: Mapping[int, str]) -> str:
        kind = type(argument)
        if kind is Ref:
            key = base + argument.value
            return self._view(key, there[argument.value], argument.place)
        if kind is list:
            items = (self._argument(base, item, there) for item in argument)
            return f"[{', '.join(items)}]"
        return repr(argument) if kind in _INLINE else self._constant(argument)

    def _view(self, key: int, tensor: str, place: Place) -> str:
        """The view that an op had of a value."""
        kind = self.kinds[key]
        if kind is RETAINED:
            return f"view_of_retained({tensor}, {self._constant(place)}, region)"
        if not isinstance(kind, Place) or not place.is_strided_from(kind):
            return f"view_of({tensor}, {self._constant(place)})"
        if place == kind:
            return tensor
        return f"{tensor}.as_strided({', '.join(map(self._constant, place[:3]))})"

    def _constant(self, value: Any) -> str:
        """A name of a value: functions of the same source share their code."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name


_ABSENT = object()


def _as_keywords(kwargs: Mapping[str, str]) -> list[str]:
    if any(iskeyword(key) for key in kwargs):
        items = ", ".join(f"{key!r}: {value}" for key, value in kwargs.items())
        return [f"**{{{items}}}"]
    return [f"{key}={value}" for key, value in kwargs.items()]


def _copied(retained: Retained, region: str) -> Retained:
    retained.moved(region)
    copy = copy_of(retained.tensor)
    offset = retained.place.offset  # what was moved since then is so in the copy
    return Retained(copy, version_of(copy), place_of(copy)._replace(offset=offset))


def _view_of_retained(retained: Retained, place: Place, region: str) -> torch.Tensor:
    """A view of a tensor that may have been moved, but not changed, since forward."""
    moved = retained.moved(region)
    if place == retained.place and not moved:
        return retained.tensor  # as most parameters are taken
    if place.is_strided_from(retained.place):
        return retained.tensor.as_strided(
            place.size, place.stride, place.offset + moved
        )
    return view_of(retained.tensor, place._replace(offset=place.offset + moved))


_GLOBALS: Final[dict[str, Any]] = {
    "__builtins__": builtins,
    "copied": _copied,
    "copy_of": copy_of,
    "decode": decode,
    "set_default_dtype": torch._C._set_default_dtype,
    "set_grad_enabled": torch._C._set_grad_enabled,
    "tensors_in": tensors_in,
    "view_of": view_of,
    "view_of_retained": _view_of_retained,
}
