"""Record the rest of a forward op by op after it missed a guard.

Up to the miss, the guarded program holds all that a recorder would have recorded. So
the plan's choices apply to the rest as well, and one program rebuilds tensors that were
dropped before and after the miss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from weakref import ref

import torch

from ckplan.applying.guards.guarded_program import GuardedProgram
from ckplan.applying.moving.mover import Form
from ckplan.applying.rebuilding.schedule import Packed
from ckplan.applying.recording.module_path import ModulePath, fqn_of
from ckplan.applying.recording.op_keys import Inner, Names, Saves
from ckplan.applying.recording.recorder import Recorder
from ckplan.applying.recording.saved_tensors import Handle
from ckplan.applying.tensors.arguments import storage_of
from ckplan.applying.tensors.op_traits import traits_of
from ckplan.applying.tensors.retained import Retained, retain, retain_copy
from ckplan.applying.tensors.storages import Storages
from ckplan.simulating.program import EXTERNAL, Flow, NestedRegion


class OpenInner(NamedTuple):
    """A nested region that is open at the miss."""

    start: int  # its first step
    top: str
    saves: Saves


class Beginning(NamedTuple):
    """A forward up to the miss."""

    expected: GuardedProgram
    stop: int  # the step after the last one
    path: ModulePath
    inner: Sequence[OpenInner]  # innermost last
    made: Sequence[ref[torch.Tensor]]  # tensors that calls returned, by number
    retained: Mapping[int, Retained]
    encoded: Mapping[int, Form]
    states: Mapping[int, torch.Tensor]
    packed: Sequence[Packed]
    handle: Handle


def resume(recorder: Recorder, begun: Beginning) -> None:
    """Give a recorder the state it would have after recording from the start."""
    storages = recorder.storages
    flow = storages.flow = _until(begun.expected.flow, begun.stop)
    recorder.path = begun.path
    recorder.log.broken = True  # it saw no calls to compare others with
    recorder.encoded.update(begun.encoded)
    recorder.states.update(begun.states)
    _restore_steps(recorder, begun)
    living = _restore_storages(storages, begun)
    recorder.packing.go_on(begun.handle, begun.packed)
    for value, one in begun.retained.items():
        if value < len(flow.storage_of) and flow.is_current(value):
            one.settle()
            moves = value in recorder.statistics
            storages.retained[value] = retain_copy(one.tensor) if moves else one
    _retain_unrecoverable(recorder, begun, living)
    _name_steps(recorder, begun)


def _until(flow: Flow, stop: int) -> Flow:
    """The values of the first steps."""
    inputs, outputs = flow.inputs[:stop], flow.outputs[:stop]
    seen = (value for values in (*inputs, *outputs) for value in values)
    num_values = 1 + max(seen, default=-1)
    storage_of = flow.storage_of[:num_values]
    current = {storage: value for value, storage in enumerate(storage_of)}
    return Flow(
        storage_of,
        flow.maker_of[:num_values],
        current,
        inputs,
        outputs,
        flow.overwrites[:stop],
        flow.returned[:stop],
    )


def _restore_steps(recorder: Recorder, begun: Beginning) -> None:
    """Restore the steps, and which of them cannot be rerun exactly."""
    expected = begun.expected
    recorder.steps.update((step, expected.steps[step]) for step in range(begun.stop))
    sites, top = expected.sites[: begun.stop], begun.path.top
    recorder.paths += [fqn_of(site, top) for site in sites]
    normed = expected.statistics.items()
    recorder.statistics.update((v, step) for v, step in normed if step < begun.stop)
    others_wrote = {expected.flow.current[storage] for storage in expected.unfilled}
    gone = expected.draws - begun.states.keys()
    gone |= {expected.flow.maker_of[value] for value in others_wrote}
    recorder.gone.update(step for step in gone if step < begun.stop)


def _restore_storages(storages: Storages, begun: Beginning) -> dict[int, torch.Tensor]:
    """Restore the storages; return one live tensor for each."""
    expected, flow = begun.expected, storages.flow
    made_by = list(zip(flow.storage_of, flow.maker_of, strict=True))
    given = {storage for storage, maker in made_by if maker == EXTERNAL}
    storages.inside.update({storage for storage, _ in made_by} - given)
    num_storages = 1 + max(flow.storage_of, default=-1)
    storages.num_bytes += expected.num_bytes[:num_storages]
    found = {
        flow.storage_of[value]: one.tensor
        for value, one in begun.retained.items()
        if value < len(flow.storage_of)
    }
    for number, one in enumerate(begun.made):
        tensor = one()
        if tensor is not None and expected.made[number] >= 0:
            found[expected.made[number]] = tensor
    for storage, tensor in found.items():
        storages.know(storage_of(tensor), storage)
    return found


def _retain_unrecoverable(
    recorder: Recorder, begun: Beginning, living: Mapping[int, torch.Tensor]
) -> None:
    """Retain live tensors that no step can rebuild."""
    expected, storages, flow = begun.expected, recorder.storages, recorder.storages.flow
    there = _reproducible(flow, {*storages.retained, *recorder.encoded}, recorder.gone)
    for storage, tensor in living.items():
        value = flow.current[storage]
        if value not in there:
            storages.retained[value] = retain(tensor)
        maker = flow.maker_of[value]
        empty = (
            maker != EXTERNAL
            and traits_of(expected.steps[maker].func).returns_uninitialized
        )
        if empty or storage in expected.unfilled:
            storages.unfilled[storage] = tensor
    storages.handed_out.update(expected.unfilled.intersection(living))


def _reproducible(
    flow: Flow, there: Collection[int], gone: Collection[int]
) -> set[int]:
    found = {*there}
    for step, inputs in enumerate(flow.inputs):
        if step not in gone and found.issuperset(inputs):
            found.update(flow.outputs[step])
    return found


def _name_steps(recorder: Recorder, begun: Beginning) -> None:
    """Restore the names of ops so far, and the nested regions."""
    values = range(len(recorder.storages.flow.storage_of))
    parts = [part for part in begun.expected.parts if part.start <= begun.stop]
    for part in parts:
        stop, kept = min(part.stop, begun.stop), {*part.kept.intersection(values)}
        names = Names.of("", {})
        recorder.inner.append(Inner(part.start, part.outer, names, stop, kept))
    _name(recorder, recorder.names, 0)
    for one in begun.inner:
        _go_on_inside(recorder, one, parts, begun.stop)


def _go_on_inside(
    recorder: Recorder, one: OpenInner, parts: Sequence[NestedRegion], stop: int
) -> None:
    """Continue a nested region: a recorded one, or a new one from here on."""
    around = recorder.open_inner[-1]
    recorder.begin_inner(one.top, one.saves)
    begun = recorder.inner[-1]
    _name(recorder, begun.names, one.start)
    for number, part in enumerate(parts, start=1):
        same = (part.start, part.outer) == (one.start, around)
        if same and part.start < stop <= part.stop:
            recorder.inner.pop()
            recorder.inner[number - 1].names = begun.names
            recorder.open_inner[-1] = number
            return


def _name(recorder: Recorder, names: Names, start: int) -> None:
    for step in range(start, len(recorder.paths)):
        op = traits_of(recorder.steps[step].func).name
        num_outputs = len(recorder.storages.flow.returned[step])
        names.key(recorder.paths[step], op, num_outputs)
