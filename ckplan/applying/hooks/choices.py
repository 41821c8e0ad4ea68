"""A planned region of one module, with its counters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

from ckplan.applying.guards.checker import GuardChecker
from ckplan.applying.guards.guards import make_guards
from ckplan.applying.guards.program_cache import ForwardKind, ProgramCache
from ckplan.applying.moving.moved import FILE, OF_ENCODED
from ckplan.applying.moving.mover import Mover
from ckplan.applying.recording.op_keys import OpKey, key_of
from ckplan.applying.recording.recorder import Recorder
from ckplan.graph.fqn import Call, call_name
from ckplan.plan.plan import PlannedRegion


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """Counters of one planned call."""

    call: str  # FQN#n, or the FQN where every call is planned
    by: str
    runs: int  # forwards that were regions
    recorded: int  # those recorded op by op, at least after a guard miss
    kept: int  # those that missed too late, and kept the rest
    dropped_bytes: int  # by its last run; 0 for re-runs, which do not count
    missing: tuple[str, ...]  # saves of the plan that named no op in its last run
    repeatable: bool = True  # False: each forward is recorded op by op


@dataclass(eq=False)
class Choice:
    """A planned region of one module, with its counters."""

    fqn: str  # of the call that begins it
    region: PlannedRegion
    numbers: frozenset[int] | None  # of calls; None for every call
    last: Call | None = None  # that ends it, if it is a run of calls
    top: str = ""  # FQN that op paths are relative to: its module, or a run's maker
    makers: tuple[str, ...] = ()  # FQNs that may call a run's modules, innermost first
    runs: int = 0
    recorded: int = 0
    kept: int = 0
    dropped_bytes: int = 0
    missing: tuple[str, ...] = ()
    repeatable: bool = True  # whether others may repeat the last one recorded whole
    programs: ProgramCache = field(default_factory=ProgramCache)
    inner: list[Choice] = field(default_factory=list)
    mover: Mover = field(default_factory=partial(Mover, None))

    @property
    def title(self) -> str:
        """Its name in errors of its ops; empty for the model."""
        return self.fqn if self.last is None else self.region.title

    @property
    def name(self) -> str:
        """Its name in the status and in errors of the plan."""
        if self.last is not None:
            return self.region.title
        if self.numbers is None:
            return self.fqn or "."
        return ", ".join(call_name(self.fqn, n) for n in sorted(self.numbers))

    @property
    def ends(self) -> tuple[str, ...]:
        """FQNs of the modules with whose calls it begins and ends."""
        return (self.fqn,) if self.last is None else (self.fqn, self.last[0])

    @property
    def reach(self) -> str:
        """FQN of a module that contains the whole region."""
        return self.makers[-1] if self.makers else self.top

    def below(self, running: Collection[str]) -> None:
        """Make op paths relative to the innermost maker that runs."""
        self.top = next((fqn for fqn in self.makers if fqn in running), self.top)

    def begin(self, name: str, kind: ForwardKind) -> Recorder | GuardChecker:
        """Begin a forward: check guards if a program is known, else record."""
        self.programs.keep_written()
        expected = kind.program
        record = partial(Recorder, name, self.top, self.saves, self.encodes, self.mover)
        if expected is None:
            recorder = record(checks_digest=not self.recorded)
            recorder.log.broken = kind.missed_late
            return recorder
        record = partial(record, checks_digest=kind.is_static)
        return GuardChecker(name, self.top, expected, record, self.mover)

    def end(
        self,
        region: Recorder | GuardChecker,
        kind: ForwardKind,
        missing: Iterable[str],
        *,
        learn: bool,
    ) -> None:
        """End one forward and update the counters.

        Args:
            region: The forward.
            kind: The forwards that it is one of.
            missing: Saves of nested regions that named no op.
            learn: Whether to store its program: the forward did not raise.
        """
        handle = region.handle
        region.close()
        self.programs.wait(handle)
        self.runs += 1
        recorder = region.recorder
        if recorder is not None:
            self.recorded += 1
            self.dropped_bytes = recorder.packing.dropped_bytes
            self.missing = (*self.missing_of(recorder.names.found), *missing)
            program = make_guards(recorder) if learn else None
            kind.learn(program)
        region.release()
        if isinstance(region, Recorder):
            self.repeatable = program is not None or not learn
            return
        if region.guards_hold:
            self.dropped_bytes = region.expected.dropped_bytes
            kind.repeat()
        elif learn:
            self.kept += region.kept
            kind.differ(late=region.kept)

    def missing_of(self, found: Collection[OpKey]) -> Iterator[str]:
        """Saves and encodings of the plan that named no op."""
        return (str(op) for op in self.region.ops if key_of(op) not in found)

    def within(self) -> Iterator[tuple[Choice, Choice]]:
        """Pairs of an outer region and a nested one, outermost first."""
        for inner in self.inner:
            yield self, inner
            yield from inner.within()

    def status(self) -> RegionStatus:
        """The counters, for users."""
        return RegionStatus(
            call=self.name,
            by=self.region.by,
            runs=self.runs,
            recorded=self.recorded,
            kept=self.kept,
            dropped_bytes=self.dropped_bytes,
            missing=self.missing,
            repeatable=self.repeatable,
        )

    @cached_property
    def saves(self) -> dict[OpKey, frozenset[int] | None]:
        """Outputs to keep, as the recorder takes them."""
        found: dict[OpKey, frozenset[int] | None] = {}
        for op in self.region.save:
            outputs = found.get(key_of(op), frozenset())
            if op.output is None or outputs is None:
                found[key_of(op)] = None
            else:
                found[key_of(op)] = outputs | {op.output}
        return found

    @cached_property
    def encodes(self) -> dict[OpKey, dict[int | None, str]]:
        """Outputs to encode or move, as the recorder takes them."""
        found: dict[OpKey, dict[int | None, str]] = {}
        for op, form in self.region.encode:
            found.setdefault(key_of(op), {})[op.output] = form
        for op in self.region.offload:
            forms = found.setdefault(key_of(op), {})
            same = [one for one in forms if op.output in (one, None)]
            for one in same:  # its encoded form moves
                forms[one] += OF_ENCODED + FILE
            if op.output not in same:
                forms[op.output] = FILE
        return found
