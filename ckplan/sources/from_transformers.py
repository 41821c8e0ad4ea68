"""``hf:``: build a model of transformers from its configuration, with random weights.

The class is the one of ``--task``, else the architecture that the configuration names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckplan.errors import WorkloadError, did_you_mean
from ckplan.sources.batches.context import Context, text_part
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.configurations import load_configuration, processor_settings
from ckplan.sources.dtypes import parse_dtype
from ckplan.sources.lora import parse_lora, with_lora
from ckplan.sources.packages import first, missing, require
from ckplan.sources.source import Ask, Made, check_fields
from ckplan.sources.tasks import (
    TASKS,
    class_names,
    classes_of,
    find_task,
    task_of_class,
    tasks_of,
)

ATTENTION = ("sdpa", "eager")
REMOTE_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
}
"""Names that a configuration with code of its own gives to its classes, by task."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The class to build, its task, and a note if nobody named either."""

    model_class: Any
    task: str
    config: Any
    note: str = ""


def open_source(ask: Ask) -> Callable[[], Made]:
    """Read the configuration, import the class, and return a factory.

    Raises:
        WorkloadError: See ``load_configuration`` and ``choose_class``; or an option
            cannot be read.
    """
    options = ask.options
    _check(options)
    trust = options.get("trust_remote_code") is True
    config = load_configuration(ask.name, trust)
    check_fields(ask.changes, config.to_dict())
    for name, value in ask.changes.items():
        _set(config, name, value)
    choice = choose_class(config, options.get("task"), trust)
    return partial(_build, choice, options, processor_settings(ask.name))


def _set(config: Any, name: str, value: object) -> None:
    """Set a field; newer versions of transformers check its type."""
    try:
        setattr(config, name, value)
    except Exception as error:
        raise WorkloadError(
            f"cannot use --set {name}={value}: {error}",
            needed=f"a value such as the configuration's: {getattr(config, name)!r}",
            hint=f"--set {name}={getattr(config, name)}",
        ) from error


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that cannot be read, before anything is imported."""
    Sizes.of(options.get("batch"))
    parse_dtype(options.get("dtype"))
    if options.get("lora") is not None:
        parse_lora(options["lora"])
        require("peft", "--lora")
    if options.get("task") is not None:
        find_task(str(options["task"]))
    attention = options.get("attention")
    if attention not in (None, *ATTENTION):
        raise WorkloadError(
            f"cannot use --attention {attention}",
            needed=" or ".join(ATTENTION),
            hint="--attention sdpa",
        )


def choose_class(config: Any, task: str | None, trust: bool = False) -> Choice:
    """The class that ``--task`` or the configuration's architecture names.

    Raises:
        WorkloadError: The task does not fit, the architecture is unknown or trains for
            no task, or several tasks are possible and none is named.
    """
    named = [str(name) for name in getattr(config, "architectures", None) or ()]
    remote = _remote_class(config, task) if trust else None
    if remote is not None:
        return remote
    if task is not None:
        found = classes_of(task, config)
        if not found:
            raise _misfit(config, task, named)
        chosen = next((name for name in named if name in found), found[0])
        return _choice(chosen, task, config)
    if named:
        own = task_of_class(named[0])
        if own is not None:
            return _choice(named[0], own, config)
        raise _no_task(config, named[0])
    possible = tasks_of(config)
    if len(possible) != 1:
        raise WorkloadError(
            f"cannot choose a class: a configuration of '{config.model_type}' without "
            "architectures fits several tasks",
            needed="--task: " + (", ".join(possible) or "none fits"),
            hint=f"--task {possible[0]}" if possible else "a factory in a file",
        )
    chosen = classes_of(possible[0], config)[0]
    return _choice(chosen, possible[0], config, f"assumed task: {possible[0]} (--task)")


def _choice(name: str, task: str, config: Any, note: str = "") -> Choice:
    """Import a class; take the text part of a configuration if the class reads that."""
    transformers = require("transformers", name)
    try:
        model_class = getattr(transformers, name)
        _ = model_class.forward  # a class whose packages are missing has none
    except AttributeError:
        raise WorkloadError(
            f"cannot use {name}: this transformers does not have it",
            needed="a class of transformers",
            hint="a newer transformers, or --task for another class",
        ) from None
    except ImportError as error:
        raise missing(_package_of(error), name) from None
    text = config.sub_configs.get("text_config") if config.sub_configs else None
    if text is not None and model_class.config_class == text:
        config = text_part(config)
    return Choice(model_class, task, config, note)


def _package_of(error: ImportError) -> str:
    """The package that a message such as "X requires the timm library" names."""
    words = str(error).split()
    near = [words[i - 1] for i, word in enumerate(words) if word == "library" and i]
    return error.name or (near[0] if near else first(error))


def _remote_class(config: Any, task: str | None) -> Choice | None:
    """A class of the code that comes with a configuration, for a task or for any."""
    named = getattr(config, "auto_map", None) or {}
    for one, auto in REMOTE_CLASSES.items():
        if task in (None, one) and auto in named:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            found = get_class_from_dynamic_module(named[auto], config.name_or_path)
            return Choice(found, one, config)
    return None


def _misfit(config: Any, task: str, named: list[str]) -> WorkloadError:
    possible = tasks_of(config)
    what = named[0] if named else config.model_type
    return WorkloadError(
        f"cannot use --task {task} with {what}: transformers has no class for a "
        f"'{config.model_type}' and this task",
        needed="--task: " + (", ".join(possible) or "none fits this configuration"),
        hint=f"--task {possible[0]}" if possible else "a factory in a file: model.py",
    )


def _no_task(config: Any, architecture: str) -> WorkloadError:
    possible = tasks_of(config)
    known = [name for task in TASKS for name in class_names(task)]
    near = did_you_mean(architecture, known)
    if possible:
        what, hint = "has no labels or no known task", f"--task {possible[0]}"
    else:
        what = "is of no task that ckplan makes batches for"
        hint = f"did you mean '{near}'?" if near else "a factory in a file: model.py"
    return WorkloadError(
        f"cannot make a batch: the architecture {architecture} {what}",
        needed="--task: " + (", ".join(possible) or "none fits this configuration"),
        hint=hint,
    )


def _build(
    choice: Choice, options: Mapping[str, Any], processor: Mapping[str, Any]
) -> Made:
    """Build the model with random weights, and a batch with labels."""
    sizes = Sizes.of(options.get("batch"))
    if choice.note:
        sizes.assumptions.append(choice.note)
    config = copy.deepcopy(choice.config)
    _set_padding(config, choice.task, sizes)
    _set_start(config, sizes)
    _set_no_cache(config, sizes)
    how: dict[str, Any] = {"dtype": _dtype(config, options.get("dtype"), sizes)}
    if options.get("attention") is not None:
        how["attn_implementation"] = options["attention"]
    model = _construct(choice.model_class, config, how)
    model.train()
    context = Context(model, config, sizes, choice.task, processor)
    batch = TASKS[choice.task].make(context)
    sizes.check_all_used()
    batch = _as_dtype(batch, how["dtype"])
    if options.get("lora") is not None:
        model = with_lora(model, options["lora"], sizes.assume)
    return Made(model, batch, None, tuple(sizes.assumptions))


def _construct(model_class: Any, config: Any, how: Mapping[str, Any]) -> Any:
    make = getattr(model_class, "_from_config", None) or model_class.from_config
    try:
        return make(config, **how)
    except ImportError as error:
        raise missing(_package_of(error), model_class.__name__) from None
    except ValueError as error:
        if "attention" in str(error) and "attn_implementation" in how:
            raise WorkloadError(
                f"cannot use --attention {how['attn_implementation']} with a "
                f"{model_class.__name__}: {first(error)}",
                needed="an attention that the class has",
                hint="--attention eager",
            ) from None
        raise


def _dtype(config: Any, asked: object, sizes: Sizes) -> Any:
    """The dtype of the parameters: ``--dtype``, the configuration's, or float32."""
    import torch

    if asked is not None:
        return parse_dtype(asked)
    found = getattr(config, "dtype", None)
    found = getattr(torch, found, None) if isinstance(found, str) else found
    whose = "float32" if found is None else f"{str(found)[6:]}, of the configuration"
    sizes.assume(f"dtype: {whose}", "--dtype")
    return found or torch.float32


