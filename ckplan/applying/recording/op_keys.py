"""Names of a region's ops in a plan, and the values that the plan keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckplan.graph.fqn import relative_path
from ckplan.plan.names import OpName

OpKey = tuple[str, str, int]
"""Path of the module below the region, op name, occurrence."""


def key_of(op: OpName) -> OpKey:
    """The key of an op, without the output."""
    return op.path, op.name, op.occurrence


Saves = Mapping[OpKey, frozenset[int] | None]
"""Outputs to keep; None for all of them."""

Encodes = Mapping[OpKey, Mapping[int | None, str]]
"""Outputs to encode or move, with their forms."""


@dataclass(slots=True)
class Names:
    """Names of the ops below a module."""

    top: str  # FQN of the module
    saves: Saves
    # Of every op that the plan names: the last output that it names, or -1 for all.
    named: Mapping[OpKey, int]
    found: set[OpKey] = field(default_factory=set)  # of those named
    seen: list[OpKey] = field(default_factory=list)  # all
    _occurrences: dict[tuple[str, str], int] = field(
        default_factory=lambda: defaultdict(int)
    )

    @classmethod
    def of(cls, top: str, saves: Saves, encodes: Encodes | None = None) -> Names:
        """The names of what a plan saves, encodes and moves."""
        named: dict[OpKey, int] = {}
        for key, outputs in (*saves.items(), *(encodes or {}).items()):
            numbers = (at for at in outputs or () if at is not None)
            named[key] = max(named.get(key, -1), -1, *numbers)
        return cls(top, saves, named)

    def key(self, fqn: str, name: str, num_outputs: int) -> OpKey:
        """The name of the op that ran last, in a module."""
        place = (relative_path(fqn, self.top), name)
        key = (*place, self._occurrences[place])
        self._occurrences[place] += 1
        self.seen.append(key)
        if self.named.get(key, num_outputs) < num_outputs:
            self.found.add(key)
        return key

    def kept(self, key: OpKey, values: Sequence[int]) -> Sequence[int]:
        """Those among an op's values that the plan keeps."""
        outputs = self.saves.get(key, frozenset())
        if outputs is None:
            return values
        return [values[at] for at in sorted(outputs) if at < len(values)]


@dataclass(slots=True)
class Inner:
    """A nested region, as recorded."""

    start: int  # first step
    outer: int
    names: Names
    stop: int = -1
    kept: set[int] = field(default_factory=set)  # values
