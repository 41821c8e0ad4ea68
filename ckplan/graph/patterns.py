"""Patterns of calls, as used in plans and options."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ckplan.errors import PlanError, did_you_mean
from ckplan.graph.fqn import Call, call_name

NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_NUMBER = re.compile(rf"(?<![0-9])({NUMBER})(?![0-9])")
_RANGE = re.compile(rf"\[({NUMBER})\.\.({NUMBER})\]")
_ANY_RANGE = rf"\[{NUMBER}\.\.{NUMBER}\]"
_CALLS = re.compile(rf"((?:[^][#]|{_ANY_RANGE})+)(?:#({NUMBER}|{_ANY_RANGE}))?")
_NEARLY_RANGE = re.compile(rf"\[({NUMBER})[^][0-9]+({NUMBER})\]")
_MOST_CALLS = 1_000_000


def parse_call(text: str) -> tuple[str, int | None]:
    """Read the name of one call: ``FQN#n``, or ``FQN`` where a module runs once.

    Raises:
        PlanError: ``text`` has ranges or is malformed.

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
    return fqn_of(found[1]), int(found[2]) if found[2] else None


def expand_calls(pattern: str, calls: Iterable[Call]) -> tuple[Call, ...]:
    """Return the calls that a pattern matches.

    Args:
        pattern: ``FQN`` or ``FQN#n``, with ``[a..b]`` in place of any number.
        calls: Every call of the model, in any order.

    Returns:
        Some of ``calls``, at least one, in their order.

    Raises:
        PlanError: ``pattern`` is malformed, or matches a call that does not exist.

    >>> expand_calls("h.[0..1]", [("h.0", 0), ("h.1", 0), ("head", 0)])
    (('h.0', 0), ('h.1', 0))
    """
    return _expand(pattern, tuple(calls), _NOT_RUN)


def _expand(
    pattern: str, calls: Sequence[Call], wording: tuple[str, str, str]
) -> tuple[Call, ...]:
    """The calls that a pattern matches; ``wording`` is the error for no module."""
    numbers_of = defaultdict[str, set[int]](set)
    for fqn, number in calls:
        numbers_of[fqn].add(number)
    found = _parse_calls(pattern)
    wanted: set[Call] = set()
    for name in _expand_ranges(found[1]):
        fqn = fqn_of(name)
        if fqn not in numbers_of:
            raise _no_module(pattern, name, numbers_of, wording)
        for number in (
            map(int, _expand_ranges(found[2])) if found[2] else numbers_of[fqn]
        ):
            if number not in numbers_of[fqn]:
                raise _no_call(pattern, fqn, number, numbers_of[fqn])
            wanted.add((fqn, number))
    return tuple(call for call in calls if call in wanted)


def expand_modules(
    pattern: str, fqns: Iterable[str]
) -> tuple[tuple[str, frozenset[int] | None], ...]:
    """Return the modules and call numbers of a pattern, before any module has run.

    Args:
        pattern: As for `expand_calls`.
        fqns: Every module of the model.

    Returns:
        (FQN, numbers of its calls) of every module; None for every call.

    Raises:
        PlanError: ``pattern`` is malformed, or matches a module that does not exist.

    >>> expand_modules("cell#[0..1]", ["cell", "head"])
    (('cell', frozenset({0, 1})),)
    """
    found = _parse_calls(pattern)
    numbers = (
        frozenset(map(int, _call_numbers(pattern, found[2]))) if found[2] else None
    )
    calls = _expand(found[1], [(fqn, 0) for fqn in fqns], _NOT_THERE)
    return tuple((fqn, numbers) for fqn, _ in calls)


def _call_numbers(pattern: str, numbers: str) -> Iterator[str]:
    """The numbers that ``#n`` or ``#[a..b]`` stands for, at most ``_MOST_CALLS``."""
    ends = _RANGE.fullmatch(numbers)
    if ends and int(ends[2]) - int(ends[1]) >= _MOST_CALLS:
        raise PlanError(
            f"cannot read the calls {pattern!r}: they are more than {_MOST_CALLS}",
            needed="as many calls as one module may have",
            hint="leave out '#' and what follows to mean every call of a module",
        )
    return _expand_ranges(numbers)


def _parse_calls(pattern: str) -> re.Match[str]:
    found = _CALLS.fullmatch(pattern)
    if not found or any(int(a) > int(b) for a, b in _RANGE.findall(pattern)):
        raise _malformed(pattern)
    return found


def fold_calls(chosen: Sequence[Call], calls: Sequence[Call]) -> tuple[str, ...]:
    """Return a few patterns that together match exactly the chosen calls.

    A module needs no call number if all its calls are chosen. Consecutive numbers are
    then folded into ranges, one place at a time, the last place first.

    Args:
        chosen: Some of ``calls``, in any order.
        calls: Every call of the model.

    Returns:
        Patterns that share no call. They do not depend on the order of ``chosen``.

    Raises:
        PlanError: A call is not one of ``calls``, or no pattern can match it.

    >>> fold_calls([("h.0", 0), ("h.1", 0)], [("h.0", 0), ("h.1", 0), ("h.2", 0)])
    ('h.[0..1]',)
    """
    wanted = set(chosen)
    for call in sorted(wanted.difference(calls)):
        expand_calls(call_name(*call), calls)  # raises, with a suggestion
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


def fqn_of(name: str) -> str:
    """Return the FQN of a name in a pattern: "" for ``.``, the root module."""
    return "" if name == "." else name


def _expand_ranges(text: str) -> Iterator[str]:
    """Yield every text that a text with ranges stands for."""
    found = _RANGE.search(text)
    if not found:
        yield text
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from _expand_ranges(
            f"{text[: found.start()]}{number}{text[found.end() :]}"
        )


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
            folded.extend((*before, run, *after) for run in _ranges(numbers))
        else:
            folded.append(after)
    return folded


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
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
    pattern: str, name: str, fqns: Iterable[str], wording: tuple[str, str, str]
) -> PlanError:
    names = [fqn or "." for fqn in fqns]
    shape = _NUMBER.sub("", name.replace("*", ""))  # as other tools write patterns
    alike = _fold(near for near in names if _NUMBER.sub("", near) == shape)
    near = did_you_mean(name, alike) or next(iter(alike), None)
    if near is None and _RANGE.search(pattern):
        near = did_you_mean(pattern, _fold(dict.fromkeys(names)))
    near = near or did_you_mean(name, names)
    found, needed, hint = wording
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
