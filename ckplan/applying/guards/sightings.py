"""Where a later forward can capture the values that it must retain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckplan.applying.guards.guarded_program import View
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

    def in_call(
        self, value: int, small: Form | None
    ) -> tuple[int, int, View | None] | None:
        """The call that returns it, the place, and the view to encode if any is."""
        for number, place, geometry in self.returned.get(value, ()):
            if small is None or geometry.dtype == small.dtype:
                return number, place, _view(small, geometry)
        return None

    def in_packed(
        self, value: int, small: Form | None
    ) -> tuple[int, View | None] | None:
        """The number of the saved tensor that it is, and the view to encode if any."""
        for number, ref in self.packed.get(value, ()):
            if small is None:
                return number, None
            place = ref and ref.place
            if place is None or place.is_conj or place.is_neg:
                continue
            if place.dtype == small.dtype:
                return number, _view(small, place)
        return None


def _view(small: Form | None, tensor: Geometry | Place) -> View | None:
    """The view that was encoded, if the tensor is another one of the same bytes."""
    if small is None:
        return None
    same = tensor.size == small.size and tensor.stride == small.stride
    return None if same and tensor.offset == 0 else View(small.size, small.stride)
