"""The share of the model classes of transformers that profile from a configuration.

Every class that transformers lists for a task is built from the default configuration
of its model type, saved as ``config.json``, and profiled as ``ckplan profile
hf:FOLDER`` does, with a batch that ckplan makes. Layers are few and narrow where the
configuration allows that, else few, else as they are. Seconds
are those of a roofline, so that no op is measured. A class counts if its step is
recorded and, for text, if the model itself returned the loss.

    python scripts/coverage.py
    python scripts/coverage.py --task causal-lm --task ctc
    python scripts/coverage.py --only LlamaForCausalLM --again

Each class runs in a process of its own, for at most SECONDS of CPU. Results are kept in
a file of JSON lines as soon as they are known; a run that was cut goes on from there,
and ``--again`` repeats what failed. Exit code 1 if a share is below its target.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from _measuring import (
    Report,
    finish,
    make_parser,
    make_table,
    results_path,
    run,
    say,
)

from ckplan.errors import CkplanError
from ckplan.sources.batches.context import text_part
from ckplan.sources.tasks import TASKS, class_names
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.losses import LOSS_IS_SUM
from ckplan.training.step import Training

NAME = "coverage"
ROWS, LENGTH = 2, 32
LAYERS = 2
DENSE = ("object-detection", "instance-segmentation")
SMALL_IMAGE = "1x3x128x128"  # --batch
SMALL_IMAGES = "2x3x128x128"  # batch norms of pooled images take two of them
SHORT_SOUND = {"": "2x8000", "ctc": "2x8000x4", "transducer": "2x400x8"}  # --batch
MOST_BYTES = 8 << 30
GPU = "A100 40GB"
TEXT_TARGET, OTHER_TARGET = 0.95, 0.80
TEXT, IMAGES, SOUND, SEVERAL = "text", "images", "sound", "several kinds"
FAMILIES: dict[str, tuple[str, ...]] = {
    TEXT: (
        *("causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification"),
        *("token-classification", "question-answering", "multiple-choice"),
        "next-sentence",
    ),
    IMAGES: (
        *("image-classification", "video-classification", "masked-image-modeling"),
        *("semantic-segmentation", "instance-segmentation", "object-detection"),
        "depth-estimation",
    ),
    SOUND: (
        *("speech-to-text", "audio-classification", "audio-frame-classification"),
        *("speaker-verification", "ctc", "transducer"),
    ),
    SEVERAL: ("image-text-to-text", "audio-text-to-text", "contrastive"),
}
Shrink = Callable[[str, int], int]
_NARROW = {
    "hidden_size|d_model|n_embd|dim|embed_dim|out_hidden_size": 128,
    r"\w*(intermediate_size|ffn_dim|mlp_dim|d_ff)": 256,
    r"(\w*_)?(attention_heads|n_heads?|num_heads)": 4,
    "num_key_value_heads": 2,
    r"(num|n)_(local_|routed_)?experts": 4,
    r"num_experts_per_tok|moe_topk|top_k_experts": 2,
    "mm_tokens_per_image": 49,
}
NEVER_EMPTY: dict[str, object] = {
    "vocab_size": 1000,
    "pad_token_id": 0,
    "default_language": "en_XX",
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "image_token_id": 5,
    "audio_token_id": 6,
    "video_token_id": 7,
}
"""Fields that every real configuration fills, and some default ones do not."""
FIRST_CODE = 16  # the first token of an image's codes
_LAYERS = re.compile(r"(num_|n_)?(\w+_)?(hidden_)?(layers?|blocks|layer)$|depth$")


@dataclass(frozen=True)
class Row:
    """One class, what it was profiled for, and why that failed; empty if it did not."""

    name: str
    task: str
    why: str
    loss: str = ""
    on: str = ""  # the day, as 2026-11-25


def main() -> int:
    """Profile the classes that are not known yet; print and write the table."""
    args = _parser().parse_args()
    wanted = [
        (task, name)
        for task in args.task or [t for tasks in FAMILIES.values() for t in tasks]
        for name in class_names(task)
        if not args.only or name in args.only
    ]
    _import_early()
    path = args.rows or results_path(NAME, ".jsonl")
    rows = _read(path)
    todo = [
        key
        for key in dict.fromkeys(wanted)
        if key not in rows or (args.again and rows[key].why)
    ]
    for number, (task, name) in enumerate(todo[: args.most]):
        row = replace(_in_a_process(task, name, args.seconds), on=str(date.today()))
        rows[task, name] = row
        _write(path, rows.values())
        say(f"{number + 1}/{len(todo)} {name} {task}: {row.why or 'profiled'}")
    whole = not args.task and not args.only and len(todo) <= (args.most or len(todo))
    return finish(_report(rows.values()), args, whole=whole)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--task", action="append", choices=[*TASKS], default=[])
    parser.add_argument("--only", action="append", default=[], metavar="CLASS")
    parser.add_argument("--again", action="store_true", help="repeat what failed")
    parser.add_argument("--most", type=int, metavar="N", help="stop after N classes")
    parser.add_argument(
        "--seconds", type=int, default=40, help="of CPU, for each class"
    )
    parser.add_argument("--rows", type=Path, help="the file of JSON lines")
    return parser


def _import_early() -> None:
    """Import what every child needs once, before it is forked."""
    from transformers.models.llama import modeling_llama

    from ckplan.sources import from_transformers

    del modeling_llama, from_transformers
    gc.collect()
    gc.freeze()  # children share these objects, and need not look at them


# -- one class ---------------------------------------------------------------------


def _in_a_process(task: str, name: str, seconds: int) -> Row:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, task, name, seconds))
    process.start()
    there.close()
    try:
        row: Row = here.recv() if here.poll(10 * seconds) else None
    except EOFError:
        row = Row(name, task, "the process ended, as when memory runs out")
    if row is None:
        row = Row(name, task, f"not done after {seconds} s")
    process.kill()
    process.join()
    return row


def _answer(there: Any, task: str, name: str, seconds: int) -> None:
    gc.disable()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    there.send(_profiled(task, name, seconds))


def _late(*_: object) -> None:
    raise TimeoutError


def _profiled(task: str, name: str, seconds: int) -> Row:
    """Profile a class; the first way that works counts, else the first reason."""
    whys: list[str] = []
    sizes = _sizes(task)
    ways: list[tuple[Shrink | None, object]] = [
        *((_few_layers_and_narrow, size) for size in sizes),
        *((_few_layers, size) for size in sizes),
        (None, sizes[-1]),
    ]
    for change, batch in ways:
        try:
            with tempfile.TemporaryDirectory() as folder:
                _save(name, task, change, folder)
                loss = _loss_of(folder, task, batch)
        except TimeoutError:
            return Row(name, task, f"not done after {seconds} s of CPU")
        except CkplanError as error:
            whys.append(error.what)
        except Exception as error:
            whys.append(f"{type(error).__name__}: {error}")
        else:
            summed = loss == LOSS_IS_SUM and task in FAMILIES[TEXT]
            return Row(name, task, "no loss of its own" if summed else "", loss)
    clear = [why for why in whys if "allocate" not in why and "Timeout" not in why]
    return Row(name, task, _shortened((clear or whys)[-1]))


def _sizes(task: str) -> tuple[object, ...]:
    """What --batch is tried with, in order."""
    if task in FAMILIES[TEXT]:
        return f"{ROWS}x{LENGTH}", ROWS
    if task in DENSE:
        return SMALL_IMAGE, 1
    if task == "semantic-segmentation":
        return SMALL_IMAGES, ROWS
    if task == "speech-to-text":
        return ROWS, SHORT_SOUND[""]  # a language model's second size is of tokens
    if task in FAMILIES[SOUND]:
        return SHORT_SOUND.get(task, SHORT_SOUND[""]), ROWS
    return (ROWS,)


def _loss_of(folder: str, task: str, batch: object) -> str:
    spec = WorkloadSpec(f"hf:{folder}", {"task": task, "batch": str(batch)})
    training = Training("sgd")
    graph = profile_workload(
        spec, training=training, gpu=GPU, device="cpu", replay=False
    )
    return next(note for note in graph.notes if note.startswith("loss: "))


def _shortened(why: str) -> str:
    text = re.sub(r"/tmp/\w+", "FOLDER", " ".join(why.split()))
    return text if len(text) <= 160 else text[:157] + "..."


def _save(name: str, task: str, change: Shrink | None, folder: str) -> None:
    """Save the default configuration of a class, made smaller where that works."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[class_names(task)[name]]
    config = config_class()
    if change is not None:
        with contextlib.suppress(Exception):
            config = config_class(**_shrunk(config, change))
    _add_parts(config)
    _join_widths(config)
    for part in {id(one): one for one in (config, text_part(config))}.values():
        for field, value in _never_empty(part).items():
            if _field(part, field, value) is None:
                setattr(part, field, value)
        _fit_positions(part)
    _name_codes(config)
    _fit_vocabulary(config)
    _fit_patches(config)
    _fit_shuffled(config)
    config.architectures = [name]
    config.save_pretrained(folder)


