"""Where a later forward can capture the values that it must retain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckplan.applying.moving.mover import Form
from ckplan.applying.recording.recorder import Recorder
from ckplan.applying.tensors.geometry import Geometry
from ckplan.applying.tensors.retained import Place, Ref


@dataclass(frozen=True, slots=True)
class Sightings:
    """Places where a later forward can capture values, earliest first."""

    returned: Mapping[int, Sequence[tuple[int, int, Geometry]]]  # call, place in it
    packed: Mapping[int, Sequence[tuple[int, Ref | None]]]

    @classmethod
    def of(cls, seen: Recorder) -> Sightings:
        """Find all places once, since a region may be a whole model."""
        returned = defaultdict(list)
        for number, call in enumerate(seen.log.calls):
            for place, one in enumerate(call.returned):
                if one.geometry:
                    returned[one.value].append((number, place, one.geometry))
        packed = defaultdict(list)
        for place, saved in enumerate(seen.packing.packed):
            packed[saved.value].append((place, saved.ref))
        return cls(returned, packed)

    def in_call(self, value: int, small: Form | None) -> tuple[int, int] | None:
        """The call that returns it, in the geometry to encode if there is one."""
        for number, place, geometry in self.returned.get(value, ()):
            if small is None or _fits(small, geometry):
                return number, place
        return None

    def in_packed(self, value: int, small: Form | None) -> int | None:
        """The number of the saved tensor that it is."""
        for place, ref in self.packed.get(value, ()):
            if small is None or (ref is not None and _fits(small, ref.place)):
                return place
        return None


def _fits(small: Form, tensor: Geometry | Place) -> bool:
    """Whether a tensor has the geometry of the encoded one."""
    same = tensor.size == small.size and tensor.stride == small.stride
    return same and tensor.dtype == small.dtype and tensor.offset == 0
