"""The table of tasks: which model classes train for one, and how its batch is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckplan.errors import WorkloadError, did_you_mean
from ckplan.sources.batches import audio, image_text, images, text
from ckplan.sources.batches.context import Context

BatchMaker = Callable[[Context], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """A task: tables of transformers that list its classes, and its batches."""

    tables: tuple[str, ...]  # MODEL_FOR_<name>_MAPPING of transformers
    make: BatchMaker


# Where an architecture is in the tables of several tasks, the first task counts.
TASKS: dict[str, Task] = {
    "image-text-to-text": Task(("IMAGE_TEXT_TO_TEXT",), image_text.image_text),
    "speech-to-text": Task(("SPEECH_SEQ_2_SEQ",), image_text.speech_to_text),
    "audio-text-to-text": Task(("MULTIMODAL_LM",), image_text.audio_text),
    "causal-lm": Task(("CAUSAL_LM",), text.causal),
    "masked-lm": Task(("MASKED_LM",), text.masked),
    "seq2seq-lm": Task(("SEQ_TO_SEQ_CAUSAL_LM",), text.seq2seq),
    "sequence-classification": Task(
        ("SEQUENCE_CLASSIFICATION",), text.sequence_classification
    ),
    "token-classification": Task(("TOKEN_CLASSIFICATION",), text.token_classification),
    "question-answering": Task(("QUESTION_ANSWERING",), text.question_answering),
    "multiple-choice": Task(("MULTIPLE_CHOICE",), text.multiple_choice),
    "next-sentence": Task(("NEXT_SENTENCE_PREDICTION",), text.next_sentence),
    "image-classification": Task(("IMAGE_CLASSIFICATION",), images.classification),
    "video-classification": Task(("VIDEO_CLASSIFICATION",), images.classification),
    "masked-image-modeling": Task(("MASKED_IMAGE_MODELING",), images.masked_image),
    "semantic-segmentation": Task(
        ("SEMANTIC_SEGMENTATION",), images.semantic_segmentation
    ),
    "instance-segmentation": Task(
        ("UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION"),
        images.instance_segmentation,
    ),
    "object-detection": Task(("OBJECT_DETECTION",), images.detection),
    "depth-estimation": Task(("DEPTH_ESTIMATION",), images.depth),
    "audio-classification": Task(("AUDIO_CLASSIFICATION",), audio.classification),
    "audio-frame-classification": Task(
        ("AUDIO_FRAME_CLASSIFICATION",), audio.frame_classification
    ),
    "speaker-verification": Task(("AUDIO_XVECTOR",), audio.classification),
    "ctc": Task(("CTC",), audio.transcription),
    "transducer": Task(("RNNT", "TDT"), audio.transcription),
    "contrastive": Task(("ZERO_SHOT_IMAGE_CLASSIFICATION",), image_text.contrastive),
    "pretraining": Task(("PRETRAINING",), text.pretraining),
    "features": Task(("TEXT_ENCODING",), text.tokens),
}


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        WorkloadError: There is none.
    """
    if name in TASKS:
        return TASKS[name]
    near = did_you_mean(name, TASKS)
    raise WorkloadError(
        f"cannot use --task {name}: there is no such task",
        needed="one of " + ", ".join(TASKS),
        hint=f"did you mean '{near}'?" if near else "--task causal-lm",
    )


def classes_of(task: str, config: Any) -> list[str]:
    """Names of the classes that train this configuration's model for a task."""
    names = (table.get(config.model_type, ()) for table in _tables(task))
    return [one for found in names for one in _several(found)]


def tasks_of(config: Any) -> list[str]:
    """Tasks that transformers has a class for, given a configuration."""
    return [task for task in TASKS if classes_of(task, config)]


def task_of_class(name: str) -> str | None:
    """The first task whose tables have the class; None if no table has it."""
    return next((task for task in TASKS if name in class_names(task)), None)


@cache
def class_names(task: str) -> dict[str, str]:
    """All classes of a task, with the model type of each."""
    return {
        one: model_type
        for table in _tables(task)
        for model_type, names in table.items()
        for one in _several(names)
    }


def _tables(task: str) -> Iterator[dict[str, Any]]:
    from transformers.models.auto import modeling_auto

    for table in TASKS[task].tables:
        yield getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {})


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
