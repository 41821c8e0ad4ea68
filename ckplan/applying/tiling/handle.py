"""What the wrappers of calls in tiles have in common: counters, and how they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ckplan.applying.hooks.choices import Choice
from ckplan.applying.hooks.forwards import ForwardWrapper

if TYPE_CHECKING:
    from typing_extensions import Self


class Tiled(ForwardWrapper):
    """A module whose calls run in tiles, with its counters."""

    def __init__(
        self, module: nn.Module, name: str, choice: Choice | None = None
    ) -> None:
        super().__init__(module)
        self.choice = choice  # of a plan, with its counters
        self.name = name
        self.tiled = 0  # losses or calls that ran in tiles
        self.whole = 0  # calls that did not

    def remove(self) -> None:
        """Give the module its own forward again."""
        self.take_off()

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """Give the module its own forward again."""
        self.remove()
