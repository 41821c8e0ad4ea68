"""The two ways to recompute a region, as what they do to the step.

A program runs single ops again, each when backward first wants what it leads to. A
rerun runs the whole module at once, as ``torch.utils.checkpoint`` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from ckplan.errors import PlanError
from ckplan.graph.records import MULTIPLIES, Saved
from ckplan.plan.region import PROGRAM, Region
from ckplan.simulating.effect import FIRST, Effect, Interval
from ckplan.simulating.ledger import ByteCounter, Ledger, is_on_cpu, random_state_bytes
from ckplan.simulating.rebuild import Rebuild
from ckplan.simulating.view import RegionView


def find_effect(view: RegionView, region: Region) -> Effect:
    """What a region changes.

    Args:
        view: Of the calls that it is on.
        region: What is done with them.

    Raises:
        PlanError: It cannot be rebuilt, or the regions inside cannot.
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
        raise _not_rebuildable(view, overwritten_inputs)
    effect = Effect(dropped={*dropped})
    held = (view.flow.storage_of[value] for value in program.retained)
    for storage in (*view.external(), *held):
        effect.hold(storage, 2 * view.stop - 1)
    ledger = Ledger(view, program, effect, view.encoded_values(region))
    rebuild = Rebuild(program, ByteCounter(ledger, program.retained))
    events = [(s, v, dropped[i]) for i, s, v in view.packed if i in dropped]
    for saved, value, part in sorted(events, key=lambda event: event[0].wanted):
        if saved.wanted >= 0:
            ledger.enter(2 * saved.wanted)
            level = rebuild.level(value, part)
            level.want(value)
            ledger.put_back()
            level.machine.unpack(value, 2 * saved.done + 1)
            level.release(value)
    ledger.enter(max((2 * s.done + 1 for s, _, _ in events), default=0))
    rebuild.machine.close()
    ledger.close()
    _count_seconds(view, effect)
    return effect


def _count_seconds(view: RegionView, effect: Effect) -> None:
    graph, engine = view.graph, view.graph.engine
    effect.seconds += sum(graph.critical_seconds[op] for op in effect.steps)
    effect.hidden_seconds += sum(graph.hidden_seconds[op] for op in effect.steps)
    effect.engine_seconds += engine.watch_seconds * len(view.saves)
    effect.engine_seconds += engine.rerun_seconds * len(effect.steps)
    if graph.engine_is_critical:
        effect.seconds += effect.engine_seconds
    else:
        effect.hidden_seconds += effect.engine_seconds


def _rerun_effect(view: RegionView, region: Region) -> Effect:
    """Run the call's ops again, whole, up to the last saved tensor (early stop)."""
    view.parts(region)  # which refuses those inside
    made = view.made_by_rerun
    effect = Effect(dropped={index for index, _ in made})
    last = max((saved.done for saved in view.saves), default=-1)
    held = {*view.external(), *view.call.given} - view.casts.keys()
    for storage in held if view.saves else ():
        effect.hold(storage, 2 * last + 1)
    effect.made += _snapshot(view, 2 * last + 1)
    wanted = [saved.wanted for saved in view.saves if saved.wanted >= 0]
    if wanted:
        overwritten_inputs = view.changed_inputs(min(wanted))
        if overwritten_inputs:
            raise _not_rebuildable(view, overwritten_inputs)
        _rerun_module(view, made, min(wanted), effect)
    _count_seconds(view, effect)
    return effect


def _snapshot(view: RegionView, until: int) -> Iterator[Interval]:
    """Copies of what a forward may change, to be put back before it runs again.

    What it did change is kept until a half moment, else until forward is over.
    """
    (_, over), begin = view.forward_window(), 2 * view.start + 1
    state_bytes, on_cpu = random_state_bytes(view.graph), is_on_cpu(view.graph)
    of_device, of_another = view.draws
    yield Interval(begin, max(until, over) if of_device else over, state_bytes, FIRST)
    if of_another:
        yield Interval(begin, max(until, over), state_bytes, FIRST)
    for storage in view.call.state:
        changed = view.graph.is_changed(storage, view.start, view.stop)
        changed |= on_cpu and storage in view.moved  # elsewhere nobody looks
        size = view.graph.storages[storage].bytes
        yield Interval(begin, max(until, over) if changed else over, size, FIRST)


def _rerun_ops(view: RegionView) -> Iterator[int]:
    """The ops that run: autocast casts parameters when they are first read.

    An op may save what it reads, and the run ends before it begins.
    """
    casts, ops, stop = dict(view.casts), view.graph.ops, view.saved_stop
    for moment in range(view.start, stop):
        yield from (casts.pop(s) for s in ops[moment].reads if s in casts)
        yield moment
    last = {saved.storage for saved in view.saves if saved.at == stop}
    if stop < view.stop and not last.isdisjoint(ops[stop].reads):
        yield from (casts.pop(s) for s in ops[stop].reads if s in casts)


def _rerun_module(
    view: RegionView, made: Iterable[tuple[int, Saved]], first: int, effect: Effect
) -> None:
    """Run all ops at once, in the gap before op ``first``."""
    graph = view.graph
    until: dict[int, int] = {}
    for _, saved in made:
        if saved.used >= first:  # torch's checkpoint gives it to the node for good
            until[saved.storage] = max(until.get(saved.storage, 0), saved.used)
    gap = 2 * first
    found = sum(graph.storages[storage].bytes for storage in view.call.state)
    found += random_state_bytes(graph) * sum(view.draws)
    effect.made.append(Interval(gap, gap, found))  # to be put back afterwards
    alive = sum(one.bytes for one in effect.made if one.start <= gap <= one.stop)
    most_bytes = alive
    born: dict[int, tuple[int, int]] = {}  # nobody wants it: its bytes and its tick
    read_last: dict[int, list[int]] = defaultdict(list)  # of those, by op
    tick = 0
    for moment in _rerun_ops(view):
        begun = tick
        tick += 1
        for storage in graph.creates[moment]:
            size = graph.storages[storage].bytes
            alive += size
            if storage in until:
                stop = 2 * until[storage] + 1
                effect.made.append(Interval(gap, stop, size, tick))
            else:
                born[storage] = size, tick
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
            size, since = born.pop(storage)
            alive -= size
            effect.made.append(Interval(gap, gap, size, since, tick))
            tick += 1
        effect.steps.append(moment)
    effect.made += (Interval(gap, gap, *one) for one in born.values())  # gone with it
    effect.spikes[gap] = [most_bytes]


def _not_rebuildable(
    view: RegionView, overwritten_inputs: Collection[int]
) -> PlanError:
    names = sorted(
        {op.name for op in view.graph.ops if {*overwritten_inputs} & {*op.writes}}
    )
    return PlanError(
        f"cannot rebuild {view.name}: {', '.join(names)} changes its input in place",
        needed="regions whose inputs are still there in backward",
        hint="leave this call out of the plan, or name a smaller one",
    )
