"""The name language of plans: calls, ranges of calls, and ops inside a region.

==========================  =====================================================
``encoder.cell#3``          the fourth call of one module
``encoder.cell``            every call of it
``encoder.cell#[3..7]``     five calls of it
``transformer.h.[0..11]``   every call of twelve modules
``.``                       the root module, whose FQN is empty
``attn/addmm#1@0``          in a region: the first output of the second ``addmm``
                            that the code of ``attn`` runs there
==========================  =====================================================
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import TypeAlias

from ckplan.errors import PlanError, did_you_mean

Call: TypeAlias = tuple[str, int]  # a module's FQN, and how often it ran before

_N = r"(?:0|[1-9][0-9]{0,8})"
_NUMBER = re.compile(rf"(?<![0-9])({_N})(?![0-9])")
_RANGE = re.compile(rf"\[({_N})\.\.({_N})\]")
_ANY_RANGE = rf"\[{_N}\.\.{_N}\]"
_CALLS = re.compile(rf"((?:[^][#]|{_ANY_RANGE})+)(?:#({_N}|{_ANY_RANGE}))?")
_NEARLY_RANGE = re.compile(rf"\[({_N})[^][0-9]+({_N})\]")
_MOST_CALLS = 1_000_000
_OP_NAME = r"[^/#@\s]+"
_OP = re.compile(rf"(.+)/({_OP_NAME})(?:#({_N}))?(?:@({_N}))?")


def call_name(fqn: str, number: int) -> str:
    """Return the pattern that means one call.

    >>> call_name("encoder.cell", 3), call_name("", 0)
    ('encoder.cell#3', '.#0')
    """
    return f"{fqn or '.'}#{number}"


def parse_call(text: str) -> tuple[str, int | None]:
    """Read the name of one call: ``FQN#n``, or ``FQN`` where a module runs once.

    Raises:
        PlanError: It has ranges, or is malformed.

    >>> parse_call("encoder.cell#3"), parse_call(".")
    (('encoder.cell', 3), ('', None))
    """
    found = _CALLS.fullmatch(text)
    if not found or _RANGE.search(text):
        raise PlanError(
            f"cannot read the call {text!r}",
            needed="one call: FQN, or FQN#n for a module that runs several times",
            hint="run: [transformer.h.0, transformer.h.3]",
        )
    return _fqn(found[1]), int(found[2]) if found[2] else None


def relative_path(fqn: str, top: str) -> str:
    """Return the path of a module below another, "" for that one itself.

    A module that is not below it keeps its FQN.

    >>> relative_path("h.0.mlp", "h.0"), relative_path("h.0", "h.0")
    ('mlp', '')
    """
    if fqn == top:
        return ""
    return fqn.removeprefix(f"{top}.") if top else fqn


def is_around(outer: str, inner: str) -> bool:
    """Return whether a module, by its FQN, is another one or lies around it.

    >>> is_around("h.1", "h.1.mlp"), is_around("", "h.1"), is_around("h.1", "h.10")
    (True, True, False)
    """
    return not outer or f"{inner}.".startswith(f"{outer}.")


def expand_calls(pattern: str, calls: Iterable[Call]) -> tuple[Call, ...]:
    """Return the calls that a pattern means.

    Args:
        pattern: ``FQN`` or ``FQN#n``, with ``[a..b]`` in place of any number.
        calls: Every call of the model, in any order.

    Returns:
        Some of ``calls``, at least one, in their order.

    Raises:
        PlanError: ``pattern`` is malformed, or it means a call that is not there.

    >>> expand_calls("h.[0..1]", [("h.0", 0), ("h.1", 0), ("head", 0)])
    (('h.0', 0), ('h.1', 0))
    """
    return _expand(pattern, tuple(calls), _NOT_RUN)


def _expand(
    pattern: str, calls: Sequence[Call], missing: tuple[str, str, str]
) -> tuple[Call, ...]:
    """The calls that a pattern means; else an error that words what is missing."""
    numbers_of = defaultdict[str, set[int]](set)
    for fqn, number in calls:
        numbers_of[fqn].add(number)
    found = _parse_calls(pattern)
    wanted: set[Call] = set()
    for name in _spell(found[1]):
        fqn = _fqn(name)
        if fqn not in numbers_of:
            raise _no_module(pattern, name, numbers_of, missing)
        for number in map(int, _spell(found[2])) if found[2] else numbers_of[fqn]:
            if number not in numbers_of[fqn]:
                raise _no_call(pattern, fqn, number, numbers_of[fqn])
            wanted.add((fqn, number))
    return tuple(call for call in calls if call in wanted)


def expand_modules(
    pattern: str, fqns: Iterable[str]
) -> tuple[tuple[str, frozenset[int] | None], ...]:
    """Return what a pattern means before any module has run.

    Args:
        pattern: As for `expand_calls`.
        fqns: Every module of the model.

    Returns:
        The FQNs that it means, each with the numbers of its calls; None for every call.

    Raises:
        PlanError: ``pattern`` is malformed, or it means a module that is not there.

    >>> expand_modules("cell#[0..1]", ["cell", "head"])
    (('cell', frozenset({0, 1})),)
    """
    found = _parse_calls(pattern)
    numbers = frozenset(map(int, _few(pattern, found[2]))) if found[2] else None
    calls = _expand(found[1], [(fqn, 0) for fqn in fqns], _NOT_THERE)
    return tuple((fqn, numbers) for fqn, _ in calls)


def _few(pattern: str, numbers: str) -> Iterator[str]:
    """Numbers of calls, as many as a module may have."""
    ends = _RANGE.fullmatch(numbers)
    if ends and int(ends[2]) - int(ends[1]) >= _MOST_CALLS:
        raise PlanError(
            f"cannot read the calls {pattern!r}: they are more than {_MOST_CALLS}",
            needed="as many calls as one module may have",
            hint="leave out '#' and what follows to mean every call of a module",
        )
    return _spell(numbers)


def _parse_calls(pattern: str) -> re.Match[str]:
    found = _CALLS.fullmatch(pattern)
    if not found or any(int(a) > int(b) for a, b in _RANGE.findall(pattern)):
        raise _malformed(pattern)
    return found


def fold_calls(chosen: Sequence[Call], calls: Sequence[Call]) -> tuple[str, ...]:
    """Return a few patterns that together mean exactly the calls chosen.

    A module of which all calls are chosen needs no number. Then consecutive numbers
    are folded into ranges, one place at a time, the last place first.

    Args:
        chosen: Some of ``calls``, in any order.
        calls: Every call of the model.

    Returns:
        Patterns that share no call; the same ones for any order of ``chosen``.

    Raises:
        PlanError: A call is not one of ``calls``, or no pattern can name it.

    >>> fold_calls([("h.0", 0), ("h.1", 0)], [("h.0", 0), ("h.1", 0), ("h.2", 0)])
    ('h.[0..1]',)
    """
    wanted = set(chosen)
    for call in sorted(wanted.difference(calls)):
        expand_calls(call_name(*call), calls)  # raises, with what is near
    for fqn, _ in sorted(wanted):
        if not set(fqn).isdisjoint("#[]"):
            raise _unnameable(fqn)
    partly = {fqn for fqn, number in calls if (fqn, number) not in wanted}
    names = (
        call_name(fqn, number) if fqn in partly else fqn or "."
        for fqn, number in calls
        if (fqn, number) in wanted
    )
    return _fold(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class OpName:
    """An op of a region, or one of its outputs, by owner and occurrence.

    >>> OpName.parse("mlp.c_fc/addmm#1")
    OpName(path='mlp.c_fc', name='addmm', occurrence=1, output=None)
    >>> str(OpName("", "mul"))
    './mul'
    """

    path: str  # FQN below the region of the module that runs it; "" for its own code
    name: str  # aten name, such as "addmm"
    occurrence: int = 0  # how often `path` ran this op before, in the region
    output: int | None = None  # which output; None for all of them

    def __post_init__(self) -> None:
        """Take ``.`` for the region's own code, as plans write it."""
        object.__setattr__(self, "path", _fqn(self.path))

    @classmethod
    def parse(cls, text: str) -> OpName:
        """Read ``PATH/NAME``, ``PATH/NAME#k``, ``PATH/NAME@m`` or ``PATH/NAME#k@m``.

        Raises:
            PlanError: ``text`` is none of these.
        """
        found = _OP.fullmatch(text)
        if not found:
            raise PlanError(
                f"cannot read the op {text!r}",
                needed="PATH/NAME#k@m, where '#k' and '@m' may be left out",
                hint="mlp.c_fc/addmm, or ./addmm for the region's own code",
            )
        path, name, occurrence, output = found.groups()
        return cls(path, name, int(occurrence or 0), int(output) if output else None)

    def __str__(self) -> str:
        """Return the name as plans write it."""
        occurrence = f"#{self.occurrence}" if self.occurrence else ""
        output = "" if self.output is None else f"@{self.output}"
        return f"{self.path or '.'}/{self.name}{occurrence}{output}"


