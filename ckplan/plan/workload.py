"""What a plan remembers of the workload that was profiled, and its YAML.

The keys are options of the command line: ``set: [layers=24]`` is ``--set layers=24``.
``verify`` and ``eject`` need nothing else. A step of a script has ``script`` instead:
what was run, with its arguments; ``step``, its number where that is not 2; and
``beside_bytes``, which are no part of its peak: those of tensors that the step does not
use.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ckplan.errors import PlanError
from ckplan.plan.strict_yaml import YamlNode

TRAINING_KEYS = (
    *("batch_dim", "micro_batch", "optimizer", "amp", "accumulate", "clip", "scaler"),
)
"""What the plan file has under ``training``: how the step trains."""
WORKLOAD_KEYS = (
    *("target", "set", "input", "seed", "gpu", "shard", "world_size", "unit"),
    *TRAINING_KEYS,
    *("script", "step", "beside_bytes"),
)


def plan_workload(graph_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan remembers of a trace with these options.

    >>> plan_workload({"workload": {"target": "a.py"}, "optimizer": "default"})
    {'target': 'a.py'}
    """
    known = {**graph_options.get("workload", {}), **graph_options}
    found = {key: known[key] for key in WORKLOAD_KEYS if key in known}
    if found.get("optimizer") == "default":
        del found["optimizer"]
    return found


def as_arguments(workload: Mapping[str, Any]) -> str:
    """Write a remembered workload as on the command line.

    >>> as_arguments({"target": "a.py", "set": ["n=4"], "clip": 1.0, "scaler": True})
    'a.py --set n=4 --clip 1.0 --scaler'
    >>> as_arguments({"script": ["train.py", "--lr", "1"]})
    'train.py --lr 1'
    """
    if "script" in workload:
        return shlex.join(workload["script"])
    words = [workload["target"]] if "target" in workload else []
    for key in WORKLOAD_KEYS[1:]:
        value, flag = workload.get(key, []), "--" + key.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False:
            values = value if isinstance(value, list) else [value]
            words += [word for one in values for word in (flag, str(one))]
    return shlex.join(words)


def read_workload(
    part: YamlNode, keys: tuple[str, ...] = WORKLOAD_KEYS
) -> dict[str, Any]:
    """Read what ``plan_workload`` returned, or some of its keys, from YAML.

    Raises:
        PlanError: A key is unknown, or a value is of another kind.
    """
    entries = part.record(keys)
    return {key: _READERS.get(key, YamlNode.text)(one) for key, one in entries.items()}


def _texts(part: YamlNode) -> list[str]:
    return [item.text() for item in part.items("an option")]


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _unreadable(text, "a whole number")
    return int(text)


def _norm(text: str) -> float:
    try:
        norm = float(text)
    except ValueError:
        norm = math.nan
    if not 0 < norm < math.inf:
        raise _unreadable(text, "a number above zero")
    return norm


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise _unreadable(text, "true or false")
    return text == "true"


def _unreadable(text: str, needed: str) -> PlanError:
    hint = "leave it out, and give it to `ckplan verify`"
    return PlanError(f"cannot read the option {text!r}", needed=needed, hint=hint)


_READERS: dict[str, Callable[[YamlNode], Any]] = {
    "set": _texts,
    "script": _texts,
    "input": _texts,
    "unit": _texts,
    "world_size": lambda part: part.read(_whole),
    "step": lambda part: part.read(_whole),
    "beside_bytes": lambda part: part.read(_whole),
    "seed": lambda part: part.read(_whole),
    "batch_dim": lambda part: part.read(_whole),
    "micro_batch": lambda part: part.read(_whole),
    "accumulate": lambda part: part.read(_whole),
    "clip": lambda part: part.read(_norm),
    "scaler": lambda part: part.read(_switch),
}
