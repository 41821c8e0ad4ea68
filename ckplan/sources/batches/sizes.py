"""Sizes of a batch: what the user asked for, else an assumption that is reported."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ckplan.errors import WorkloadError

DEFAULT_ROWS = 8


@dataclass
class Sizes:
    """Sizes of ``--batch``, taken one by one; what is not given is assumed.

    ``Sizes.of("8x1024")`` has two sizes: rows, and the length of every row.
    """

    given: tuple[int, ...] = ()
    assumptions: list[str] = field(default_factory=list)
    used: int = 0

    @classmethod
    def of(cls, text: object) -> Sizes:
        """Parse ``8``, ``8x1024`` or ``32x3x224x224``; None gives no sizes.

        Raises:
            WorkloadError: The text has another form, or a size is zero.
        """
        if text is None:
            return cls()
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", str(text)):
            raise WorkloadError(
                f"cannot read the batch: --batch {text!r}",
                needed="sizes above zero joined by 'x': rows, then length or shape",
                hint="--batch 8x1024, or --batch 32x3x224x224 for images",
            )
        return cls(tuple(map(int, str(text).split("x"))))

    @property
    def rows(self) -> int:
        """Number of rows of the batch: the first size."""
        return self.take(0, DEFAULT_ROWS, "rows")

    def take(self, position: int, default: int, what: str) -> int:
        """The size at a position of ``--batch``, or the default, which is noted."""
        self.used = max(self.used, position + 1)
        if position < len(self.given):
            return self.given[position]
        self.assume(f"{what}: {default}", "--batch")
        return default

    def shape(self, default: tuple[int, ...], what: str) -> tuple[int, ...]:
        """The sizes after the rows, all or none of them given.

        Raises:
            WorkloadError: Another number of sizes is given.
        """
        self.used = max(self.used, 1 + len(default))
        rest = self.given[1 : 1 + len(default)]
        if not rest:
            self.assume(f"{what}: {as_text(default)}", "--batch")
            return default
        if len(rest) != len(default):
            raise WorkloadError(
                f"cannot use --batch {as_text(self.given)}: {what} has "
                f"{len(default)} sizes after the rows, not {len(rest)}",
                needed=f"1 or {1 + len(default)} sizes",
                hint=f"--batch {as_text((self.given[0], *default))}",
            )
        return rest

    def rows_only(self) -> Sizes:
        """The same rows, with no other size given; assumptions are shared."""
        return Sizes(self.given[:1], self.assumptions)

    def assume(self, what: str, option: str) -> None:
        """Note an assumption, with the option that replaces it."""
        text = f"assumed {what} ({option})"
        if text not in self.assumptions:
            self.assumptions.append(text)

    def check_all_used(self) -> None:
        """Refuse sizes that no tensor of the batch has.

        Raises:
            WorkloadError: More sizes are given than the task takes.
        """
        if len(self.given) > self.used:
            raise WorkloadError(
                f"cannot use --batch {as_text(self.given)}: the task takes "
                f"{self.used} sizes",
                needed=f"at most {self.used} sizes",
                hint=f"--batch {as_text(self.given[: self.used])}",
            )


def as_text(sizes: tuple[int, ...]) -> str:
    """Sizes as the command line has them: ``8x1024``."""
    return "x".join(map(str, sizes))
