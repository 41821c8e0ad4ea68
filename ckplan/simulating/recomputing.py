"""The effect of a region on the step, for both ways to recompute: program and rerun.

A program reruns single ops, each when backward first needs a value that depends on it.
A rerun runs the whole module at once, as ``torch.utils.checkpoint`` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import FUNCTIONS_PER_OP, MULTIPLIES, Encoding, Saved
from ckplan.plan.region import PROGRAM, Region
from ckplan.simulating.backwards import backwards_of, reruns_of
from ckplan.simulating.effect import BEFORE_OP, COPIED, REBUILT, Effect, Interval, Work
from ckplan.simulating.ledger import ByteCounter, Ledger, is_on_cpu, random_state_bytes
from ckplan.simulating.rebuild import Rebuild
from ckplan.simulating.view import MOVED, RegionView


def find_effect(view: RegionView, region: Region) -> Effect:
    """Compute the effect of a region on the unplanned step.

    Args:
        view: The view of the region's calls.
        region: The region to recompute.

    Raises:
        PlanError: The region, or one inside it, cannot be rebuilt.
    """
    effect = (_program_effect if region.by == PROGRAM else _rerun_effect)(view, region)
    ops = view.graph.ops
    if view.graph.unused_workspaces and any(
        ops[s].name in MULTIPLIES for s in effect.steps
    ):
        for storage in view.graph.unused_workspaces:
            effect.hold(storage, 2 * len(ops))
    return effect


def _program_effect(view: RegionView, region: Region) -> Effect:
    program, dropped = view.program(region)
    if program.overwritten_inputs:
        overwritten_inputs = {
            view.flow.storage_of[value] for value in program.overwritten_inputs
        }
        raise _overwritten_error(view, overwritten_inputs)
    encoded = view.encoded_values(region)
    moves = any(one.name == MOVED for one in encoded.values())
    if moves:
        _check_wanted(view, encoded, view.wanted(region))
    effect = Effect(dropped={*dropped})
    retained = (view.flow.storage_of[value] for value in program.retained)
    for storage in (*view.external(), *retained):
        effect.hold(storage, 2 * view.stop - 1)
    ledger = Ledger(view, program, effect, encoded)
    rebuild = Rebuild(program, ByteCounter(ledger, program.retained))
    saves = [(index, saved) for index, saved, _ in view.packed if index in dropped]
    value_of = {index: value for index, _, value in view.packed}
    left = ByteCounter(ledger, ())  # by a backward that keeps the graph
    for backward in backwards_of(view.graph, saves, anew=not moves):
        ledger.enter_gap(2 * backward.uses[0].begin)
        left.close()
        one, ledger.keeps_graph = rebuild, backward.keeps_graph
        if backward.keeps_graph:
            left = ByteCounter(ledger, ())
            one = Rebuild(program, left)
        for use in backward.uses:
            value = value_of[use.saved]
            ledger.enter_gap(2 * use.begin)
            ledger.ask()
            owner = one.owner(value, dropped[use.saved])
            owner.materialize(value)
            ledger.restore_random_state()
            owner.machine.unpack(value, 2 * use.end + 1)
            owner.release(value)
    ledger.enter_gap(max((2 * s.last_held + 1 for _, s in saves), default=0))
    left.close()
    rebuild.machine.close()
    ledger.close()
    _count_seconds(view, region, effect)
    return effect


def _check_wanted(
    view: RegionView, encoded: Mapping[int, Encoding], wanted: Collection[int]
) -> None:
    """Refuse to move values that backward does not want."""
    for value, one in encoded.items():
        if one.name == MOVED and value not in wanted:
            op = view.graph.ops[one.op]
            raise PlanError(
                f"cannot offload {op.name} of {view.graph.calls[op.call]}: backward "
                "does not want it",
                needed="values that backward reads, or that others are rebuilt from",
                hint="leave it out of offload",
            )


def _count_seconds(view: RegionView, region: Region, effect: Effect) -> None:
    graph, engine, steps = view.graph, view.graph.engine, effect.steps
    per_op = engine.rerun_seconds
    if region.by != PROGRAM:
        per_op += engine.module_seconds * _compared(view)
    begin = engine.region_seconds + engine.path_seconds * num_followed(view, region)
    if _is_recorded(view, region):
        per_op += engine.record_seconds
        begin += engine.record_seconds * (view.stop - view.start)
    effect.engine_seconds += begin
    effect.engine_seconds += engine.watch_seconds * len(view.saves)
    effect.engine_seconds += per_op * len(steps)
    effect.seconds += sum(seconds for _, seconds in effect.coded)
    effect.seconds += engine.again * sum(graph.critical_seconds[op] for op in steps)
    effect.seconds += graph.engine_share * effect.engine_seconds
    if not graph.is_launched:
        return
    watch, (device, launch) = engine.watch_seconds, graph.device_and_launch
    effect.work.append(Work(2 * view.start, 0.0, 0.0, begin))
    effect.work += (Work(2 * one.packed_at, 0.0, 0.0, watch) for one in view.saves)
    effect.work += (Work(moment, taken, taken) for moment, taken in effect.coded)
    effect.work += (
        Work(gap, launch[op], engine.again * device[op], per_op)
        for gap, op in zip(effect.gaps, steps, strict=True)
    )


def _compared(view: RegionView) -> float:
    """The share of ops whose functions a rerun compares: less if one runs many ops."""
    first, last = view.unit
    stop = _end(view.graph, first if last is None else last)
    counts = [call.functions for call in view.graph.calls[first:stop]]
    functions = sum(count for count in counts if count is not None)
    if None in counts or not functions:
        return 1.0
    return min(functions / (FUNCTIONS_PER_OP * (view.stop - view.start)), 1.0)


def num_recorded(view: RegionView, region: Region, effect: Effect) -> int:
    """Ops that the engine records in each step, and those that it writes code for."""
    recorded = view.stop - view.start + len(effect.steps)
    return recorded if _is_recorded(view, region) else 0


def _is_recorded(view: RegionView, region: Region) -> bool:
    return region.by == PROGRAM and view.varies


def num_followed(view: RegionView, region: Region) -> int:
    """Calls of a region's forward that the engine follows, to tell whose ops run.

    They are those in whose forwards the region names ops, and all inside of those.
    """
    graph, (first, last) = view.graph, view.unit
    top = first if last is None else view.call.parent
    named = {graph.ops[op].call for op, _ in region.named}
    if top in named:
        return _end(graph, first if last is None else last) - first - (last is None)
    count, until = 0, first
    for call in sorted(named):
        if call >= until:
            until = _end(graph, call)
            count += until - call
    return count


def _end(graph: Graph, call: int) -> int:
    """The first later call that does not run inside a call."""
    later = range(call + 1, len(graph.calls))
    return next((k for k in later if not graph.is_within(k, call)), later.stop)


def _rerun_effect(view: RegionView, region: Region) -> Effect:
    """Rerun the call's ops up to the last saved tensor (early stop)."""
    view.parts(region)  # raises if the region has inner ones
    made = view.saved_by_rerun
    effect = Effect(dropped={index for index, _ in made})
    last = max((saved.last_held for saved in view.saves), default=-1)
    inputs = {*view.external(), *view.call.arguments} - view.casts.keys()
    for storage in inputs if view.saves else ():
        effect.hold(storage, 2 * last + 1)
    effect.allocated += _snapshot(view, 2 * last + 1)
    reruns = list(reruns_of(view.numbered))
    if reruns:
        overwritten_inputs = view.changed_inputs(max(first for first, _ in reruns))
        if overwritten_inputs:
            raise _overwritten_error(view, overwritten_inputs)
    for first, ends in reruns:
        _rerun_module(view, made, ends, first, effect)
    _count_seconds(view, region, effect)
    return effect


