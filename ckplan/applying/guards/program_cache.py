"""What forwards of a region were seen to do, for later ones to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from ckplan.applying.guards.guards import Template

_MOST_TEMPLATES = 32  # of one call: batches padded to some lengths
_DOUBT, _MUCH_DOUBT = 8, 24
"""Of such a forward, when one was another than expected; each that repeats takes one
away. With much doubt, forwards are taken to vary rather than to have changed for good.
"""


class Templates:
    """What forwards of a region were seen to do, by what those have in common.

    A copy of a model begins without.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Template] = {}  # the one used last is the last
        self._doubt: Counter[Hashable] = Counter()
        self._seen_late: set[Hashable] = set()  # what differed where ops were past

    def __reduce__(self) -> tuple[type[Templates], tuple[()]]:
        return type(self), ()

    def find(self, key: Hashable) -> Template | None:
        """What a forward may do again."""
        template = self._known.pop(key, None)
        if template is not None:
            self._known[key] = template
        return template

    def are_steady(self, key: Hashable) -> bool:
        """Whether no such forward was another one than expected of late."""
        return not self._doubt[key]

    def can_learn(self, key: Hashable) -> bool:
        """Whether such forwards, if they differ, do so where that is seen in time."""
        return key not in self._seen_late

    def learn(self, key: Hashable, template: Template | None) -> None:
        """Know what a forward did."""
        if template is not None and self.can_learn(key):
            while len(self._known) >= _MOST_TEMPLATES:
                del self._known[next(iter(self._known))]
            self._known[key] = template

    def repeat(self, key: Hashable) -> None:
        """A forward was as expected."""
        if self._doubt[key]:
            self._doubt[key] -= 1

    def differ(self, key: Hashable, *, late: bool) -> None:
        """A forward was another one than expected.

        Others may be like it from now on, as after parameters froze. Of those that vary
        something is known all the same: how they begin.

        Args:
            key: What such forwards have in common.
            late: Whether that was seen too late for the rest to be dropped.
        """
        self._doubt[key] = min(self._doubt[key] + _DOUBT, _MUCH_DOUBT)
        if late:
            self._seen_late.add(key)
        if late or self._doubt[key] < _MUCH_DOUBT:
            self._known.pop(key, None)
