"""Run a training script, find its model and optimizer, and record its second step.

The script runs as under ``python``: as ``__main__``, with its own arguments, and with
its folder first on the path. Until an optimizer has stepped, calls of modules are
watched: the outermost ones that run under gradients are the models. If another
optimizer steps later in the loop, the step ends there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckplan.errors import CkplanError, WorkloadError, did_you_mean
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.cut_batches import BatchCutter, cutter_of
from ckplan.tracing.loop_errors import check_script, not_recorded, script_raised
from ckplan.tracing.record import LoopRecorder, steps_ahead
from ckplan.tracing.running_script import (
    OpByOp,
    ScriptEnd,
    exit_code,
    run_script,
)
from ckplan.tracing.trained_models import inside_wrapper, size_of, trained_models
from ckplan.training.script import Script


class ScriptRecorder:
    """Finds the model of a running script and records a step of it."""

    def __init__(
        self,
        wanted: str | None = None,
        *,
        num_steps: int = 1,
        cutter: BatchCutter | None = None,
        fresh: bool = False,
        progress: Progress | None = None,
        on_done: Callable[[LoopRecorder], object],
    ) -> None:
        """Start before the script runs.

        Args:
            wanted: Type of the model, if the script trains several.
            num_steps: Steps to record; the one with the largest batch is kept.
            cutter: Cuts the batches of the script from its beginning.
            fresh: Measure ops again that the cost cache already knows.
            progress: Called with the progress of the measurement.
            on_done: Called once, in the optimizer that ends the recorded step.
        """
        self.recorder: LoopRecorder | None = None
        self.model: nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []  # in the order of first steps
        self.error: CkplanError | None = None
        self.cutter, self._wanted, self._on_done = cutter, wanted, on_done
        self._how: dict[str, Any] = {
            "num_steps": num_steps,
            "cutter": cutter,
            "fresh": fresh,
            "progress": progress,
        }
        self._roots: dict[nn.Module, None] = {}
        self._running: list[nn.Module] = []
        self._op_by_op = OpByOp()
        self._pid = os.getpid()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A scope in which modules and optimizers are watched."""
        module = nn.modules.module
        hooks = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_post_hook(self._stepped),
        ]
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            if self.cutter is not None:
                stack.enter_context(self.cutter.cutting())
            self._calls = hooks[:2]
            stack.enter_context(self._op_by_op)
            yield
        if self.recorder is not None:
            self.recorder.__exit__()

    @property
    def num_alike(self) -> int:
        """Number of models of the script that have the type of the recorded one."""
        models = map(inside_wrapper, self._roots)
        return len({id(one) for one in models if type(one) is type(self.model)})

    @property
    def compiles(self) -> bool:
        """Whether the script compiles something, which ran op by op."""
        return self._op_by_op.is_used

    @property
    def done(self) -> bool:
        """Whether a step is recorded."""
        return self.recorder is not None and self.recorder.done

    @property
    def wanted(self) -> int:
        """How often the optimizer must step until a step is recorded."""
        if self.recorder is not None:
            return self.recorder.wanted
        return 1 + len(steps_ahead(self._how["num_steps"], self.cutter))

    def _enter(self, module: nn.Module, args: object) -> None:
        del args
        if not self._running and torch.is_grad_enabled():
            self._roots[module] = None
        self._running.append(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        del args, output
        while self._running and self._running.pop() is not module:
            pass  # calls that an exception ended

    def _stepped(self, optimizer: torch.optim.Optimizer, *given: object) -> None:
        """Hook of all optimizers: one has stepped."""
        del given
        if os.getpid() != self._pid or self.done or self.error:
            return
        is_known = any(optimizer is known for known in self.optimizers)
        if is_known and self.recorder is not None:
            return  # the recorder has its own hook
        try:
            if is_known:
                self.check_model()
                return
            self._begin_with(optimizer)
        except CkplanError as error:
            self.error = error
            raise ScriptEnd from None

    def _begin_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what follows, if the model is known by now."""
        self.optimizers.append(optimizer)
        if self.recorder is not None:
            self.recorder.__exit__()
        models = trained_models(self._roots, self.optimizers)
        if self._wanted is not None:
            models = [m for m in models if type(m).__name__ == self._wanted]
        self.model = max(models, key=size_of, default=None)
        if self.model is not None:
            self.recorder = LoopRecorder(
                self.model, self.optimizers, on_done=self._done, **self._how
            ).start()

    def check_model(self) -> None:
        """Refuse a type of which a whole step has trained no model.

        Raises:
            WorkloadError: With the types that it trains.
        """
        if self._wanted is None or self.model is not None:
            return
        models = trained_models(self._roots, self.optimizers)
        if not models:
            return
        names = sorted({type(one).__name__ for one in models})
        near = did_you_mean(self._wanted, names) or names[0]
        raise WorkloadError(
            f"cannot record a {self._wanted}: the script trains none",
            needed=f"--model {' or '.join(names)}",
            hint=f"--model {near}",
        )

    def _done(self) -> None:
        for hook in self._calls:
            hook.remove()
        self._op_by_op.stop()
        assert self.recorder is not None, "internal error: nothing is recorded"
        self._on_done(self.recorder)


def record_script(
    script: Script,
    *,
    model: str | None = None,
    num_steps: int = 1,
    reduce: int | None = None,
    goes_on: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
    recorded: Callable[[ScriptRecorder], object],
) -> int:
    """Run a script and record its second step.

    Args:
        script: The script.
        model: Type of the model, if the script trains several; by default the one with
            most parameters.
        num_steps: Steps to record; the one with the largest batch is kept.
        reduce: Cut batches to one row of so many, and to half of that, and extrapolate.
        goes_on: Let the script go on after the recorded step, instead of ending it.
        fresh: Measure ops again that the cost cache already knows.
        progress: Called with the progress of the measurement.
        recorded: Called with the recorded step: in the loop if the script goes on, else
            after it has ended.

    Returns:
        The exit code of the script, if it went on; else 0.

    Raises:
        WorkloadError: The script is not there, raises or exits before its second step
            is over, or trains nothing; or it raises later.
    """
    check_script(script)

    def done(recorder: LoopRecorder) -> None:
        del recorder
        if not goes_on:
            raise ScriptEnd
        try:
            recorded(watch)
        except CkplanError as error:
            watch.error = error

    cutter = cutter_of(reduce, num_steps)
    if cutter is not None and goes_on:
        raise WorkloadError(
            "cannot go on with the script: its first steps trained on batches that "
            "were cut",
            needed="one of both: a smaller batch, or a script that goes on",
            hint="--reduce without --continue",
        )
    how: dict[str, Any] = {"num_steps": num_steps, "fresh": fresh, "cutter": cutter}
    watch = ScriptRecorder(model, progress=progress, on_done=done, **how)
    ended = run_script(script, watch.watching())
    _check_recorded(script, watch, ended)
    if not goes_on:
        recorded(watch)
        return 0
    if ended is None or isinstance(ended, SystemExit):
        return exit_code(ended)
    raise script_raised(script, ended, "after its second step, which is recorded")


def _check_recorded(
    script: Script, watch: ScriptRecorder, ended: BaseException | None
) -> None:
    """Refuse a script that ended before its step was recorded."""
    if watch.error is not None:
        raise watch.error
    if watch.done:
        return
    if isinstance(ended, CkplanError):
        raise ended
    if ended is None:
        watch.check_model()
    if watch.cutter is not None:
        watch.cutter.explain(ended)
    raise not_recorded(
        script,
        ended,
        steps=bool(watch.optimizers),
        model=watch.model is not None,
        wanted=watch.wanted,
    )
