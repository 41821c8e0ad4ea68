"""A step whose optimizer updates groups of parameters, one after the other.

The ``foreach`` kernels of ``torch.optim`` make lists of temporaries as long as the list
of parameters. Here every op on such lists is divided into one op for each group, in the
order in which ``training/grouped_updates.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Op, Storage
from ckplan.graph.updates import constants_of_update

_LIST = "_foreach_"
_GROUPS = 16  # about so many of them
_Order = dict[int, int]  # storage -> number of its parameter


def group_size(graph: Graph) -> str | None:
    """The size of groups that leaves small temporaries, such as ``64MiB``.

    Returns:
        A sixteenth of what an op of the update makes, or the largest parameter if that
        is more; None if groups would make nothing smaller.
    """
    update = graph.ops[graph.backward_stop :]
    made = (
        sum(graph.storages[one].bytes for one in op.creates)
        for op in update
        if op.name.startswith(_LIST)
    )
    most = max(made, default=0)
    sizes = (one.bytes for one in graph.storages if one.kind == "parameter")
    group_bytes = max(max(sizes, default=0), most // _GROUPS)
    if group_bytes >= most:
        return None
    if group_bytes > 1 << 20:
        return f"{-(-group_bytes >> 20)}MiB"
    return f"{-(-group_bytes // 1024)}KiB"


def with_grouped_update(graph: Graph, size: str, group_bytes: int) -> Graph:
    """The step with an update in groups of parameters.

    Args:
        graph: The step; its update is one of lists.
        size: Of a group, as ``--optimizer adamw:foreach=SIZE`` has it.
        group_bytes: The same in bytes.

    Raises:
        PlanError: The update is not of one list of parameters, or a command line cannot
            say how it runs: an optimizer that the workload brings.
    """
    name, _, kernel = str(graph.options.get("optimizer", "default")).partition(":")
    if name in ("own", "none") or kernel not in ("", "foreach"):
        raise _refuse(graph, f"its optimizer is '{name}{kernel and ':' + kernel}'")
    if any(graph.options.get(key) for key in ("clip", "scaler")):
        raise _refuse(graph, "its gradients are clipped or scaled in lists, too")
    stop, end = graph.backward_stop, len(graph.ops)
    update = graph.ops[stop:]
    order = _order(graph, update)
    groups = _groups(graph, order, group_bytes)
    count, later = len(update), stop + len(groups) * len(update)
    constants = constants_of_update(graph)

    def placed(storage: int, number: int) -> Storage:
        """A storage of a group, whose ops run later than in the whole update."""
        number %= len(groups)  # -1: of no group, alive until the end
        one = graph.storages[storage]
        maker, last = one.maker, one.last
        if maker >= stop or storage in constants:
            maker += number * count
        if last >= end:
            last += later - end
        elif last >= stop:
            last += number * count
        return replace(one, maker=maker, last=last)

    number_of = {place: n for n, group in enumerate(groups) for place in group}
    used = {one for op in update for one in (*op.reads, *op.writes, *op.outputs)}
    numbers = used - order.keys()  # on the device: every group has its own
    storages = [
        placed(n, number_of[order[n]] if n in order else 0 if n in used else -1)
        for n in range(len(graph.storages))
    ]
    ops: list[Op] = []
    for number, group in enumerate(groups):
        own: dict[int, int] = {}
        for storage in sorted(numbers) if number else ():
            own[storage] = len(storages)
            storages.append(placed(storage, number))
        ops += (_part(graph, op, order, group, own) for op in update)
    title = f"{'adamw' if name == 'default' else name}:foreach={size}"
    return replace(
        graph,
        options={**graph.options, "optimizer": title},
        ops=(*graph.ops[:stop], *ops),
        storages=tuple(storages),
    )


def _order(graph: Graph, update: Sequence[Op]) -> _Order:
    """Storages of lists, each with the number of its parameter.

    Every list of an op is in the order of the parameters, and what is not a list, a
    number on the device, follows behind.
    """
    lists = [op for op in update if op.name.startswith(_LIST)]
    if not lists or len(lists) < len(update):
        raise _refuse(graph, "its update is not of lists alone")
    length = min(len(op.writes) or len(op.outputs) for op in lists)
    found: _Order = {}
    for op in lists:
        for storages in (op.reads, op.writes, op.outputs):
            if len(storages) % length not in (0, 1):
                raise _refuse(graph, "its lists are of several lengths")
            for place, one in enumerate(storages[: len(storages) // length * length]):
                if found.setdefault(one, place % length) != place % length:
                    raise _refuse(graph, "parameters share their memory")
    return found


def _groups(graph: Graph, order: _Order, most: int) -> list[range]:
    """Numbers of parameters, of at most so many bytes together, in order."""
    parameters = [one for one in order if graph.storages[one].kind == "parameter"]
    sizes = {order[one]: graph.storages[one].bytes for one in parameters}
    numbers = list(range(len(parameters)))
    if sorted(sizes) != numbers or {*order.values()} != sizes.keys():
        raise _refuse(graph, "its lists are not of parameters")
    edges, held = [0], 0
    for number in range(len(sizes)):
        if held and held + sizes[number] > most:
            edges.append(number)
            held = 0
        held += sizes[number]
    edges.append(len(sizes))
    return [range(a, b) for a, b in pairwise(edges)]


def _part(graph: Graph, op: Op, order: _Order, group: range, own: dict[int, int]) -> Op:
    """An op on one group; seconds, FLOPs and bytes by its share of the bytes."""

    def of_group(storages: Iterable[int]) -> tuple[int, ...]:
        return tuple(
            own.get(one, one) for one in storages if order.get(one, group[0]) in group
        )

    touched = {*op.reads, *op.writes, *op.outputs}
    whole = sum(graph.storages[one].bytes for one in touched)
    mine = sum(
        graph.storages[one].bytes
        for one in touched
        if order.get(one, group[0]) in group
    )
    share = mine / (whole or 1)
    return replace(
        op,
        reads=of_group(op.reads),
        writes=of_group(op.writes),
        outputs=of_group(op.outputs),
        flops=round(op.flops * share),
        moved_bytes=round(op.moved_bytes * share),
        seconds=op.seconds * share,
    )


def _refuse(graph: Graph, why: str) -> PlanError:
    return PlanError(
        f"cannot update {graph.model} in groups: {why}",
        needed="an optimizer with foreach kernels, by name, without clipping",
        hint="profile --optimizer adamw:foreach, or leave out --allow groups",
    )
