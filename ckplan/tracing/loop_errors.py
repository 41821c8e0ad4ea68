"""What a loop or a script must be to be recorded, and why it was not."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckplan import files
from ckplan.applying import status
from ckplan.errors import ApplyError, WorkloadError
from ckplan.training.failures import first_line, is_out_of_memory, location_hint
from ckplan.training.script import Script


def check_loop(model: object, optimizers: Sequence[object]) -> None:
    """Refuse what is no model that optimizers train, or has a plan.

    Raises:
        WorkloadError: With what is needed instead.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"cannot record a {type(model).__name__}",
            needed="one model of the loop, a torch.nn.Module, and its optimizer",
            hint="ckplan.record(model, optimizer)",
        )
    others = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if others or not optimizers:
        kind = type(others[0]).__name__ if others else "nothing"
        raise WorkloadError(
            f"cannot record the steps of {kind}, which is no optimizer",
            needed="the torch.optim.Optimizer whose step() ends a step of the loop",
            hint="ckplan.record(model, optimizer)",
        )
    stepped = [p for one in optimizers for p in _parameters_of(one)]
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for p in stepped):
        raise WorkloadError(
            f"cannot record {type(model).__name__} with this optimizer: it steps no "
            "parameter of the model",
            needed="a model, and an optimizer of its parameters",
            hint="for several models, a recorder of each with its own optimizer",
        )
    try:
        status(model)
    except ApplyError:
        return
    raise WorkloadError(
        f"cannot record {type(model).__name__}: it has a plan already",
        needed="the model without a plan",
        hint="ckplan.remove(model)",
    )


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def too_few_steps(steps: int, model: str, wanted: int) -> WorkloadError:
    """The error of a loop that has ended before its recorder was done.

    Args:
        steps: How often the optimizer stepped.
        model: Type of the model.
        wanted: How often it must step.
    """
    needed = "two steps: the first one makes the optimizer's state, the second one is "
    needed += "recorded"
    if wanted > 2:
        needed = f"{wanted} steps"
    return WorkloadError(
        f"no step of {model} is recorded: its optimizer stepped {steps} "
        f"time{'s' * (steps != 1)} while the recorder was open",
        needed=needed,
        hint="run more of the loop in `with ckplan.record(model, optimizer):`",
    )


def check_script(script: Script) -> None:
    """Refuse a script that is not there.

    Raises:
        WorkloadError: With the file of a near name, or how to run a package.
    """
    name, path = script.name, Path(script.name)
    if name.startswith("-"):
        raise WorkloadError(
            f"cannot run the script: {name} is no option of `ckplan record`",
            needed="the script before its options",
            hint=f"ckplan record train.py {name}",
        )
    if script.is_module:
        _check_module(script)
    elif not path.is_file():
        near = files.nearest(path, "*.py")
        hint = "ckplan record train.py --lr 1"
        if (path / "__main__.py").is_file():
            hint = _run_as_module(path)
        elif near:
            hint = f"did you mean '{near.name}'?"
        raise WorkloadError(
            f"cannot run the script: {path} is not there",
            needed="a Python file that trains a model, and its arguments",
            hint=hint,
        )


def _check_module(script: Script) -> None:
    try:
        with script.as_python_runs():
            found = importlib.util.find_spec(script.name)
            if found is not None and found.submodule_search_locations is not None:
                found = importlib.util.find_spec(f"{script.name}.__main__")
    except (ImportError, ValueError):
        found = None
    if found is None:
        is_file = script.name.endswith(".py")
        raise WorkloadError(
            f"cannot run the script: no module {script.name} can be run from "
            f"{Path.cwd()}",
            needed="what `python -m` takes: a module, or a package with a __main__.py",
            hint=f"ckplan record {script.name}" if is_file else "cd to its package",
        )


def _run_as_module(path: Path) -> str:
    parts = [one for one in path.with_suffix("").parts if one != "__main__"]
    return f"ckplan record -m {'.'.join(parts)} ..."


def not_recorded(
    script: Script,
    ended: BaseException | None,
    *,
    steps: bool,
    model: bool,
    wanted: int,
) -> WorkloadError:
    """The error of a script that ended before the wanted step was recorded.

    Args:
        script: The script.
        ended: What it ended with, if not by itself.
        steps: Whether an optimizer stepped.
        model: Whether it steps a module that was called.
        wanted: How often it must step.
    """
    number = {2: "second"}.get(wanted, f"{wanted}th")
    when = f"before its {number} step was over"
    failed = ended if not isinstance(ended, SystemExit) or ended.code else None
    if isinstance(failed, SystemExit):
        return WorkloadError(
            f"cannot record {script}: it called sys.exit({failed.code!r}) {when}",
            needed=_trains_for(wanted),
            hint=f"python {script} with the same arguments; they follow its name",
        )
    if failed is not None:
        return script_raised(script, failed, when, wanted)
    if not steps:
        return WorkloadError(
            f"cannot record {script}: it ended, and no optimizer stepped in its "
            "process",
            needed="a loop that calls optimizer.step() of a torch.optim.Optimizer in "
            "the process of the script, not in one that it starts",
            hint="torchrun --nproc-per-node 1 -m ckplan record TRAIN.py, with the "
            "script that trains",
        )
    if not model:
        return WorkloadError(
            f"cannot record {script}: its optimizer steps parameters of no module that "
            "was called under gradients",
            needed="models that are called, as model(batch)",
            hint="in Python: ckplan.record(model, optimizer)",
        )
    if wanted > 2:
        return WorkloadError(
            f"cannot record {script}: it ended {when}",
            needed=f"{wanted} steps of the optimizer",
            hint="more steps or batches, by the arguments of the script",
        )
    return WorkloadError(
        f"cannot record {script}: it ended after one step",
        needed="two steps: the first one makes the optimizer's state, the second one "
        "is recorded",
        hint="more steps or batches, by the arguments of the script",
    )


def _trains_for(steps: int) -> str:
    return f"a script that trains for {'two' if steps == 2 else steps} steps"


def script_raised(
    script: Script, error: BaseException, when: str, wanted: int = 2
) -> WorkloadError:
    """The error of a script that raised.

    Args:
        script: The script.
        error: What it raised.
        when: How far it had come.
        wanted: How often its optimizer must step.
    """
    if isinstance(error, SyntaxError):
        return WorkloadError(
            f"cannot run the script: {script} is not valid Python ({error})",
            needed="a Python file that trains a model",
            hint=f"python -m py_compile {script.name}",
        )
    needed, hint = _trains_for(wanted), location_hint(error)
    if is_out_of_memory(error):
        needed = "memory for two steps, or batches of which a part fits"
        hint = f"ckplan record --reduce 4 {script} ..., or 8, 16"
    if isinstance(error, ImportError) and "relative import" in str(error):
        needed, hint = (
            "a package that runs as a module",
            _run_as_module(Path(script.name)),
        )
    failed = WorkloadError(
        f"cannot record {script}: it raised {type(error).__name__}: "
        f"{first_line(error)}, {when}",
        needed=needed,
        hint=hint,
    )
    failed.__cause__ = error
    return failed
