"""Parse ``--lora``, and wrap a model with low-rank adapters of peft."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from ckplan.errors import WorkloadError
from ckplan.sources.packages import first, require

ALL_LINEAR = "all-linear"
_LINEAR = "Linear", "Conv1D"
_OTHERS = "Conv1d", "Conv2d", "Conv3d", "Embedding"
"""Kinds of modules that peft adapts only by name."""
_MOST_NAMED = 4


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


def with_lora(
    model: Any, text: object, assume: Callable[[str, str], None] = lambda *what: None
) -> Any:
    """The model with adapters; only these are trained.

    Where peft knows no modules of such a model, all its linear layers are adapted, if
    it has any below its head.

    Args:
        model: The model.
        text: Of ``--lora``.
        assume: Told what nobody said, and the option that says it.

    Raises:
        WorkloadError: peft is missing, no module has such a name, or there is no linear
            layer and none is named.
    """
    rank, targets = parse_lora(text)
    peft = require("peft", "--lora")
    names: Any = ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets) or None
    if names is None and not _is_known(peft, model) and _names_of(model, _LINEAR):
        names = ALL_LINEAR
        assume("lora: all linear layers", f"--lora r={rank},NAMES")
    try:
        return peft.get_peft_model(
            model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
        )
    except ValueError as error:
        raise _misfit(model, rank, str(text), first(error)) from None


def _is_known(peft: Any, model: Any) -> bool:
    """Whether peft has names of modules for a model of this type."""
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    return getattr(getattr(model, "config", None), "model_type", None) in known


def _misfit(model: Any, rank: int, text: str, why: str) -> WorkloadError:
    """The error for names that peft finds nothing by, with those that it would."""
    linear, others = _names_of(model, _LINEAR), _names_of(model, _OTHERS)
    found = "peft knows no modules of such a model" if "specify" in why else why
    if not linear:
        found += "; it has no linear layer below its head"
    some = linear or others
    return WorkloadError(
        f"cannot use --lora {text} with a {type(model).__name__}: {found}",
        needed="names of its modules: " + ", ".join(linear + others)
        if some
        else "a model with linear layers, convolutions or embeddings",
        hint=f"--lora r={rank},{some[0]}" if some else "leave --lora out",
    )


def _names_of(model: Any, kinds: tuple[str, ...]) -> list[str]:
    """Ends of names of modules of some kinds below the head, frequent ones first."""
    body = getattr(model, "base_model", model)
    names = Counter(
        _ending(name)
        for name, module in body.named_modules()
        if type(module).__name__ in kinds
    )
    return [name for name, _ in names.most_common(_MOST_NAMED)]


def _ending(name: str) -> str:
    """The end of a module's name from its last word that is no number on.

    >>> _ending("layers.0.query"), _ending("layers.0.out.1")
    ('query', 'out.1')
    """
    words = name.split(".")
    named = [place for place, word in enumerate(words) if not word.isdigit()]
    return ".".join(words[named[-1] if named else 0 :])
