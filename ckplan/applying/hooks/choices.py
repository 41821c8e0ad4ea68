"""What a plan chooses for one module of a model, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

from ckplan.applying.guards.checker import GuardChecker
from ckplan.applying.guards.guards import make_guards
from ckplan.applying.guards.program_cache import ProgramCache
from ckplan.applying.recording.op_keys import OpKey, key_of
from ckplan.applying.recording.recorder import Recorder
from ckplan.graph.fqn import Call, call_name
from ckplan.plan.plan import PlannedRegion


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What one planned call did so far."""

    call: str  # FQN#n, or the FQN where every call is planned
    by: str
    runs: int  # forwards that were regions
    recorded: int  # those written down op by op, if only from where they differed
    kept: int  # those that differed where that was seen too late, and kept the rest
    dropped_bytes: int  # by its last run; 0 for re-runs, which do not count
    missing: tuple[str, ...]  # saves of the plan that named no op in its last run


@dataclass(eq=False)
class Choice:
    """A planned region of one module, and what it did."""

    fqn: str  # of the call that begins it
    region: PlannedRegion
    numbers: frozenset[int] | None  # of calls; None for every call
    last: Call | None = None  # that ends it, if it is a run of calls
    top: str = ""  # what paths are below: the FQN of its module, or of a run's maker
    makers: tuple[str, ...] = ()  # what may make the calls of a run, innermost first
    runs: int = 0
    recorded: int = 0
    kept: int = 0
    dropped_bytes: int = 0
    missing: tuple[str, ...] = ()
    programs: ProgramCache = field(default_factory=ProgramCache)
    inner: list[Choice] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What errors of its ops call it; empty for the model."""
        return self.fqn if self.last is None else self.region.title

    @property
    def name(self) -> str:
        """What status and errors of the plan call it."""
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
        """FQN of a module that all of it is in."""
        return self.makers[-1] if self.makers else self.top

    def below(self, running: Collection[str]) -> None:
        """Begin its paths below the innermost of its makers that runs."""
        self.top = next((fqn for fqn in self.makers if fqn in running), self.top)

    def begin(self, name: str, key: Hashable) -> Recorder | GuardChecker:
        """Watch a forward: call by call if one like it is known, else op by op."""
        expected = self.programs.find(key)
        record = partial(Recorder, name, self.top, self.saves, self.encodes)
        if expected is None:
            recorder = record(checks_digest=not self.recorded)
            recorder.log.broken = not self.programs.can_guard(key)
            return recorder
        checks_digest = self.programs.is_static(key)
        return GuardChecker(
            name, self.top, expected, partial(record, checks_digest=checks_digest)
        )

    def end(
        self,
        region: Recorder | GuardChecker,
        key: Hashable,
        missing: Iterable[str],
        *,
        learn: bool,
    ) -> None:
        """Note what one forward of it did, and which saves inside named no op.

        Args:
            region: The forward.
            key: What it has in common with others that may do the same.
            missing: Those saves.
            learn: Whether others may be compared with it: it did not raise.
        """
        region.close()
        self.runs += 1
        recorder = region.recorder
        if recorder is not None:
            self.recorded += 1
            self.dropped_bytes = recorder.packing.dropped_bytes
            self.missing = (*self.missing_of(recorder.names.found), *missing)
            if learn:
                self.programs.learn(key, make_guards(recorder))
        region.release()
        if isinstance(region, Recorder):
            return
        if region.guards_hold:
            self.dropped_bytes = region.expected.dropped_bytes
            self.programs.repeat(key)
        elif learn:
            self.kept += region.kept
            self.programs.differ(key, late=region.kept)

    def missing_of(self, found: Collection[OpKey]) -> Iterator[str]:
        """Saves and encodings of the plan that named no op."""
        return (str(op) for op in self.region.ops if key_of(op) not in found)

    @property
    def names_ops(self) -> bool:
        """Whether it, or a region inside, says which ops it keeps."""
        return bool(self.region.ops) or any(one.names_ops for one in self.inner)

    def within(self) -> Iterator[tuple[Choice, Choice]]:
        """The regions inside, each behind the one around it."""
        for inner in self.inner:
            yield self, inner
            yield from inner.within()

    def status(self) -> RegionStatus:
        """For people."""
        return RegionStatus(
            call=self.name,
            by=self.region.by,
            runs=self.runs,
            recorded=self.recorded,
            kept=self.kept,
            dropped_bytes=self.dropped_bytes,
            missing=self.missing,
        )

    @cached_property
    def saves(self) -> dict[OpKey, frozenset[int] | None]:
        """What to keep, as the recorder takes it."""
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
        """What to keep in a smaller form, as the recorder takes it."""
        found: dict[OpKey, dict[int | None, str]] = {}
        for op, form in self.region.encode:
            found.setdefault(key_of(op), {})[op.output] = form
        return found
