"""What forwards of a region were seen to do, for later ones to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from ckplan.applying.guards.guarded_program import GuardedProgram

_MAX_PROGRAMS = 32  # of one call: batches padded to some lengths
_MISS_PENALTY, _DYNAMIC_PENALTY = 8, 24
"""Of such a forward, when one was another than expected; each that repeats takes one
away. With much doubt, forwards are taken to vary rather than to have changed for good.
"""


class ProgramCache:
    """What forwards of a region were seen to do, by what those have in common.

    A copy of a model begins without.
    """

    def __init__(self) -> None:
        self._known: dict[
            Hashable, GuardedProgram
        ] = {}  # the one used last is the last
        self._misses: Counter[Hashable] = Counter()
        self._missed_late: set[Hashable] = set()  # what differed where ops were past

    def __reduce__(self) -> tuple[type[ProgramCache], tuple[()]]:
        return type(self), ()

    def find(self, key: Hashable) -> GuardedProgram | None:
        """What a forward may do again."""
        program = self._known.pop(key, None)
        if program is not None:
            self._known[key] = program
        return program

    def is_static(self, key: Hashable) -> bool:
        """Whether no such forward was another one than expected of late."""
        return not self._misses[key]

    def can_guard(self, key: Hashable) -> bool:
        """Whether such forwards, if they differ, do so where that is seen in time."""
        return key not in self._missed_late

    def learn(self, key: Hashable, program: GuardedProgram | None) -> None:
        """Know what a forward did."""
        if program is not None and self.can_guard(key):
            while len(self._known) >= _MAX_PROGRAMS:
                del self._known[next(iter(self._known))]
            self._known[key] = program

    def repeat(self, key: Hashable) -> None:
        """A forward was as expected."""
        if self._misses[key]:
            self._misses[key] -= 1

    def differ(self, key: Hashable, *, late: bool) -> None:
        """A forward was another one than expected.

        Others may be like it from now on, as after parameters froze. Of those that vary
        something is known all the same: how they begin.

        Args:
            key: What such forwards have in common.
            late: Whether that was seen too late for the rest to be dropped.
        """
        self._misses[key] = min(self._misses[key] + _MISS_PENALTY, _DYNAMIC_PENALTY)
        if late:
            self._missed_late.add(key)
        if late or self._misses[key] < _DYNAMIC_PENALTY:
            self._known.pop(key, None)