def _snapshot(view: RegionView, until: int) -> Iterator[Interval]:
    """Copies of state that forward may change; a rerun restores them.

    A copy of changed state is kept to half moment ``until``, others to forward's end.
    """
    (_, over), begin = view.forward_window(), 2 * view.start + 1
    state_bytes, on_cpu = random_state_bytes(view.graph), is_on_cpu(view.graph)
    of_device, of_another = view.draws
    yield Interval(
        begin, max(until, over) if of_device else over, state_bytes, BEFORE_OP
    )
    if of_another:
        yield Interval(begin, max(until, over), state_bytes, BEFORE_OP)
    for storage in view.call.state:
        changed = view.graph.is_changed(storage, view.start, view.stop)
        changed |= (
            on_cpu and storage in view.moved
        )  # the engine checks for this on CPU only
        size = view.graph.storages[storage].bytes
        yield Interval(
            begin,
            max(until, over) if changed else over,
            size,
            BEFORE_OP,
            storage=storage,
            form=COPIED,
        )


def _rerun_ops(view: RegionView) -> Iterator[int]:
    """The ops that a rerun executes, with autocast's casts of parameters at first use.

    An op may save its inputs. The rerun then stops before that op, after its casts.
    """
    casts, ops, stop = dict(view.casts), view.graph.ops, view.saved_stop
    for moment in range(view.start, stop):
        yield from (casts.pop(s) for s in ops[moment].reads if s in casts)
        yield moment
    last = {saved.storage for saved in view.saves if saved.packed_at == stop}
    if stop < view.stop and not last.isdisjoint(ops[stop].reads):
        yield from (casts.pop(s) for s in ops[stop].reads if s in casts)


