"""The replays of one graph, by what forward saves. Each is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckplan.compiling.lowering import Lowered
from ckplan.compiling.partition import Saved
from ckplan.compiling.replay import Replayed, replay, replay_known
from ckplan.compiling.side_by_side import most_at_once, side_by_side


@dataclass
class Replays:
    """Replays of one graph's code.

    Code that is only replayed may be generated quickly. It nearly always takes the
    bytes of the code that runs; ``is_real`` finds out.
    """

    num_outputs: int  # of forward
    lower: Callable[[Saved, bool], Lowered]  # generates code, quickly if it is told so
    changed: Callable[[], None]  # called with every replay
    quick: bool
    found: dict[Saved, Replayed]
    real: dict[Saved, Replayed]  # of code that is, or would be, compiled
    trusted: frozenset[Saved] = frozenset()  # found by an earlier process, of such code

    def of(self, saved: Saved) -> Replayed:
        """The replayed step with the given values saved."""
        if saved not in self.found:
            self._learn(saved, replay(self._lowered(saved), self.num_outputs))
        return self.found[saved]

    def known(self, saved: Saved) -> Replayed | None:
        """What was replayed with the given values saved."""
        return self.found.get(saved)

    def of_first(self, some: Sequence[Saved]) -> Replayed:
        """The first of several, and meanwhile others, if that can be."""
        if some[0] not in self.found:
            first, *others = (one for one in some if one not in self.found)
            others = others[: most_at_once() - 1]
            found = side_by_side(self._quickly_known, others, lambda: self.of(first))
            for saved, replayed in zip(others, found, strict=True):
                if replayed is not None:
                    self._learn(saved, replayed)
        return self.of(some[0])

    def is_real(self, saved: Saved, lowered: Lowered | None = None) -> bool:
        """Whether the code that runs takes what was replayed; if not, forget the rest.

        Args:
            saved: What forward saves.
            lowered: The code that runs; None: it is generated, if it never was.
        """
        if saved in self.real or (lowered is None and saved in self.trusted):
            return True
        lowered = lowered or self.lower(saved, False)
        found = self.real[saved] = replay(lowered, self.num_outputs)
        is_so = self.found.setdefault(saved, found) == found
        if not is_so:
            self.quick, self.trusted = False, frozenset()
            self.found = dict(self.real)
        self.changed()
        return is_so

    def _learn(self, saved: Saved, replayed: Replayed) -> None:
        self.found[saved] = replayed
        if not self.quick:
            self.real[saved] = replayed
        self.changed()

    def _quickly_known(self, saved: Saved) -> Replayed | None:
        """A replay; None where that would have to measure kernels first."""
        return replay_known(self._lowered(saved), self.num_outputs)

    def _lowered(self, saved: Saved) -> Lowered:
        return self.lower(saved, self.quick)
