"""Comparison of unplanned and planned steps, each in its own process.

If the unplanned step does not fit in memory, the planned step is compared with a step
that recomputes every layer, and with the unplanned step at a smaller batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from ckplan.errors import CkplanError
from ckplan.verifying.closeness import is_within, stated_difference
from ckplan.verifying.phases import TimedStep
from ckplan.verifying.step_process import StepProcess, take_turns
from ckplan.verifying.worker import FirstSteps, OutOfMemoryError, Result

if TYPE_CHECKING:
    from ckplan.plan.plan import Plan
    from ckplan.tracing.costs.calibrate import Progress

NOTE_NOT_COMPARED = (
    "the unplanned step does not fit in memory: results were not compared"
)
NOTE_INSTEAD = (
    "the unplanned step does not fit in memory: compared with a step that reruns every "
    "layer that the trace names"
)
NOTE_FEWER = (
    "the unplanned step does not fit in memory: the two steps were compared at {} of "
    "{} rows of the batch"
)
NOTE_ENDED = (
    "the script ended after {} of {} timed steps: --steps, or more steps of the script"
)
NOTE_NOT_TOGETHER = (
    "the unplanned and the planned process do not fit in memory together: not timed"
)
_T = TypeVar("_T")
_MOST_REPEATS = 2
_MOST_HALVINGS = 10


class StepPair:
    """An unplanned and a planned process; only the planned one if both do not fit."""

    def __init__(
        self,
        sides: Sequence[Callable[..., StepProcess]],
        start_substitute: Callable[[], StepProcess | None],
        running: ExitStack,
        plan: Plan | None = None,
    ) -> None:
        """Start both, or later the substitute for a step that does not fit.

        Args:
            sides: Start the unplanned and the planned process.
            start_substitute: Starts what stands in for the unplanned one.
            running: Ends both.
            plan: The plan, which may state that results are close.
        """
        self._stated = stated_difference(plan)
        self.notes: list[str] = []
        self.fits = True  # whether the unplanned step fits in memory
        self._instead = start_substitute
        self._sides = sides
        self._unplanned, self._planned = (
            running.enter_context(side()) for side in self._sides
        )
        self._together = True

    def first_steps(self, tell: Progress) -> tuple[FirstSteps | None, FirstSteps]:
        """Take the first steps of both in sequence; None if the unplanned do not fit.

        CPU kernels of torch are not always deterministic. Steps that differ are
        repeated in fresh processes, to separate nondeterminism from a real difference.
        If unplanned runs differ from each other, both are repeated on one thread.
        """
        unplanned, planned = self._once(tell)
        if unplanned is None or not self.fits or unplanned.digests == planned.digests:
            return unplanned, planned
        if is_within(planned.differences, self._stated):
            return unplanned, planned
        seen = [[unplanned], [planned]]
        for side, start in [*enumerate(self._sides)] * _MOST_REPEATS:
            tell("results differ: repeating steps", len(seen[0]) + len(seen[1]) - 2, 4)
            with start() as process:
                try:
                    seen[side].append(process.first_steps())
                except OutOfMemoryError:
                    break
            for without, with_plan in product(*seen):
                if without.digests == with_plan.digests:
                    self.notes.append(_chance(seen, "two runs that agree"))
                    return without, with_plan
        if num_results(seen[0]) > 1:
            one_threaded = self._on_one_thread(tell)
            if one_threaded and one_threaded[0] == one_threaded[1]:
                self.notes.append(_chance(seen, "runs on one thread"))
                planned = replace(planned, digests=unplanned.digests)
        return unplanned, planned

    def _on_one_thread(self, tell: Progress) -> list[dict[Result, str]]:
        """Digests of both on one thread, where the order of summation is fixed."""
        found = []
        for side, start in enumerate(self._sides):
            tell("results differ: repeating steps on one thread", side, 2)
            with start(one_thread=True) as process:
                try:
                    found.append(process.first_steps().digests)
                except OutOfMemoryError:
                    return []
        return found

    def _once(self, tell: Progress) -> tuple[FirstSteps | None, FirstSteps]:
        tell("running steps without the plan", 0, 2)
        unplanned: FirstSteps | None = None
        try:
            unplanned = self._unplanned.first_steps()
        except OutOfMemoryError:
            self.fits = False
            unplanned = self._other(tell)
            self._separate(NOTE_INSTEAD if unplanned else "")
        tell("running steps with the plan", 1, 2)
        try:
            return unplanned, self._planned.first_steps()
        except OutOfMemoryError:
            if not self._together:
                raise
        self._separate(NOTE_NOT_TOGETHER)
        self._planned.start()
        return unplanned, self._planned.first_steps()

    def _other(self, tell: Progress) -> FirstSteps | None:
        """First steps of the substitute for the unplanned step, if it fits."""
        self._unplanned.close()
        process = self._instead()
        if process is None:
            return None
        tell("running steps with every layer rerun", 0, 2)
        with process:
            try:
                return process.first_steps()
            except (
                CkplanError
            ):  # it does not fit either, or the trace is of another model
                return None

    def timed_steps(
        self, steps: int, tell: Progress
    ) -> tuple[list[TimedStep], list[TimedStep]]:
        """Unplanned and planned steps, interleaved."""
        return self.in_turns(lambda one: one.timed_step(), steps, tell)

    def in_turns(
        self,
        action: Callable[[StepProcess], _T],
        rounds: int,
        tell: Progress,
        what: str = "timing steps",
    ) -> tuple[list[_T], list[_T]]:
        """What an action returns of both, interleaved.

        Of the planned one alone if both do not fit in memory together; nothing of
        either if that is found out meanwhile.
        """
        planned = partial(action, self._planned)
        if not self._together:
            return [], take_turns([planned], rounds, tell, what)[0]
        pair = [partial(action, self._unplanned), planned]
        try:
            unplanned, found = take_turns(pair, rounds, tell, what)
        except OutOfMemoryError:
            self._separate(NOTE_NOT_TOGETHER)
            return [], []
        if len(found) < rounds:
            self.notes.append(NOTE_ENDED.format(len(found), rounds))
        return unplanned, found

    def _separate(self, note: str) -> None:
        self._unplanned.close()
        self._together = False
        self.notes += [note] * bool(note)


def first_steps_at_smaller_batch(
    start: Callable[[Plan | None, int], StepProcess],
    plan: Plan | None,
    tell: Progress,
) -> tuple[FirstSteps, FirstSteps] | None:
    """First steps of both at the largest halved batch whose unplanned step fits.

    The batch is halved repeatedly. None if no such batch fits.
    """
    for halvings in range(1, _MOST_HALVINGS + 1):
        tell("running steps without the plan at a smaller batch", halvings - 1, 0)
        try:
            with start(None, halvings) as process:
                process.first_steps()
        except OutOfMemoryError:
            continue
        except CkplanError:  # no rows are left, or the model requires the whole batch
            return None
        sides = [partial(start, chosen, halvings) for chosen in (None, plan)]
        with ExitStack() as running:
            pair = StepPair(sides, lambda: None, running, plan)
            unplanned, planned = pair.first_steps(tell)
        return (unplanned, planned) if unplanned else None
    return None


def differing_results(
    *compared: tuple[FirstSteps | None, FirstSteps] | None,
) -> tuple[Result, ...] | None:
    """Results that differ, in order; None if there is no reference."""
    pairs = [(old.digests, new.digests) for old, new in filter(None, compared) if old]
    if not pairs:
        return None
    found = {
        key: None
        for old, new in pairs
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }
    return tuple(found)


def comparison_notes(
    reference: FirstSteps | None,
    planned: FirstSteps,
    fewer: tuple[FirstSteps, FirstSteps] | None,
) -> Iterator[str]:
    """Notes on a comparison other than with the unplanned step at the whole batch."""
    if fewer is not None:
        yield NOTE_FEWER.format(fewer[0].rows, planned.rows)
    elif reference is None:
        yield NOTE_NOT_COMPARED


def _chance(seen: Sequence[Sequence[FirstSteps]], compared: str) -> str:
    """Note for steps that are equal in some runs only."""
    without, with_plan = seen
    return (
        f"the workload is not deterministic: {len(without)} runs without the plan "
        f"gave {num_results(without)} different results, {len(with_plan)} runs with it "
        f"gave {num_results(with_plan)}; {compared} were compared"
    )


def num_results(runs: Sequence[FirstSteps]) -> int:
    """Number of distinct results."""
    return len({repr(sorted(one.digests.items())) for one in runs})
