"""Compile the arguments of a recorded call into a function that checks later ones.

A function tests what can differ and nothing else: that a tensor is the one that took
this place in the recorded forward, that a number has the recorded type and value.
Layers that are alike share their code.
"""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias
from weakref import ref

import torch

from ckplan.applying.tensors.generated import generate
from ckplan.applying.tensors.numbers import bits_of, is_data
from ckplan.applying.tensors.sharing import PLAIN

_GLOBALS: dict[str, Any] = {"__builtins__": builtins}
_MANY = 16  # numbers in a row that are tested all at once
_NO_WRITES: Mapping[int, int] = {}
_SAME = (bool, type(None), type(...))  # one object for each value


class Guard(Protocol):
    """Guards tensors from outside."""

    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor passes the guard of that number."""


Matcher: TypeAlias = Callable[
    [
        tuple[Any, ...],
        dict[str, Any] | None,
        Sequence[ref[torch.Tensor]],
        Sequence[int],
        Sequence[ref[torch.Tensor]],
        Guard,
    ],
    bool,
]
"""Called with arguments, the tensors that calls returned, the versions that they had
then, those from outside that were met before, and what guards a new one."""


class Matchers:
    """Makes the matchers of a forward's calls, in their order."""

    def __init__(self) -> None:
        self._num_met = 0  # tensors from outside

    def make(
        self, arguments: Sequence[Any], writes: Mapping[int, int] = _NO_WRITES
    ) -> Matcher:
        """Make a matcher of arguments.

        Args:
            arguments: As ``Slots.freeze`` gives them.
            writes: To tensors that calls returned, by number, since then. Others come
                from what no function mode sees, such as ``set_``. What a call does
                itself may differ: under a dispatch mode, ``linear`` adds its bias out
                of place.
        """
        writer = _Writer(iter(arguments), self._num_met, writes)
        lines = writer.write()
        self._num_met = writer.num_met
        return generate(lines, writer.names, _GLOBALS, "<guard>")


@dataclass(slots=True)
class _Writer:
    """Writes the conditions of one call."""

    frozen: Iterator[Any]
    num_met: int
    writes: Mapping[int, int]
    tests: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)

    def write(self) -> list[str]:
        """The lines of a function that checks all arguments."""
        num_args = next(self.frozen)
        names = [f"a{place}" for place in range(num_args)]
        for name in names:
            self._test(name, next(self.frozen))
        self._test_keywords()
        unpacking = f" {', '.join(names)}, = args" if names else " pass"
        return [
            "def matches(args, kwargs, made, versions, met, guard):",
            f" if len(args) != {num_args}: return False",
            unpacking,
            f" try: return {' and '.join(self.tests)}",
            " except RuntimeError: return False",  # of a version: no tensor has it
        ]

    def _test_keywords(self) -> None:
        """Keywords, in their order, then their values."""
        keys = []
        kind = next(self.frozen, None)
        while isinstance(kind, str):
            keys.append(kind)
            kind = next(self.frozen)
        if not keys:
            self.tests.append("not kwargs")
            return
        self.tests.append(f"kwargs and [*kwargs] == {keys!r}")
        for number, key in enumerate(keys):
            self._test(f"kwargs[{key!r}]", next(self.frozen) if number else kind)

    def _test(self, what: str, kind: Any) -> None:
        """Test one argument, of which the kind was read."""
        add = self.tests.append
        if kind is torch.Tensor:
            self._test_tensor(what, next(self.frozen))
        elif kind is slice:
            add(f"type({what}) is {self._name(slice)}")
            for bound in ("start", "stop", "step"):
                self._test(f"{what}.{bound}", next(self.frozen))
        elif kind is dict:
            self._test_dict(what)
        elif kind in (tuple, list, torch.Size):
            self._test_sequence(what, kind)
        elif kind is float:
            self._test_float(what, next(self.frozen))
        elif kind in _SAME:
            add(f"{what} is {next(self.frozen)!r}")
        elif kind is is_data:
            add(f"{self._name(is_data)}({what})")
        elif kind not in PLAIN and not issubclass(kind, enum.Enum):
            bits, same = self._name(bits_of), self._name(next(self.frozen))
            add(f"type({what}) is {self._name(kind)} and {bits}({what}) == {same}")
        else:
            value = next(self.frozen)
            literal = repr(value) if kind in (int, str) else self._name(value)
            add(f"type({what}) is {self._name(kind)} and {what} == {literal}")

    def _test_sequence(self, what: str, kind: type) -> None:
        """Test a sequence; numbers at the start of a long one all at once."""
        length, numbers = next(self.frozen), list[int]()
        self.tests.append(
            f"type({what}) is {self._name(kind)} and len({what}) == {length}"
        )
        for place in range(length):
            inner = next(self.frozen)
            if inner is int and place == len(numbers):
                numbers.append(next(self.frozen))
                continue
            if place == len(numbers):
                self._test_numbers(what, numbers)
            self._test(f"{what}[{place}]", inner)
        if length == len(numbers):
            self._test_numbers(what, numbers)

    def _test_numbers(self, what: str, numbers: list[int]) -> None:
        """Test the first items of a sequence, which are numbers."""
        count = len(numbers)
        if count < _MANY:
            for place, number in enumerate(numbers):
                item = f"{what}[{place}]"
                self.tests.append(
                    f"type({item}) is {self._name(int)} and {item} == {number!r}"
                )
            return
        first, types = f"[*{what}[:{count}]]", self._name({int})
        self.tests.append(
            f"{{*{self._name(map)}({self._name(type)}, {first})}} == {types}"
        )
        self.tests.append(f"{first} == {self._name(numbers)}")

    def _test_dict(self, what: str) -> None:
        length = next(self.frozen)
        keys = self._name([next(self.frozen) for _ in range(length)])
        self.tests.append(f"type({what}) is {self._name(dict)} and [*{what}] == {keys}")
        for place in range(length):
            self._test(f"{what}[{keys}[{place}]]", next(self.frozen))

    def _test_float(self, what: str, number: str) -> None:
        """Test the bits: zeros have signs, and nan is not equal to itself."""
        value = float.fromhex(number)
        same = f"{what} == {value!r}"
        if not value or value != value or value in (float("inf"), float("-inf")):
            same = f"{what}.hex() == {number!r}"
        self.tests.append(f"type({what}) is {self._name(float)} and {same}")

    def _test_tensor(self, what: str, number: int) -> None:
        """Test which tensor it is: of one that is dead, None is not another."""
        if number >= 0:
            self.tests.append(f"made[{number}]() is {what} is not None")
            if number in self.writes:
                since = f" + {self.writes[number]}" if self.writes[number] else ""
                self.tests.append(f"{what}._version == versions[{number}]{since}")
        elif -1 - number < self.num_met:
            self.tests.append(f"met[{-1 - number}]() is {what} is not None")
        else:
            self.tests.append(f"guard.meet({self.num_met}, {what})")
            self.num_met += 1

    def _name(self, value: Any) -> str:
        """A name of a value: functions of the same source share their code."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name
