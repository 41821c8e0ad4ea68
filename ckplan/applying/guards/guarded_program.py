"""A recorded forward with its guards: what later forwards are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckplan.applying.rebuilding.rebuilder import Step
from ckplan.applying.recording.saved_tensors import Packed
from ckplan.applying.tensors.arguments import Geometry
from ckplan.applying.tensors.retained import Retained
from ckplan.simulating.program import Flow, NestedRegion, Program


class Capture(NamedTuple):
    """A tensor that the region keeps when a call returned it or autograd saved it."""

    place: int  # number of the tensor among those returned, or of the saved tensor
    value: int
    form: str | None  # to be encoded, or to be held as it is


class TensorGuard(NamedTuple):
    """A tensor from elsewhere that a call of the region takes, or brings."""

    geometry: Geometry
    storage: int  # equal for those that share one


class CallSite(NamedTuple):
    """Where an op runs, as far as the plan's names and regions tell places apart."""

    path: str  # FQN of the module, if the plan names ops
    num_begun: int  # regions inside that began before
    num_open: int  # those of them that run


class CallGuard(NamedTuple):
    """One call of a torch function."""

    place: CallSite | None  # of its first op; None if it ran none
    func: Callable[..., Any]
    arguments: Any  # frozen
    switches: tuple[Any, ...]
    random_steps: tuple[int, ...]  # that draw first in it
    statistics: tuple[int, ...]  # running ones that its norm goes by: copies are held
    captures: tuple[Capture, ...]
    returned_constants: tuple[
        tuple[int, TensorGuard], ...
    ]  # constants that it returned, by their place
    packed_before: int  # how many tensors autograd had saved
    packed_after: int
    start: int  # its first step
    stop: int  # the step after its last one


@dataclass(frozen=True)
class GuardedProgram:
    """A forward written down, for forwards that make the same calls."""

    calls: tuple[CallGuard, ...]
    inputs: tuple[TensorGuard, ...]
    packed: tuple[Packed, ...]
    captures: Mapping[int, Capture]  # of saved tensors, by their number
    value_of: Mapping[int, int]  # storage of a given tensor -> its value
    constants: Mapping[int, Retained]  # values that the arguments of calls tell
    flow: Flow
    parts: tuple[NestedRegion, ...]
    program: Program
    steps: Mapping[int, Step]  # all
    dropped_bytes: int
    # For forwards that begin like this one, and go on op by op:
    num_bytes: Sequence[int]  # of each storage
    paths: Sequence[str]  # step -> FQN of the module that ran it
    made: Sequence[int]  # tensors that calls returned: their storages, -1 for another's
    draws: frozenset[int]  # steps
    statistics: Mapping[int, int]  # running ones -> step that goes by them
    unfilled: frozenset[int]  # storages that others than ops may write
