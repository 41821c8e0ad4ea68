"""The child process that runs a script, with a plan or without.

The script runs as under ``python``, and ckplan waits in its hooks: a plan is applied
before the first call of its model. The recorded step is measured, from one update to
the next, as ``ckplan record`` traces it; then each request lets the loop take one more
step. Requests and replies are those of ``worker``.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO
from unittest import mock

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckplan.applying.hooks.plan_warnings import IDLE
from ckplan.errors import CkplanError, WorkloadError
from ckplan.plan.plan import plan_fingerprint
from ckplan.simulating.curve import PHASES
from ckplan.tracing.loop_errors import check_script
from ckplan.tracing.running_script import OP_BY_OP, OpByOp, ScriptEnd, run_script
from ckplan.tracing.watched_loop import WatchedEngine, elements
from ckplan.training.fingerprint import (
    batch_shapes,
    loop_fingerprint,
    parameter_shapes,
)
from ckplan.training.randomness import seed_everything
from ckplan.training.remembered import ScriptSpec
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.verifying.loop_memory import LoopMemory, Memory
from ckplan.verifying.phases import TimedStep
from ckplan.verifying.worker import (
    FirstSteps,
    Job,
    Result,
    ScriptEndedError,
    explain_failure,
    mark,
    replace_plan,
    status_of,
    take_standard_streams,
)
from ckplan.verifying.worker_state import (
    cap_memory,
    digest,
    random_state_digest,
    wait_for,
)

_FORWARD, _BACKWARD, _OPTIMIZER = PHASES
NOTE_OP_BY_OP = f"{OP_BY_OP}, as the plan is for that"


class ScriptWorker:
    """Answers requests from inside of a script."""

    def __init__(self, job: Job, requests: BinaryIO, replies: BinaryIO) -> None:
        assert isinstance(job.spec, ScriptSpec), "internal error: not a script"
        self._job, self._spec = job, job.spec
        self._requests, self._replies = requests, replies
        self._model: nn.Module | None = None
        self._device = torch.device("cpu")
        self._optimizers: list[torch.optim.Optimizer] = []  # in order of first steps
        self._ends = 0  # steps of the optimizer that ends a step of the loop
        self._is_measured = False
        self._in_backward = False
        self._error: CkplanError | None = None
        self._digests: dict[Result, str] = {}
        self._batch: dict[str, str] = {}  # of the largest call of the model
        self._logged, self._calls = ExitStack(), ExitStack()
        self._memory: LoopMemory | None = None
        self._op_by_op = OpByOp()
        self._started = time.perf_counter(), time.process_time()
        self._pid = os.getpid()

    def run(self) -> None:
        """Run the script; the last request is answered by what it ended with."""
        try:
            check_script(self._spec.script)
            warm_up_vector_kernels()
            seed_everything(self._job.seed)
            ended = run_script(self._spec.script, self._watching())
        except CkplanError as error:
            ended = error
        self._reply(self._error or self._explained(ended))

    def _explained(self, ended: BaseException | None) -> CkplanError:
        """The error of a script that ended before it was told to."""
        script, model = self._spec.script, self._spec.model
        if isinstance(ended, SystemExit) and not ended.code:
            ended = None
        if ended is not None:
            return explain_failure(ended, self._job)
        if self._is_measured:
            return ScriptEndedError(
                f"{script} has no step left",
                needed="a step for each one that is timed",
                hint="ckplan verify --steps 0, or more steps of the script",
            )
        what = f"ended before its step {self._spec.step} was over"
        if self._model is None:
            what = f"called no {model} with the parameters of the plan"
        return WorkloadError(
            f"cannot verify the plan: {script} {what}",
            needed=f"the steps of the {model} up to the recorded one",
            hint="ckplan record the script as it is now, and solve again",
        )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A scope in which modules, backwards and optimizers are watched."""
        call_of_torch = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._model is None and self._is_planned(module):
                with self._ending_the_script():
                    self._begin(module)
            return call_of_torch(module, *args, **kwargs)

        engine = WatchedEngine(Variable._execution_engine, self._backward_runs)
        with ExitStack() as stack:
            stack.enter_context(self._logged)
            stack.enter_context(self._op_by_op)
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            patch = mock.patch.object
            stack.enter_context(patch(Variable, "_execution_engine", engine))
            stack.enter_context(self._calls)
            self._calls.enter_context(patch(nn.Module, "__call__", call))
            yield

    @contextmanager
    def _ending_the_script(self) -> Iterator[None]:
        try:
            yield
        except CkplanError as error:
            self._error = error
            raise ScriptEnd from None

    def _is_planned(self, module: nn.Module) -> bool:
        """Whether a module is the model of the plan, and about to train."""
        if type(module).__name__ != self._spec.model or os.getpid() != self._pid:
            return False
        wanted = self._spec.fingerprint.get("parameters")
        found = plan_fingerprint({"parameters": parameter_shapes(module)})
        return torch.is_grad_enabled() and wanted in (None, found["parameters"])

    def _begin(self, model: nn.Module) -> None:
        """The model is about to run for the first time."""
        self._calls.close()
        self._model = model
        self._device = next((p.device for p in model.parameters()), self._device)
        cap_memory(self._job.cap_bytes, self._device)
        replace_plan(self._job.plan, model, self._job.spill)
        model.register_forward_pre_hook(self._given, with_kwargs=True)
        self._log_before_measured()

    def _log_before_measured(self) -> None:
        """Log allocations of the step before the one that is measured, too."""
        if self._memory is None and self._ends == self._spec.step - 2:
            beside_bytes = self._spec.beside_bytes
            self._memory = LoopMemory(self._device, beside_bytes, self._logged)

    def _given(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Hook of the model: what it is given is the batch."""
        del module
        if self._is_measured or not torch.is_grad_enabled():
            return
        mark(_FORWARD)
        shapes = batch_shapes(args, kwargs)
        if elements(shapes) > elements(self._batch):
            self._batch = shapes

    def _backward_runs(
        self, outputs: Sequence[Any], create_graph: bool, run: Callable[[], Any]
    ) -> Any:
        """A backward runs; its outputs are losses."""
        del create_graph
        if self._in_backward or self._is_measured or self._model is None:
            return run()
        mark(_BACKWARD)
        for one in outputs:
            if isinstance(one, torch.Tensor):
                self._keep("loss", "", one)
        self._in_backward = True
        try:
            return run()
        finally:
            self._in_backward = False
            mark(_OPTIMIZER)

    def _keep(self, kind: str, name: str, value: torch.Tensor | None) -> None:
        """Keep the digest of a result, of all its values one after the other."""
        result = Result(self._ends + 1, kind, name)
        found = self._digests.get(result, "") + digest(value)
        self._digests[result] = hashlib.sha256(found.encode()).hexdigest()

    def _stepped(self, optimizer: torch.optim.Optimizer, *given: object) -> None:
        """Hook of all optimizers: one has stepped."""
        del given
        if os.getpid() != self._pid:
            return
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._ends = 0  # the one that steps last ends the step
        if self._model is None:
            return
        if not self._is_measured:
            self._keep_gradients(optimizer)
        if optimizer is self._optimizers[-1]:
            self._step_ends(self._model)

    def _step_ends(self, model: nn.Module) -> None:
        if self._is_measured:
            self._answer(self._timed())
            return
        for name, buffer in model.named_buffers():
            self._keep("buffer", name, buffer)
        self._ends += 1
        self._log_before_measured()
        memory = self._memory
        if memory is None:
            return
        if self._ends == self._spec.step - 1:
            self._batch = {}
            memory.begin()
        elif self._ends == self._spec.step:
            self._is_measured = True
            self._answer(self._first_steps(model, memory.end()))

    def _keep_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._model is not None, "internal error: no model is known"
        names = {id(p): name for name, p in self._model.named_parameters()}
        number = next(n for n, one in enumerate(self._optimizers) if one is optimizer)
        values = [p for group in optimizer.param_groups for p in group["params"]]
        for place, p in enumerate(values):
            other = f"parameter {place} of optimizer {number}"
            self._keep("gradient", names.get(id(p), other), p.grad)

    def _first_steps(self, model: nn.Module, memory: Memory) -> FirstSteps:
        """The results of all steps so far, and the memory of the last one."""
        state = Result(self._spec.step, "random state")
        self._digests[state] = random_state_digest(self._device)
        fingerprint = loop_fingerprint(model, self._device, self._batch)
        if "forwards" in self._spec.fingerprint:  # of accumulated ones, one counts
            fingerprint["forwards"] = self._spec.fingerprint["forwards"]
        regions, spilled_bytes, host_bytes = status_of(self._job.plan, model)
        return FirstSteps(
            self._digests,
            memory.peak_bytes,
            regions,
            memory.curve,
            fingerprint,
            gpu_allocator_stats=memory.gpu,
            spilled_bytes=spilled_bytes,
            host_bytes=host_bytes,
            notes=(NOTE_OP_BY_OP,) * self._op_by_op.is_used,
        )

    def _timed(self) -> TimedStep:
        wait_for(self._device)
        seconds, cpu_seconds = self._started
        return TimedStep(
            time.perf_counter() - seconds, None, time.process_time() - cpu_seconds
        )

    def _answer(self, found: FirstSteps | TimedStep) -> None:
        """Reply, then wait until another step is asked for."""
        self._reply(found)
        try:
            pickle.load(self._requests)
        except EOFError:
            raise ScriptEnd from None
        self._started = time.perf_counter(), time.process_time()

    def _reply(self, found: object) -> None:
        pickle.dump(found, self._replies)
        self._replies.flush()


def main() -> None:
    """Answer requests until the script ends or the parent closes the pipe."""
    requests, replies = take_standard_streams()
    warnings.filterwarnings("ignore", f".*{IDLE}")  # it is reported
    try:
        ScriptWorker(pickle.load(requests), requests, replies).run()
    except (EOFError, BrokenPipeError):
        return
