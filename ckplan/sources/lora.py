"""Parse ``--lora``, and wrap a model with low-rank adapters of peft."""

from __future__ import annotations

import re
from typing import Any

from ckplan.errors import WorkloadError
from ckplan.sources.packages import first, require

ALL_LINEAR = "all-linear"


def parse_lora(text: object) -> tuple[int, tuple[str, ...]]:
    """Rank and names of the adapted modules; no names: those that peft chooses.

    >>> parse_lora("r=16,q_proj,v_proj")
    (16, ('q_proj', 'v_proj'))

    Raises:
        WorkloadError: The text has another form.
    """
    rank, *targets = (part.strip() for part in str(text).split(","))
    if not re.fullmatch(r"r=[1-9]\d*", rank) or not all(targets):
        raise WorkloadError(
            f"cannot read --lora {text!r}",
            needed="r=RANK, then names of modules, separated by commas",
            hint="--lora r=16, or --lora r=16,q_proj,v_proj, or --lora r=16,all-linear",
        )
    return int(rank.removeprefix("r=")), tuple(targets)


def with_lora(model: Any, text: object) -> Any:
    """The model with adapters; only these are trained.

    Raises:
        WorkloadError: peft is missing, or no module has such a name.
    """
    rank, targets = parse_lora(text)
    peft = require("peft", "--lora")
    names = ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets) or None
    try:
        return peft.get_peft_model(
            model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        )
    except ValueError as error:
        raise WorkloadError(
            f"cannot use --lora {text} with a {type(model).__name__}: {first(error)}",
            needed="names of linear modules of the model",
            hint=f"--lora r={rank},all-linear",
        ) from None