def is_op_name(text: str) -> bool:
    """Whether plans can say it of an op."""
    return re.fullmatch(_OP_NAME, text) is not None


class OpCounter:
    """Names the ops of one region while they run.

    >>> ops = OpCounter()
    >>> [str(ops.name("mlp", "addmm")) for _ in range(2)]
    ['mlp/addmm', 'mlp/addmm#1']
    """

    def __init__(self) -> None:
        """Start where no op has run."""
        self._occurrences = defaultdict[OpName, Iterator[int]](count)

    def name(self, path: str, aten_name: str) -> OpName:
        """Return the name of the op that runs now.

        Args:
            path: FQN below the region of the module that runs it, "" for its own code.
            aten_name: Which op it is.
        """
        op = OpName(path, aten_name)
        return replace(op, occurrence=next(self._occurrences[op]))


def _fqn(name: str) -> str:
    return "" if name == "." else name


def _spell(text: str) -> Iterator[str]:
    """Yield every text that one with ranges stands for."""
    found = _RANGE.search(text)
    if not found:
        yield text
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from _spell(f"{text[: found.start()]}{number}{text[found.end() :]}")


def _fold(names: Iterable[str]) -> tuple[str, ...]:
    """Fold the numbers of distinct names into ranges."""
    split = [tuple(_NUMBER.split(name)) for name in names]  # the numbers at -2, -4, ...
    for place in range(2, max(map(len, split), default=0), 2):
        split = _fold_place(split, place)
    return tuple(map("".join, split))