def _set_padding(config: Any, task: str, sizes: Sizes) -> None:
    """Name a padding token where a classifier of rows needs one to find their ends."""
    text = text_part(config)
    shifts = getattr(config, "is_encoder_decoder", False)
    if task != "sequence-classification" and not shifts:
        return
    both = {id(config): config, id(text): text}.values()
    lacking = [one for one in both if getattr(one, "pad_token_id", None) is None]
    if not lacking:
        return
    token = _id_of(text, "pad_token_id", "eos_token_id")
    for one in lacking:
        one.pad_token_id = token
    sizes.assume(f"pad_token_id: {token}", "--set pad_token_id=N")


def _set_start(config: Any, sizes: Sizes) -> None:
    """Name the token that starts the decoder, which shifts its labels behind it."""
    if not getattr(config, "is_encoder_decoder", False):
        return
    if getattr(config, "decoder_start_token_id", None) is not None:
        return
    token = _id_of(config.get_text_config(decoder=True), "bos_token_id", "pad_token_id")
    config.decoder_start_token_id = token
    sizes.assume(f"decoder_start_token_id: {token}", "--set decoder_start_token_id=N")


def _id_of(config: Any, *names: str) -> int:
    """The first of these fields that is an id of the vocabulary; else 0."""
    vocab = getattr(config, "vocab_size", None) or 0
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and 0 <= value < vocab:
            return value
    return 0


def _set_no_cache(config: Any, sizes: Sizes) -> None:
    """Keep no keys and values for generation, as the Trainer of transformers does."""
    text = text_part(config)
    if getattr(text, "use_cache", False):
        for one in {id(config): config, id(text): text}.values():
            one.use_cache = False
        sizes.assumptions.append("assumed use_cache: False, as the Trainer sets it")


def _as_dtype(batch: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Floating inputs in the dtype of the model, as a processor's caller casts them."""
    import torch

    def cast(name: str, value: Any) -> Any:
        is_data = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_data and "label" not in name else value

    return {name: cast(name, value) for name, value in batch.items()}
