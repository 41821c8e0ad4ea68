"""A recorded forward with its guards; later forwards are checked against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from weakref import ref

import torch

from ckplan.applying.rebuilding.schedule import Packed, Schedule
from ckplan.applying.rebuilding.step import Step
from ckplan.applying.tensors.arguments import version_of
from ckplan.applying.tensors.expected_calls import ExpectedCall
from ckplan.applying.tensors.geometry import Geometry, GeometryCheck
from ckplan.applying.tensors.retained import Place, Retained, tensors_in
from ckplan.applying.tensors.sharing import Shared, exactly
from ckplan.simulating.program import Flow, NestedRegion


class View(NamedTuple):
    """Of the whole of a storage."""

    size: Sequence[int]
    stride: Sequence[int]


class Capture(NamedTuple):
    """A tensor that the region keeps when a call returned it or autograd saved it."""

    place: int  # number of the tensor among those returned, or of the saved tensor
    value: int
    form: str | None  # its encoding; None to retain it as it is
    view: View | None = None  # what is encoded, if not the tensor as it is


class TensorGuard(NamedTuple):
    """A tensor from outside the region that a call takes or returns."""

    geometry: GeometryCheck
    place: Place
    storage: int  # equal for tensors that share a storage
    value: int  # of the storage, if it is from outside; else -1

    @classmethod
    def of(cls, geometry: Geometry, storage: int, value: int) -> TensorGuard:
        """The guard of tensors like one."""
        return cls(GeometryCheck.of(geometry), Place(*geometry[:4]), storage, value)


class CallSite(NamedTuple):
    """Where an op runs: its module and its nested regions."""

    site: str  # of the module, if the plan names ops
    num_begun: int  # nested regions that began before
    num_open: int  # nested regions still open


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGuard(ExpectedCall):
    """One call of a torch function; plain: at no place, and nothing is retained."""

    place: CallSite | None  # of its first op; None if it ran none, or all have the same
    writes: Mapping[int, int]  # to tensors that it takes, since a call returned them
    random_steps: tuple[int, ...]  # its first random steps
    statistics: tuple[int, ...]  # running statistics that its norm reads; copied
    captures: tuple[Capture, ...]
    returned_constants: tuple[
        tuple[int, TensorGuard], ...
    ]  # constants that it returned, by their place
    sized: GeometryCheck | None  # of what it returned by sizes that it read
    start: int  # its first step
    stop: int  # the step after its last one

    def finds_written(
        self, made: Sequence[ref[torch.Tensor]], versions: Sequence[int]
    ) -> bool:
        """Whether what no function mode sees wrote a tensor that it was to take.

        Args:
            made: The tensors that calls returned, by number.
            versions: Theirs when they were returned.
        """
        for number, writes in self.writes.items():
            tensor = made[number]()
            if tensor is not None and version_of(tensor) != versions[number] + writes:
                return True
        return False

    def number(
        self,
        out: Any,
        made: list[ref[torch.Tensor]],
        versions: list[int],
        met: Sequence[ref[torch.Tensor]],
    ) -> bool:
        """Number the tensors that the call returned, if they are as recorded.

        Args:
            out: What it returned.
            made: The tensors that calls returned before, by number; new ones are added.
            versions: Of these, when they were returned.
            met: The tensors from outside that were met before.
        """
        returned, num_made = tensors_in(out), len(made)
        same = len(returned) == len(self.numbers)
        for number, tensor in zip(self.numbers, returned, strict=False):
            if number == len(made):
                made.append(ref(tensor))
                versions.append(version_of(tensor))
            else:
                known = made[number] if number >= 0 else met[-1 - number]
                same &= known() is tensor
        if not same:
            del made[num_made:], versions[num_made:]
        return same


@dataclass(frozen=True)
class GuardedProgram:
    """A recorded forward, for later forwards that make the same calls."""

    calls: tuple[CallGuard, ...]
    inputs: tuple[TensorGuard, ...]
    packed: tuple[Packed, ...]
    captures: Mapping[int, Capture]  # of saved tensors, by their number
    constants: Mapping[int, Retained]  # values that call arguments determine
    flow: Flow
    parts: tuple[NestedRegion, ...]
    schedule: Schedule
    steps: Mapping[int, Step]  # all
    dropped_bytes: int
    # For forwards that begin like this one, then miss:
    num_bytes: Sequence[int]  # of each storage
    sites: Sequence[str]  # step -> where the module is that ran it
    made: Sequence[int]  # storages of returned tensors; -1 if from outside
    draws: frozenset[int]  # steps
    statistics: Mapping[int, int]  # running statistics -> step that reads them
    unfilled: frozenset[int]  # storages that code other than ops may write

    def shared(self) -> GuardedProgram:
        """The program of a layer that is alike; this one if there is none.

        Layers of a model then read the same objects at every call, which a processor's
        caches hold: with their own, a layer costs more the more layers there are.
        """
        own = (getattr(self, f.name) for f in fields(self) if f.name not in _DERIVED)
        key = exactly(self.schedule.program, self.schedule.drawn, *own)
        return _PROGRAMS.one(key, self)


_DERIVED = ("flow", "schedule")  # in the program, and made of program and draws
_PROGRAMS: Shared[GuardedProgram] = Shared()
