"""What a trace and a plan remember of a workload, so that nobody types it twice.

A trace has it as ``options["workload"]``, a plan as ``workload``: the target, the
options of its factory as ``--set`` takes them, and how the step trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckplan.errors import WorkloadError
from ckplan.plan.workload import as_arguments
from ckplan.training.loading import WorkloadSpec, as_spec, parse_options
from ckplan.training.script import Script
from ckplan.training.step import Training

if TYPE_CHECKING:
    from ckplan.plan.plan import Plan


class Remembered(NamedTuple):
    """A workload, and how its step trains."""

    spec: WorkloadSpec
    training: Training
    seed: int


@dataclass(frozen=True, slots=True)
class ScriptSpec:
    """A script, and the model whose step in it was recorded."""

    script: Script
    model: str  # its type
    fingerprint: Mapping[str, Any]  # of the recorded step
    beside_bytes: int  # of tensors that the step does not use
    step: int = 2  # number of the recorded one

    @property
    def name(self) -> str:
        """What its trace is called."""
        return self.script.stem


def script_of(spec: object, plan: Plan | None) -> ScriptSpec | None:
    """The script that a plan was made for; None if a workload is given, or remembered.

    The script itself may be given, too.
    """
    known: Mapping[str, Any] = plan.workload if plan else {}
    if plan is None or "script" not in known:
        return None
    script = Script.of(known["script"])
    if spec is not None and str(spec) != script.name:
        return None
    numbers = known.get("beside_bytes", 0), max(known.get("step", 2), 2)
    return ScriptSpec(script, plan.model, plan.fingerprint, *numbers)


def describe_workload(spec: WorkloadSpec, seed: int) -> dict[str, Any]:
    """What a trace remembers of a workload; empty if an option cannot be written."""
    settings = [_setting(name, value) for name, value in spec.options.items()]
    if None in settings:
        return {}
    found = {"target": spec.target, "set": settings, "input": [*spec.inputs]}
    more = {"seed": seed, "micro_batch": spec.rows or 0}
    more["batch_dim"] = spec.batch_dim or 0
    return {key: value for key, value in {**found, **more}.items() if value}


def complete(
    spec: WorkloadSpec | str | Path | None,
    training: Training,
    seed: int,
    plan: Plan | None,
) -> Remembered:
    """Add what the plan remembers to what was given; what was given comes first.

    Options of the factory are those of the plan only if its target is the plan's. The
    model of the returned workload must have the plan's parameters.

    Args:
        spec: The workload, its target alone, or None for the plan's.
        training: How its step trains; options at their defaults count as not given.
        seed: Seed of all random numbers; 0 counts as not given.
        plan: The plan, or None.

    Raises:
        WorkloadError: Neither names a workload.
    """
    known: Mapping[str, Any] = plan.workload if plan else {}
    if spec is None and "script" in known:
        script = known["script"]
        raise WorkloadError(
            "the plan was made for a step of a script, which this command does not "
            f"run: {as_arguments(known)}",
            needed="a workload file of the same step, or for `eject` the trace that "
            "`ckplan record` wrote",
            hint="ckplan verify PLAN, which runs the script; ckplan eject TRACE PLAN; "
            f"to train with it, ckplan.apply(model, PLAN) in {script[0]}",
        )
    if spec is None and "target" not in known:
        raise WorkloadError(
            "the plan does not say which workload it was made for",
            needed="a target, as for `ckplan profile`, beside the plan",
            hint="ckplan verify model.py plan.yaml",
        )
    found = as_spec(known["target"] if spec is None else spec)
    if plan is not None:
        found = replace(found, parameters=plan.fingerprint.get("parameters"))
    if found.target == known.get("target"):
        options = {**parse_options(known.get("set", ())), **found.options}
        inputs = found.inputs or tuple(known.get("input", ()))
        rows = found.rows or known.get("micro_batch")
        dim = found.batch_dim
        dim = known.get("batch_dim") if dim is None else dim
        found = replace(found, options=options, inputs=inputs, rows=rows, batch_dim=dim)
    default = Training()
    taken = {
        name: known[name]
        for name in ("optimizer", "amp", "accumulate", "clip", "scaler")
        if name in known and getattr(training, name) == getattr(default, name)
    }
    return Remembered(found, replace(training, **taken), seed or known.get("seed", 0))


def workload_or_script(
    spec: WorkloadSpec | ScriptSpec | str | Path | None,
    training: Training,
    seed: int,
    plan: Plan | None,
) -> tuple[WorkloadSpec | ScriptSpec, Training, int]:
    """What ``complete`` returns, or the script that the plan was made for.

    Raises:
        WorkloadError: Neither names a workload, or a script is told how to train.
    """
    script = spec if isinstance(spec, ScriptSpec) else script_of(spec, plan)
    if script is None:
        assert not isinstance(spec, ScriptSpec), "internal error: two kinds at once"
        return complete(spec, training, seed, plan)
    if training != Training():
        raise untold("choose optimizer, amp, accumulate, clip or scaler")
    return script, training, seed


def untold(what: str) -> WorkloadError:
    """The error of an option that a script does not have."""
    return WorkloadError(
        f"cannot {what}: the script trains as it does",
        needed="--seed, --steps, --spill, --cap, --trace, --plot or --report; its own "
        "arguments are in the plan",
        hint="ckplan verify PLAN; for more, a workload file of the same step",
    )


def _setting(name: str, value: object) -> str | None:
    """``name=value`` from which ``parse_options`` reads the value; None without."""
    texts = [str(value)]
    with suppress(TypeError, ValueError):
        texts.append(json.dumps(value))
    for text in texts:
        setting = f"{name}={text}"
        with suppress(WorkloadError):
            again = parse_options([setting])[name]
            if type(again) is type(value) and again == value:
                return setting
    return None
