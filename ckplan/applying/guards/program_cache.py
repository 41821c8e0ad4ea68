"""Guarded programs of a region, for later forwards to be checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from ckplan.applying.guards.guarded_program import GuardedProgram

_MAX_PROGRAMS = 32  # of one call: batches padded to some lengths
_MISS_PENALTY, _DYNAMIC_PENALTY = 8, 24
"""A miss adds the first to a key's count, up to the second; a hit subtracts one.

At the second, forwards of the key count as dynamic rather than permanently changed.
"""


class ProgramCache:
    """Guarded programs of a region, by the key that forwards have in common.

    A copy of a model begins with an empty cache.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, GuardedProgram] = {}  # least recently used first
        self._misses: Counter[Hashable] = Counter()
        self._missed_late: set[Hashable] = set()  # keys that missed after ops had run

    def __reduce__(self) -> tuple[type[ProgramCache], tuple[()]]:
        return type(self), ()

    def find(self, key: Hashable) -> GuardedProgram | None:
        """The guarded program that a forward may repeat."""
        program = self._known.pop(key, None)
        if program is not None:
            self._known[key] = program
        return program

    def is_static(self, key: Hashable) -> bool:
        """Whether no forward of this key missed recently."""
        return not self._misses[key]

    def can_guard(self, key: Hashable) -> bool:
        """Whether no forward of this key missed after its ops had run."""
        return key not in self._missed_late

    def learn(self, key: Hashable, program: GuardedProgram | None) -> None:
        """Store the guarded program of a forward."""
        if program is not None and self.can_guard(key):
            while len(self._known) >= _MAX_PROGRAMS:
                del self._known[next(iter(self._known))]
            self._known[key] = program

    def repeat(self, key: Hashable) -> None:
        """Count a forward that passed its guards."""
        if self._misses[key]:
            self._misses[key] -= 1

    def differ(self, key: Hashable, *, late: bool) -> None:
        """Count a forward that missed.

        Later forwards may repeat the new one, such as after parameters are frozen.
        Dynamic forwards keep their program, since their first calls still match.

        Args:
            key: Key of the forward.
            late: Whether it was found too late to drop the rest.
        """
        self._misses[key] = min(self._misses[key] + _MISS_PENALTY, _DYNAMIC_PENALTY)
        if late:
            self._missed_late.add(key)
        if late or self._misses[key] < _DYNAMIC_PENALTY:
            self._known.pop(key, None)
