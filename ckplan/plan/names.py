"""Names in plans: calls, ranges of calls, and ops inside a region.

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from ckplan.errors import PlanError
from ckplan.graph.fqn import OP_NAME
from ckplan.graph.patterns import NUMBER, fqn_of

_OP = re.compile(rf"(.+)/({OP_NAME})(?:#({NUMBER}))?(?:@({NUMBER}))?")


@dataclass(frozen=True, slots=True)
class OpName:
    """An op of a region, or one output of it, by module path and occurrence.

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
        """Replace ``.``, the region's own code, by an empty path."""
        object.__setattr__(self, "path", fqn_of(self.path))

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


class OpCounter:
    """Names the ops of one region in execution order.

    >>> ops = OpCounter()
    >>> [str(ops.name("mlp", "addmm")) for _ in range(2)]
    ['mlp/addmm', 'mlp/addmm#1']
    """

    def __init__(self) -> None:
        """Start before the first op."""
        self._occurrences = defaultdict[OpName, Iterator[int]](count)

    def name(self, path: str, aten_name: str) -> OpName:
        """Return the name of the op that runs now.

        Args:
            path: FQN below the region of the module that runs it, "" for its own code.
            aten_name: Which op it is.
        """
        op = OpName(path, aten_name)
        return replace(op, occurrence=next(self._occurrences[op]))