def _rerun_module(
    view: RegionView,
    made: Iterable[tuple[int, Saved]],
    ends: Mapping[int, int],
    first: int,
    effect: Effect,
) -> None:
    """Run all ops at once, in the gap before op ``first``.

    What is made again is held until the op in ``ends``, by index of the saved tensor.
    """
    graph = view.graph
    until: dict[int, int] = {}
    for index, saved in made:
        if index in ends:  # torch's checkpoint passes it to the node
            until[saved.storage] = max(until.get(saved.storage, 0), ends[index])
    gap = 2 * first
    found = sum(graph.storages[storage].bytes for storage in view.call.state)
    found += random_state_bytes(graph) * sum(view.draws)
    effect.allocated.append(
        Interval(gap, gap, found)
    )  # current state, restored after the rerun
    alive = sum(one.bytes for one in effect.allocated if one.start <= gap <= one.stop)
    most_bytes = alive
    unsaved: dict[
        int, tuple[int, int]
    ] = {}  # storage that backward does not read -> (bytes, tick)
    read_last: dict[int, list[int]] = defaultdict(
        list
    )  # op -> unsaved storages that it reads last
    tick = 0
    for moment in _rerun_ops(view):
        begun = tick
        tick += 1
        for storage in graph.creates[moment]:
            size = graph.storages[storage].bytes
            alive += size
            if storage in until:
                stop = 2 * until[storage] + 1
                again = Interval(gap, stop, size, tick, storage=storage, form=REBUILT)
                effect.allocated.append(again)
            else:
                unsaved[storage] = size, tick
                read_last[graph.storages[storage].last].append(storage)
            tick += 1
        workspace = graph.ops[moment].workspace
        effect.workspaces += [
            Interval(gap, gap, size, since, tick + 1)
            for since, blocks in zip((begun, tick), workspace, strict=True)
            for size in blocks
        ]
        tick += 2
        most_bytes = max(most_bytes, alive + workspace.bytes)
        for storage in read_last.get(moment, ()):
            size, since = unsaved.pop(storage)
            alive -= size
            again = Interval(gap, gap, size, since, tick, storage, REBUILT)
            effect.allocated.append(again)
            tick += 1
        effect.steps.append(moment)
        effect.gaps.append(gap)
    effect.allocated += (
        Interval(gap, gap, *one, storage=storage, form=REBUILT)
        for storage, one in unsaved.items()
    )  # freed at the end
    effect.gap_peaks[gap] = [most_bytes]


def _overwritten_error(
    view: RegionView, overwritten_inputs: Collection[int]
) -> PlanError:
    names = sorted(
        {op.name for op in view.graph.ops if {*overwritten_inputs} & {*op.writes}}
    )
    return PlanError(
        f"cannot rebuild {view.name}: {', '.join(names)} changes its input in place",
        needed="a region whose inputs are unchanged when backward rebuilds it",
        hint="leave this call out of the plan, or plan a smaller call",
    )