def _never_empty(config: Any) -> dict[str, object]:
    heads, width, layers = (
        _field(config, name)
        for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if not isinstance(heads, int) or not isinstance(width, int):
        return NEVER_EMPTY
    found = {**NEVER_EMPTY, "num_key_value_heads": heads, "head_dim": width // heads}
    if isinstance(layers, int):  # the first is dense, as in the models of DeepSeek
        found["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1)][:layers]
    return found


def _field(config: Any, name: str, default: Any = None) -> Any:
    """A field; the default if there is none, or if it differs from layer to layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError:
        return default


def _add_parts(config: Any) -> None:
    """Give every part that a model type may have, but by default has not."""
    for name, part in (config.sub_configs or {}).items():
        part = getattr(part, "config_class", part)
        if getattr(config, name, part) is None and part.__name__ != "AutoConfig":
            small = _shrunk(part(), _few_layers_and_narrow)
            setattr(config, name, part(**small))


def _fit_vocabulary(config: Any) -> None:
    """Let the vocabulary have all tokens that the configuration names."""
    text = text_part(config)
    named = [v for k, v in vars(config).items() if re.search("token_(id|index)$", k)]
    largest = max((value for value in named if type(value) is int), default=0)
    if isinstance(getattr(text, "vocab_size", None), int):
        text.vocab_size = max(text.vocab_size, largest + 1)


def _fit_patches(config: Any) -> None:
    """Let every side of an image have a number of patches that can be merged."""
    scale, eyes = (
        getattr(config, name, 0) for name in ("scale_factor", "vision_config")
    )
    sizes = [getattr(eyes, name, None) for name in ("image_size", "patch_size")]
    if type(scale) is int and all(type(size) is int for size in sizes) and scale:
        merged = sizes[1] * scale
        eyes.image_size = -(-sizes[0] // merged) * merged
    counts = getattr(config, "projector_patch_to_query_dict", None)
    if counts:  # of the images that the projector reads
        eyes.image_size = eyes.patch_size * math.isqrt(min(counts))


def _fit_shuffled(config: Any) -> None:
    """Let an adapter read neighbours put together, and write what the text reads."""
    eyes = getattr(config, "vision_config", None)
    ratio = getattr(eyes, "pixel_shuffle_ratio", None)
    if ratio and hasattr(eyes, "projector_output_dim"):
        eyes.intermediate_size = int(eyes.hidden_size / ratio**2)
        eyes.vision_output_dim = eyes.projector_output_dim


def _name_codes(config: Any) -> None:
    """Name a token for every code of an image, as the vocabularies do that have any."""
    if getattr(config, "vocabulary_map", ...) is not None:
        return
    quantizer = config.vq_config
    names = ("codebook_size", "num_embeddings")
    count = next(getattr(quantizer, name) for name in names if hasattr(quantizer, name))
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    config.vocabulary_map = {
        "<image>": NEVER_EMPTY["image_token_id"],
        "<|extra_200|>": NEVER_EMPTY["audio_token_id"],  # ends a row
        **{f"<|visual token {n:06}|>": n + FIRST_CODE for n in range(count)},
        **{f"IMGIMG{str(n).translate(letters)}Z": n + FIRST_CODE for n in range(count)},
    }
    config.image_token_id = NEVER_EMPTY["image_token_id"]


def _fit_positions(config: Any) -> None:
    """Let sections of rotary positions fill half of a head, as in real ones."""
    rotary, head = (_field(config, name) for name in ("rope_parameters", "head_dim"))
    ignored = getattr(config, "ignore_keys_at_rope_validation", ())
    if not isinstance(rotary, dict) or "mrope_section" not in ignored:
        return
    if not isinstance(head, int):
        head = config.hidden_size // config.num_attention_heads
    half = int(head * rotary.get("partial_rotary_factor", 1.0)) // 2
    if sum(rotary.get("mrope_section", ())) != half:
        first = half - 2 * (half * 3 // 8)
        rotary["mrope_section"] = [first, half * 3 // 8, half * 3 // 8]


def _join_widths(config: Any) -> None:
    """Let other parts of a configuration end in the width of the text part.

    The defaults of some model types do not fit each other.
    """
    parts = [value for value in vars(config).values() if hasattr(value, "model_type")]
    text = text_part(config)
    for part in (one for one in parts if text_part(one) is not one):
        _join_widths(part)
    if text is config or not hasattr(text, "hidden_size"):
        return
    for part in (config, *parts):
        for field in ("out_hidden_size", "projection_dim"):
            if part is not text and isinstance(getattr(part, field, None), int):
                setattr(part, field, text.hidden_size)
        if part.model_type.endswith(("audio_encoder", "asr_encoder")):
            part.output_dim = text.hidden_size
        if part is not text and part.model_type == "qwen2_vl_vision":
            part.hidden_size = text.hidden_size
        if "qformer" in part.model_type and hasattr(config, "encoder_config"):
            part.encoder_hidden_size = config.encoder_config.hidden_dim


def _few_layers(field: str, value: int) -> int:
    return LAYERS if _LAYERS.fullmatch(field) else value


def _few_layers_and_narrow(field: str, value: int) -> int:
    for pattern, most in _NARROW.items():
        if re.fullmatch(pattern, field):
            return most
    return _few_layers(field, value)


def _shrunk(config: Any, change: Shrink) -> dict[str, Any]:
    """Arguments of a configuration with smaller fields, in every part of it."""
    found: dict[str, Any] = {}
    for field, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            inner = _shrunk(value, change)
            if inner:
                found[field] = {"model_type": value.model_type, **inner}
        elif type(value) is int and 0 < change(field, value) < value:
            found[field] = change(field, value)
    return found


# -- results -----------------------------------------------------------------------


def _read(path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    rows = (Row(**json.loads(line)) for line in path.read_text().splitlines())
    return {(row.task, row.name): row for row in rows}


def _write(path: Path, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    path.write_text(text)


def _report(rows: Iterable[Row]) -> Report:
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row.task, []).append(row)
    broken = [
        f"{family}: {share:.1%} profile, wanted {target:.0%}"
        for family, share, target in _shares(by_task)
        if share < target
    ]
    failed = [row for found in by_task.values() for row in found if row.why]
    days = Counter(row.on for found in by_task.values() for row in found)
    parts = [
        _summary(by_task),
        "Tried: " + ", ".join(f"{n} on {day}" for day, n in sorted(days.items())) + ".",
        "## Classes that do not profile",
        make_table(
            ["class", "task", "day", "why"],
            (
                [row.name, row.task, row.on, row.why]
                for row in sorted(failed, key=_order)
            ),
            texts=4,
        ),
    ]
    title = "Models of transformers that profile without a file"
    claim = str(__doc__).split("\n\n    python", maxsplit=1)[0]
    return Report(NAME, title, claim, parts, broken)


def _order(row: Row) -> tuple[str, str]:
    return row.task, row.name


def _shares(by_task: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, float, float]]:
    for family, tasks in FAMILIES.items():
        rows = [row for task in tasks for row in by_task.get(task, ())]
        if rows:
            target = TEXT_TARGET if family == TEXT else OTHER_TARGET
            yield family, sum(not row.why for row in rows) / len(rows), target


def _summary(by_task: Mapping[str, Sequence[Row]]) -> str:
    lines: list[list[str]] = []
    for family, tasks in FAMILIES.items():
        tried = [task for task in tasks if task in by_task]
        if tried:
            lines.append([f"**{family}**", *_counts(by_task, tasks)])
        lines += [[task, *_counts(by_task, [task])] for task in tried]
    headers = ["task", "listed", "tried", "profile", "share of tried", "own loss"]
    return make_table(headers, lines)


def _counts(by_task: Mapping[str, Sequence[Row]], tasks: Iterable[str]) -> list[str]:
    """Classes that transformers lists, that were tried, that profile, their share."""
    tasks = list(tasks)
    rows = [row for task in tasks for row in by_task.get(task, ())]
    good = [row for row in rows if not row.why]
    listed = sum(len(class_names(task)) for task in tasks)
    own = sum(row.loss != LOSS_IS_SUM for row in good)
    share = f"{len(good) / len(rows):.1%}"
    return [str(listed), str(len(rows)), str(len(good)), share, str(own)]


if __name__ == "__main__":
    run(main)
