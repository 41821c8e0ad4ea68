"""How ranks may share the state of training, as an option of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.errors import CkplanError, did_you_mean
from ckplan.units import is_count

SCHEMES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
GATHERING = ("zero3", "fsdp2")
"""Those that divide parameters, which are gathered where they are used."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the state of training is divided among ranks; see ``shard``.

    Raises:
        CkplanError: An unknown scheme, no rank, or units where nothing is gathered.
    """

    scheme: str  # one of SCHEMES
    world_size: int
    units: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the combination of fields."""
        if self.scheme not in SCHEMES:
            near = did_you_mean(self.scheme, SCHEMES)
            raise CkplanError(
                f"unknown way to shard '{self.scheme}'",
                needed="one of " + ", ".join(SCHEMES),
                hint=f"did you mean '{near}'?" if near else "--shard fsdp2",
            )
        if not is_count(self.world_size):
            raise CkplanError(
                f"cannot shard over {self.world_size} ranks",
                needed="a world size of one or more, a whole number",
                hint="--world-size 8",
            )
        if self.units and self.scheme not in GATHERING:
            raise CkplanError(
                f"cannot gather '{self.units[0]}' by itself: {self.scheme} does not "
                "divide parameters",
                needed="units where parameters are divided: " + ", ".join(GATHERING),
                hint="leave out --unit, or --shard fsdp2",
            )
