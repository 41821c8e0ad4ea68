"""The forward of a region as the simulator sees it: values and saved tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    BATCH_NORMS,
    BEFORE_STEP,
    OWN_GENERATOR,
    Call,
    Encoding,
    Saved,
)
from ckplan.plan.region import PROGRAM, Region, check_apart, overlap_error
from ckplan.simulating.program import (
    EXTERNAL,
    Flow,
    NestedRegion,
    Program,
    compile_program,
)

MOVED = "moved"
"""Name of the form of a value that is elsewhere, where it takes no bytes."""


@dataclass(frozen=True, slots=True)
class MovedForm(Encoding):
    """The form of a value that is elsewhere."""

    small_bytes: int = 0  # of the encoded form that moves in place of it, if one does


def move_of(
    place: tuple[int, int], small: Encoding | None = None, seconds: float = 0.0
) -> MovedForm:
    """The form of an output that moves, as it is or encoded.

    Args:
        place: The op, and the output of it.
        small: Its encoded form, if that one moves.
        seconds: That the copies take.
    """
    if small is None:
        return MovedForm(*place, MOVED, 0, 0, 0, seconds, 0.0)
    spaces = small.encode_workspace_bytes, small.decode_workspace_bytes
    taken = small.encode_seconds + seconds, small.decode_seconds
    return MovedForm(*place, MOVED, 0, *spaces, *taken, small.bytes)


class RegionView:
    """The values and saved tensors of one call, or of a run of sibling calls."""

    def __init__(self, graph: Graph, call: int, last: int) -> None:
        self.graph = graph
        self.unit = call, None if last == call else last
        self.name = str(graph.calls[call])
        if last != call:
            self.name += f" to {graph.calls[last]}"
        self.start = graph.calls[call].start
        self.stop = graph.calls[last].stop
        found = graph.saved_in(call, last)
        self.saves: list[Saved] = [graph.saved[index] for index in found]
        # (index, saved tensor) of those whose storage the region makes.
        self.numbered = [*zip(found, self.saves, strict=True)]
        self.made = [one for one in self.numbered if self.inside(one[1].storage)]
        # A rerun must execute the ops before this one to make all saved tensors.
        self.saved_stop = max([self.start, *(saved.packed_at for saved in self.saves)])

    @property
    def call(self) -> Call:
        """The call, or the first of the run."""
        return self.graph.calls[self.unit[0]]

    @cached_property
    def storages(self) -> dict[int, None]:
        """Storages that the ops read, change or make, in order of first use."""
        ops = self.graph.ops[self.start : self.stop]
        return dict.fromkeys(
            storage for op in ops for storage in (*op.reads, *op.writes, *op.outputs)
        )

    @cached_property
    def flow(self) -> Flow:
        """The values of the forward."""
        return self._forward[0]

    @cached_property
    def packed(self) -> list[tuple[int, Saved, int]]:
        """(index, saved tensor, value) of the saved tensors made inside."""
        return self._forward[1]

    @cached_property
    def packed_values(self) -> frozenset[int]:
        """Values that autograd saves."""
        return frozenset(value for _, _, value in self.packed)

    @cached_property
    def _forward(self) -> tuple[Flow, list[tuple[int, Saved, int]]]:
        flow, packed, position = Flow(), [], self.start
        for index, saved in self.made:
            for op in self.graph.ops[position : saved.packed_at]:
                flow.add(op)
            position = max(position, saved.packed_at)
            packed.append((index, saved, flow.value(saved.storage)))
        for op in self.graph.ops[position : self.stop]:
            flow.add(op)
        return flow, packed

    @cached_property
    def varies(self) -> bool:
        """Whether the engine records every forward anew, to rebuild it once.

        Values decide how large tensors are, so each step runs other ops; or it draws
        from a generator of its own, whose state no later forward can be told to have.
        """
        found = self.graph.hazards_in(*self.unit)
        return self.draws[1] or any(hazard.kind == "shapes" for hazard in found)

    @cached_property
    def statistics(self) -> dict[int, int]:
        """Value of running statistics that a norm reads -> first step that reads it.

        The region keeps a copy: norms in training mode update the statistics without
        an in-place op that torch reports.
        """
        flow = self.flow
        found: dict[int, int] = {}
        for step, running in self._norms(train=False):
            for value in flow.inputs[step]:
                of_it = flow.storage_of[value] in running
                if of_it and flow.maker_of[value] == EXTERNAL:
                    found.setdefault(value, step)
        return found

    @cached_property
    def moved(self) -> set[int]:
        """Running statistics that norms update, without an in-place op."""
        return {storage for _, both in self._norms(train=True) for storage in both}

    def _norms(self, *, train: bool) -> Iterator[tuple[int, Sequence[int]]]:
        """(step, running statistics) of batch norms in training or evaluation mode."""
        for step, op in enumerate(self.graph.ops[self.start : self.stop]):
            if op.name in BATCH_NORMS:
                of_batch = self.graph.storages[op.outputs[1]]
                if train == bool(of_batch.bytes):
                    yield step, op.reads[-2:]

    @cached_property
    def draws(self) -> tuple[bool, bool]:
        """Whether forward draws from the device's generator, and from another one."""
        hazards = self.graph.hazards_in(*self.unit)
        own = {(h.call, h.reason) for h in hazards if h.reason.endswith(OWN_GENERATOR)}
        random = (op for op in self.graph.ops[self.start : self.stop] if op.random)
        found = {(op.call, f"{op.name} {OWN_GENERATOR}") in own for op in random}
        return False in found, True in found

    def inside(self, storage: int) -> bool:
        """Whether the region makes the storage."""
        return self.start <= self.graph.storages[storage].maker < self.stop

    def forward_window(self) -> tuple[int, int]:
        """First and last half moment of the forward."""
        return 2 * self.start, 2 * self.stop - 1

    def backward_window(self) -> tuple[int, int]:
        """First and last half moment in which backward uses the saved tensors.

        If backward reads none of them, the half moments at which it frees those made
        inside; (-1, -1) if there are none.
        """
        spans = [(s.unpacked_at, s.last_held) for s in self.saves if s.unpacked_at >= 0]
        if not spans:
            spans = [(s.last_held, s.last_held) for _, s in self.made]
        first = min((start for start, _ in spans), default=-1)
        last = max((stop for _, stop in spans), default=-1)
        return (2 * first, 2 * last + 1) if spans else (-1, -1)

    def external(self) -> set[int]:
        """Storages that the ops use, and that an op before the region makes."""
        storages = self.graph.storages
        return {
            storage
            for storage in self.storages
            if not self.inside(storage) and storages[storage].maker != BEFORE_STEP
        }

    @cached_property
    def casts(self) -> dict[int, int]:
        """Cached autocast copy of a parameter -> the op that made it.

        Autocast's cache is empty in backward.
        """
        arguments, casts = self.call.arguments, self.graph.casts
        outside = (s for s in self.storages if s in casts and not self.inside(s))
        return {s: casts[s] for s in outside if s not in arguments}

    @property
    def saved_by_rerun(self) -> list[tuple[int, Saved]]:
        """(index, saved tensor) of those that a rerun makes again."""
        return self.made + [
            one for one in self.numbered if one[1].storage in self.casts
        ]

    def changed_inputs(self, before: int) -> set[int]:
        """Inputs that ops of ``[start, before)`` change in place."""
        graph = self.graph
        step_inputs = {s for s in self.storages if graph.storages[s].kind == "input"}
        inputs = self.external() | step_inputs
        return {s for s in inputs if graph.is_changed(s, self.start, before)}

    def kept_values(self, region: Region) -> set[int]:
        """The values that ``region.save`` names."""
        returned = self.flow.returned
        return {returned[op - self.start][output] for op, output in region.save}

    def encoded_values(self, region: Region) -> dict[int, Encoding]:
        """Value -> its encoding, for values that the region encodes or moves."""
        returned, coding = self.flow.returned, self.graph.encoding_of
        small = region.encode & region.offload
        moved = [
            move_of(place, coding[place] if place in small else None)
            for place in region.offload
        ]
        found = [*(coding[place] for place in region.encode - small), *moved]
        found.sort(key=lambda one: (one.op, one.output))
        return {returned[one.op - self.start][one.output]: one for one in found}

    def parts(self, region: Region) -> tuple[list[NestedRegion], dict[int, int]]:
        """The inner regions as program parts, and saved tensor -> number of its part.

        Raises:
            PlanError: An inner region is not inside the outer one, overlaps another
                one, or cannot be nested.
        """
        parts: list[NestedRegion] = []
        part_of: dict[int, int] = {}
        stack = self._inside_of(region, 0)
        while stack:
            one, around, outer = stack.pop()
            self._check_nested(one, around)
            last = one.call if one.last is None else one.last
            kept = frozenset(self.kept_values(one))
            start, stop = self.graph.calls[one.call].start, self.graph.calls[last].stop
            parts.append(
                NestedRegion(start - self.start, stop - self.start, kept, outer)
            )
            number = len(parts)
            part_of.update(dict.fromkeys(self.graph.saved_in(one.call, last), number))
            stack += self._inside_of(one, number)
        return parts, part_of

    def _inside_of(
        self, around: Region, number: int
    ) -> list[tuple[Region, Region, int]]:
        """(inner, outer, number of outer) for ``around.inner``, the last first."""
        check_apart(self.graph, around.inner)
        inner = sorted(around.inner, key=lambda one: -one.call)
        return [(one, around, number) for one in inner]

    def _check_nested(self, one: Region, around: Region) -> None:
        graph = self.graph
        if {one.by, around.by} != {PROGRAM} or one.encode or one.offload:
            raise PlanError(
                f"cannot nest {graph.calls[one.call]} in {graph.calls[around.call]}",
                needed="by: program for both; no encode or offload for the inner one",
                hint="encode and offload in the outer region, or remove the inner one",
            )
        last = one.call if one.last is None else one.last
        same = (one.call, one.last) == (around.call, around.last)
        inside = graph.is_inside(one.call, around.call, around.last)
        if same or not inside or not graph.is_inside(last, around.call, around.last):
            call, outer = graph.calls[one.call], graph.calls[around.call]
            raise overlap_error(
                call, outer, "is listed as an inner region of, but does not run inside,"
            )

    def wanted(self, region: Region) -> frozenset[int]:
        """Encoded values that backward decodes: for saved tensors that it unpacks.

        A program also decodes for tensors that no backward of this step unpacks.
        """
        _, dropped = self.program(region)
        needed = [
            (value, dropped[index])
            for index, saved, value in self.packed
            if index in dropped and saved.unpacked_at >= 0
        ]
        parts, _ = self.parts(region)
        kept, encoded = self.kept_values(region), self.encoded_values(region)
        return compile_program(self.flow, needed, kept, encoded, parts).decodes

    def program(self, region: Region) -> tuple[Program, dict[int, int]]:
        """The region's program, and dropped saved tensor -> number of its part."""
        kept = self.kept_values(region)
        current = self.flow.is_current
        dropped = [
            (index, value)
            for index, _, value in self.packed
            if not (value in kept and current(value))
        ]
        parts, part_of = self.parts(region)
        needed = [(value, part_of.get(index, 0)) for index, value in dropped]
        encoded = self.encoded_values(region)
        program = compile_program(self.flow, needed, kept, encoded, parts)
        indices = {index: part_of.get(index, 0) for index, _ in dropped}
        used = (s.every_use[-1:] for i, s in self.made if i in indices)
        stop = max((begin for last in used for begin, _ in last), default=-1)
        storage_of = self.flow.storage_of
        late = {
            value
            for value in program.retained
            if self.graph.is_changed(storage_of[value], self.stop, stop)
        }
        return replace(
            program, overwritten_inputs=program.overwritten_inputs | late
        ), indices
