"""Guarded programs of a region, for later forwards to be checked against."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from weakref import ref

from ckplan.applying.guards.guarded_program import GuardedProgram
from ckplan.applying.recording.saved_tensors import Handle

_MAX_KINDS = 32  # of forwards of one call: batches padded to some lengths
_MISS_PENALTY, _DYNAMIC_PENALTY = 8, 24
"""A miss adds the first to a kind's count, up to the second; a hit subtracts one.

At the second, forwards of the kind count as dynamic rather than permanently changed.
"""


@dataclass(slots=True, eq=False)
class ForwardKind:
    """Forwards of a region that have a key in common."""

    program: GuardedProgram | None = None  # that the next one may repeat
    misses: int = 0
    missed_late: bool = False  # one missed after its ops had run

    @property
    def is_static(self) -> bool:
        """Whether none missed recently."""
        return not self.misses

    def learn(self, program: GuardedProgram | None) -> None:
        """Store the guarded program of a forward."""
        if program is not None and not self.missed_late:
            self.program = program

    def repeat(self) -> None:
        """Count a forward that passed its guards."""
        if self.misses:
            self.misses -= 1

    def differ(self, *, late: bool) -> None:
        """Count a forward that missed.

        Later forwards may repeat the new one, such as after parameters are frozen.
        Dynamic forwards keep their program, since their first calls still match.

        Args:
            late: Whether it was found too late to drop the rest.
        """
        self.misses = min(self.misses + _MISS_PENALTY, _DYNAMIC_PENALTY)
        self.missed_late |= late
        if late or self.misses < _DYNAMIC_PENALTY:
            self.program = None


class ProgramCache:
    """The kinds of forwards of a region, by the key that forwards have in common.

    A copy of a model begins with an empty cache.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, ForwardKind] = {}  # least recently used first
        self._last: tuple[Hashable, ForwardKind] = None, ForwardKind()
        # Forwards that wait for backward and hold what the next one may write.
        self._waiting: list[ref[Handle]] = []

    def __reduce__(self) -> tuple[type[ProgramCache], tuple[()]]:
        return type(self), ()

    def wait(self, handle: Handle) -> None:
        """Note a forward that is over: it waits for backward."""
        if handle.rebuilder is not None and handle.rebuilder.holds_written:
            self._waiting.append(ref(handle))

    def keep_written(self) -> None:
        """Let forwards that wait for backward keep what the next one may write."""
        for one in self._waiting:
            handle = one()
            if handle is not None and handle.rebuilder is not None:
                handle.rebuilder.keep_written()
        self._waiting.clear()

    def find(self, key: Hashable) -> ForwardKind:
        """The kind of a forward."""
        if key == self._last[0]:
            return self._last[1]
        kind = self._kinds.pop(key, None) or ForwardKind()
        while len(self._kinds) >= _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[key] = kind
        self._last = key, kind
        return kind