def _fold_place(names: Iterable[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Fold names that differ only in their number at one place from the end."""
    numbers_of = defaultdict[tuple[tuple[str, ...], tuple[str, ...]], list[int]](list)
    for name in names:
        numbers = numbers_of[name[:-place], name[1 - place :]]
        if len(name) > place:  # else it has no number there: it is all of `after`
            numbers.append(int(name[-place]))
    folded: list[tuple[str, ...]] = []
    for (before, after), numbers in numbers_of.items():
        if numbers:
            folded.extend((*before, run, *after) for run in _runs(numbers))
        else:
            folded.append(after)
    return folded


def _runs(numbers: Iterable[int]) -> Iterator[str]:
    """Yield ranges and single numbers: 1, 2, 3 and 7 are ``[1..3]`` and ``7``."""
    in_order = enumerate(sorted(numbers))
    for _, run in groupby(in_order, lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        yield f"[{first}..{rest[-1]}]" if rest else str(first)


def _malformed(pattern: str) -> PlanError:
    def straighten(found: re.Match[str]) -> str:
        low, high = sorted(map(int, found.groups()))
        return f"[{low}..{high}]"

    near = _NEARLY_RANGE.sub(straighten, pattern)
    return PlanError(
        f"cannot read the calls {pattern!r}",
        needed="FQN or FQN#n, with [a..b], a <= b, for any number; '.' is the root",
        hint=f"did you mean {near!r}?" if _CALLS.fullmatch(near) else "cell#[0..15]",
    )


_NOT_RUN = (
    "no module {} ran",
    "a module whose forward ran in the profiled step",
    "`ckplan show TRACE` lists them",
)
_NOT_THERE = (
    "the model has no module {}",
    "a module of this model, as model.named_modules() lists them",
    "a plan for this model: ckplan profile, ckplan solve",
)


def _no_module(
    pattern: str, name: str, fqns: Iterable[str], missing: tuple[str, str, str]
) -> PlanError:
    names = [fqn or "." for fqn in fqns]
    shape = _NUMBER.sub("", name)
    alike = _fold(near for near in names if _NUMBER.sub("", near) == shape)
    near = did_you_mean(name, alike) or next(iter(alike), None)
    if near is None and _RANGE.search(pattern):
        near = did_you_mean(pattern, _fold(dict.fromkeys(names)))
    near = near or did_you_mean(name, names)
    found, needed, hint = missing
    return PlanError(
        f"cannot find the calls {pattern!r}: {found.format(repr(name))}",
        needed=needed,
        hint=f"did you mean {near!r}?" if near else hint,
    )


def _unnameable(fqn: str) -> PlanError:
    return PlanError(
        f"cannot name the calls of module {fqn!r} in a plan",
        needed="a module name without '#', '[' and ']'",
        hint="rename the module, or keep its activations",
    )


def _no_call(pattern: str, fqn: str, number: int, numbers: Iterable[int]) -> PlanError:
    there = _fold(call_name(fqn, number) for number in sorted(numbers))
    return PlanError(
        f"cannot find the calls {pattern!r}: there is no {call_name(fqn, number)}",
        needed=", ".join(there),
        hint=f"{fqn or '.'} for every call of this module",
    )
