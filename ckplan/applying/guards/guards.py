"""Make a guarded program from a recorded forward.

This is possible only if the calls alone determine the ops and tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from ckplan.applying.guards.guarded_program import (
    CallGuard,
    CallSite,
    Capture,
    GuardedProgram,
    TensorGuard,
)
from ckplan.applying.guards.sightings import Sightings
from ckplan.applying.recording.call_log import Call
from ckplan.applying.recording.module_path import site_of
from ckplan.applying.recording.recorder import Recorder
from ckplan.applying.tensors.geometry import GeometryCheck
from ckplan.applying.tensors.matchers import Matchers
from ckplan.applying.tensors.numbers import is_array, is_number
from ckplan.applying.tensors.retained import Retained
from ckplan.encodings import BITS
from ckplan.simulating.program import (
    EXTERNAL,
    Flow,
    NestedRegion,
    Program,
    compile_program,
)

_SCALINGS = ("div_", "mul_")
_FEW_BYTES, _SMALL_SHARE = 4096, 250
"""Of values that are rebuilt though the plan keeps them: so many, or of what is dropped
one part in so many."""


def make_guards(seen: Recorder) -> GuardedProgram | None:
    """The guarded program of a forward; None if calls do not determine its ops."""
    log, storages, packing = seen.log, seen.storages, seen.packing
    parts, schedule = seen.parts, seen.schedule
    assert schedule is not None, "its forward is over"
    program = schedule.program
    flow = storages.flow
    if log.broken or -1 in seen.call_of:
        return None
    if any(one.address in storages.shared for one in storages.retained.values()):
        return None
    made_by = enumerate(flow.maker_of)
    value_of = {flow.storage_of[v]: v for v, maker in made_by if maker == EXTERNAL}
    numbers = [
        storages.numbers.get(storage.cdata, -1 - place)
        for place, (_, storage) in enumerate(log.inputs)
    ]
    inputs = [
        TensorGuard.of(geometry, number, value_of.get(number, -1))
        for (geometry, _), number in zip(log.inputs, numbers, strict=True)
    ]
    there = {one.storage for one in inputs}
    if not there.isdisjoint(storages.inside):
        return None
    returned_constants = _returned_constants(seen, there, value_of)
    there.update(
        one.storage for found in returned_constants.values() for _, one in found
    )
    constants = _constants(seen, there)
    if any(
        flow.maker_of[value] == EXTERNAL
        and flow.storage_of[value] not in there
        and value not in constants
        for value in program.retained
    ):
        return None
    places = Sightings.of(seen)
    program = _seen_from_calls(seen, places, parts, program)
    same = program is schedule.program  # then its compiled stages serve on
    captures = _captures(seen, places, program)
    random_steps = _first_draws(seen, program)
    if captures is None or random_steps is None:
        return None
    of_calls, of_packed = captures
    statistics = _statistics(seen, program)
    places_of = range(len(log.calls) + 1)
    ranges = [*pairwise(bisect_left(seen.call_of, number) for number in places_of)]
    at = _places(seen, parts, (start for start, stop in ranges if start < stop))
    moves = bool(seen.names.named or seen.inner)
    sized = {
        number: GeometryCheck.of(one.geometry)
        for number, call in enumerate(log.calls)
        for one in call.returned
        if call.is_sized and one.geometry is not None
    }
    retained = {*random_steps, *statistics, *of_calls, *returned_constants, *sized}
    matchers = Matchers()
    calls = tuple(
        CallGuard(
            place=at[start] if moves and start < stop else None,
            func=call.func,
            matches=matchers.make(call.arguments, call.writes),
            writes=call.writes,
            switches=call.switches,
            numbers=tuple(call.numbers),
            returns_new=call.returns_new,
            is_plain=not (moves and start < stop) and number not in retained,
            random_steps=tuple(random_steps.get(number, ())),
            statistics=tuple(statistics.get(number, ())),
            captures=tuple(of_calls.get(number, ())),
            returned_constants=tuple(returned_constants.get(number, ())),
            sized=sized.get(number),
            packed_before=call.packed_before,
            packed_after=call.packed_after,
            start=start,
            stop=stop,
        )
        for number, (call, (start, stop)) in enumerate(
            zip(log.calls, ranges, strict=True)
        )
    )
    found = GuardedProgram(
        calls=calls,
        inputs=tuple(inputs),
        packed=tuple(packing.packed),
        captures=of_packed,
        constants=constants,
        flow=flow,
        parts=parts,
        schedule=schedule if same else seen.schedule_of(program),
        steps=seen.steps,
        dropped_bytes=packing.dropped_bytes,
        num_bytes=storages.num_bytes,
        sites=[site_of(fqn, seen.names.top) for fqn in seen.paths],
        made=[flow.storage_of[value] if value >= 0 else -1 for value in log.made],
        draws=frozenset(seen.states),
        statistics=seen.statistics,
        unfilled=frozenset(storages.unfilled),
    )
    return found.shared()


def _places(
    seen: Recorder, parts: Sequence[NestedRegion], steps: Iterable[int]
) -> dict[int, CallSite]:
    """The places where steps ran."""
    starts = sorted(part.start for part in parts)
    stops = sorted(part.stop for part in parts)
    found = {}
    for step in steps:
        begun, ended = bisect_right(starts, step), bisect_right(stops, step)
        site = site_of(seen.paths[step], seen.names.top)
        found[step] = CallSite(site, begun, begun - ended)
    return found


def _returned_constants(
    seen: Recorder, there: Collection[int], value_of: Mapping[int, int]
) -> dict[int, list[tuple[int, TensorGuard]]]:
    """Outside tensors that calls returned before ops read them; by call.

    Such as constants: each forward retains its own, since they may differ.
    """
    numbers, inside = seen.storages.numbers, seen.storages.inside
    found: dict[int, list[tuple[int, TensorGuard]]] = defaultdict(list)
    for number, call in enumerate(seen.log.calls):
        for place, one in enumerate(call.returned):
            if one.geometry is None or one.unread is None:
                continue
            storage = numbers.get(one.unread.cdata, -1)  # -1: no op used it
            if storage >= 0 and storage not in there and storage not in inside:
                value = value_of.get(storage, -1)
                guard = TensorGuard.of(one.geometry, storage, value)
                found[number].append((place, guard))
    return found


def _constants(seen: Recorder, there: Collection[int]) -> dict[int, Retained]:
    """Outside values that torch made of index arguments."""
    flow, found = seen.storages.flow, dict[int, Retained]()
    unknown = {
        value
        for value, maker in enumerate(flow.maker_of)
        if maker == EXTERNAL and flow.storage_of[value] not in there
    }
    for step, inputs in enumerate(flow.inputs):
        for value in unknown.intersection(inputs):
            unknown.remove(value)
            retained = seen.storages.retained.get(value)
            call = seen.log.calls[seen.call_of[step]]
            if retained is not None and _tells(call, retained.tensor):
                found[value] = retained
    return found


def _tells(call: Call, constant: torch.Tensor) -> bool:
    """Whether the arguments of a call determine a tensor made of them.

    The arguments of indexing do: it makes tensors of lists and of fill values. One made
    of an array shares its bytes, which may change.
    """
    sets = call.func == torch.Tensor.__setitem__
    if not sets and call.func != torch.Tensor.__getitem__:
        return False
    if any(map(is_array, call.arguments)):
        return False
    if call.arguments.count(torch.Tensor) == 1:  # the one that is indexed
        return True
    return sets and is_number(call.arguments[-2]) and constant.dim() == 0


def _seen_from_calls(
    seen: Recorder,
    places: Sightings,
    parts: tuple[NestedRegion, ...],
    program: Program,
) -> Program:
    """The program with small values rebuilt that no call returns.

    Such are scalars and masks that ops pass to each other inside one torch function,
    independent of the program's values. Otherwise every forward would be recorded op
    by op.
    """
    flow, num_bytes = seen.storages.flow, seen.storages.num_bytes
    unseen = {
        value
        for value in program.retained
        if flow.maker_of[value] != EXTERNAL
        and places.in_call(value, None) is None
        and places.in_packed(value, None) is None
    }
    kept = [v for v in program.retained - unseen if flow.maker_of[v] != EXTERNAL]
    makers = _makers(flow, unseen, {*kept, *seen.encoded})
    made = {flow.storage_of[value] for step in makers for value in flow.returned[step]}
    most_bytes = max(_FEW_BYTES, seen.packing.dropped_bytes // _SMALL_SHARE)
    too_many = sum(num_bytes[storage] for storage in made) > most_bytes
    if not unseen or too_many or makers & program.runs().keys():
        return program
    other = compile_program(
        flow, seen.packing.dropped, kept, seen.encoded.keys(), parts
    )
    return program if other.overwritten_inputs else other


def _makers(flow: Flow, values: Iterable[int], there: Collection[int]) -> set[int]:
    """The steps that make values from others that are there, or come from outside."""
    steps: set[int] = set()
    wanted = [*values]
    while wanted:
        value = wanted.pop()
        step = flow.maker_of[value]
        if step != EXTERNAL and step not in steps and value not in there:
            steps.add(step)
            wanted += flow.inputs[step]
    return steps


def _captures(
    seen: Recorder, places: Sightings, program: Program
) -> tuple[dict[int, list[Capture]], dict[int, Capture]] | None:
    """Captures of values that a later forward must retain."""
    flow = seen.storages.flow
    wanted: list[tuple[int, int, str | None]] = [
        (value, value, None)
        for value in program.retained
        if flow.maker_of[value] != EXTERNAL
    ]
    changed_by = {old: s for s, olds in enumerate(flow.overwrites) for old in olds}
    wanted += [
        (value, _scaled(seen, changed_by, value), seen.encoded[value].form)
        for value in program.decodes
    ]
    of_calls: dict[int, list[Capture]] = defaultdict(list)
    of_packed: dict[int, Capture] = {}
    for value, same, form in wanted:
        shape = seen.encoded[value] if form else None
        place = places.in_call(same, shape)
        if place is not None:
            number, returned, view = place
            of_calls[number].append(Capture(returned, value, form, view))
            continue
        packed = places.in_packed(same, shape)
        if packed is None or packed[0] in of_packed:
            return None
        of_packed[packed[0]] = Capture(packed[0], value, form, packed[1])
    return of_calls, of_packed


def _scaled(seen: Recorder, changed_by: Mapping[int, int], value: int) -> int:
    """The scaled result of a draw of zeros and ones: it has the same bits."""
    flow, same = seen.storages.flow, value
    while seen.encoded[value].form.startswith(BITS) and not flow.is_current(same):
        step = changed_by[same]
        func, args, *_ = seen.steps[step]
        if func.overloadpacket.__name__ not in _SCALINGS or not _is_factor(args[1]):
            break
        same = flow.overwrites[step][same]
    return same


def _statistics(seen: Recorder, program: Program) -> dict[int, list[int]]:
    """Running statistics that a later forward must copy; by call."""
    found: dict[int, list[int]] = defaultdict(list)
    for value, step in seen.statistics.items():
        if value in program.retained:
            found[seen.call_of[step]].append(value)
    return found


def _first_draws(seen: Recorder, program: Program) -> dict[int, list[int]] | None:
    """The first random steps of each call, for each device; by call."""
    first: dict[tuple[int, torch.device], int] = {}
    for step in seen.states:
        key = (seen.call_of[step], seen.steps[step].device)
        first.setdefault(key, step)
    needed = program.runs().keys() & seen.states.keys()
    drawn = {step: key[0] for key, step in first.items()}
    if any(
        step not in drawn or seen.steps[step].generator is not None for step in needed
    ):
        return None
    found: dict[int, list[int]] = defaultdict(list)
    for step in sorted(needed):
        found[drawn[step]].append(step)
    return found


def _is_factor(number: object) -> bool:
    """Whether scaling by it keeps zeros and nonzeros apart."""
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0
