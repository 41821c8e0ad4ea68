"""Training steps in child processes, of which only one runs at a time."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckplan.errors import CkplanError, VerifyError
from ckplan.training.loading import WorkloadSpec
from ckplan.training.remembered import ScriptSpec
from ckplan.training.step import DEFAULT_TRAINING, Training
from ckplan.verifying.closeness import Reference
from ckplan.verifying.fork_server import ForkedProcess, can_fork, fork_to
from ckplan.verifying.phases import TimedStep
from ckplan.verifying.worker import (
    TIMED_STEP,
    FirstSteps,
    Job,
    ScriptEndedError,
    out_of_memory,
)

if TYPE_CHECKING:
    from ckplan.plan.plan import Plan
    from ckplan.tracing.costs.calibrate import Progress

_KILLED = -9  # SIGKILL, which the kernel sends when memory runs out
_PATIENCE_SECONDS = 5.0
_Self = TypeVar("_Self", bound="StepProcess")
_T = TypeVar("_T")


class Steps(Protocol):
    """Something that takes training steps and measures their seconds."""

    def step(self) -> float:
        """Take one step; returns its seconds."""


class StepProcess:
    """A workload that trains in a child process, with a plan or without.

    Several may be alive at once; each is idle except during a call of its methods.
    Use it in a ``with`` statement, so that the process always ends:

        with StepProcess(spec) as unplanned, StepProcess(spec, plan) as planned:
            print(unplanned.first_steps().peak_bytes, planned.first_steps().peak_bytes)

    Args:
        spec: Where the workload comes from.
        plan: Plan to apply to the model before its first step, or None.
        training: Training options.
        seed: Seed of all random numbers, set before the workload is built.
        device: Device of the training.
        cap_bytes: Most bytes that a GPU's allocator may reserve, or None.
        halvings: Number of times that its batch is halved.
        spill: Folder that offloaded tensors move to.
        reference: File that results are compared through, for close plans.
        one_thread: Whether CPU kernels run on one thread, which fixes the order of
            sums.
    """

    main = "from ckplan.verifying.worker import main; main()"  # code of the child
    environ: Mapping[str, str] = {}  # of the child, beside that of this process

    def __init__(
        self,
        spec: WorkloadSpec | ScriptSpec,
        plan: Plan | None = None,
        training: Training = DEFAULT_TRAINING,
        seed: int = 0,
        device: str = "cpu",
        cap_bytes: int | None = None,
        halvings: int = 0,
        spill: Path | None = None,
        reference: Reference | None = None,
        *,
        one_thread: bool = False,
    ) -> None:
        self._environ = {"OMP_NUM_THREADS": "1"} if one_thread else {}
        options = (training, seed, device, cap_bytes, halvings, spill, reference)
        self._job = Job(spec, plan, *options)
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def start(self) -> None:
        """Start the process without waiting for it; restarts a closed one."""
        self.close()
        code = _bootstrap(self.main)
        environ = {**os.environ, **self.environ, **self._environ}
        if self._job.device == "cpu" and can_fork():
            self._process = fork_to(code, environ)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                start_new_session=True,  # Ctrl-C reaches only the parent
            )

    def first_steps(self) -> FirstSteps:
        """Build the workload and take two steps; memory of the second is measured.

        Raises:
            OutOfMemoryError: The step runs out of memory.
            CkplanError: The workload, the plan or a step fails.
        """
        found: FirstSteps = self._ask(self._job)
        return found

    def step(self) -> float:
        """Take one more step; returns its seconds, raises as ``first_steps`` does."""
        return self.timed_step().seconds

    def timed_step(self) -> TimedStep:
        """The same, with the seconds of each phase."""
        found: TimedStep = self._ask(TIMED_STEP)
        return found

    def close(self, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """End the process, by force after ``patience_seconds``; idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # it may have died already
            process.stdin.close()
        try:
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(_PATIENCE_SECONDS if kind is None else 0.0)

    @property
    def pid(self) -> int:
        """Id of the process, which was started."""
        return self._running().pid

    def _ask(self, request: object) -> Any:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            reply = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._died() from None
        if isinstance(reply, CkplanError):
            raise reply
        return reply

    def _running(self) -> subprocess.Popen[bytes] | ForkedProcess:
        assert self._process is not None, "internal error: the process was not started"
        return self._process

    def _died(self) -> VerifyError:
        code = self._running().wait()
        if code == _KILLED:
            return out_of_memory(
                self._job, "was killed, probably because memory ran out"
            )
        ending = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return VerifyError(
            f"{self._job.title} ended its process with {ending}",
            needed="a training step that runs to its end",
            hint="run a training step of the workload alone in Python",
        )


class ScriptProcess(StepProcess):
    """The same for the steps of a script, whose own loop takes them."""

    main = "from ckplan.verifying.script_worker import main; main()"
    # Both sides hash alike; and the allocator's log is not told of older blocks.
    environ: Mapping[str, str] = {"PYTHONHASHSEED": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def interleave(
    processes: Sequence[Steps], rounds: int, progress: Progress | None = None
) -> list[list[float]]:
    """Time interleaved steps, so that other load on the machine affects all equally.

    Args:
        processes: Processes to time; every second round runs them in reverse order.
        rounds: Number of steps of each process.
        progress: Callback that reports finished rounds.

    Returns:
        Seconds by process and round.
    """
    return take_turns([process.step for process in processes], rounds, progress)


def take_turns(
    actions: Sequence[Callable[[], _T]],
    rounds: int,
    progress: Progress | None = None,
    what: str = "timing steps",
) -> list[list[_T]]:
    """Call each of ``actions`` once a round, as ``interleave`` does; say what is done.

    Returns:
        What they return, by action and round; of less rounds if a script ends.
    """
    results: list[list[_T]] = [[] for _ in actions]
    for done in range(rounds):
        if progress is not None:
            progress(what, done, rounds)
        order = list(zip(actions, results, strict=True))
        try:
            for action, found in reversed(order) if done % 2 else order:
                found.append(action())
        except ScriptEndedError:
            break
    return results


def _bootstrap(main: str) -> str:
    """Code of a worker with this process's import path; ``__main__`` is not run."""
    return f"import sys; sys.path[:] = {sys.path!r}; {main}"
