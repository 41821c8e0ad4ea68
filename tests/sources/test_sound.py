"""Batches of sound: which argument is read by what kind of model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckplan.sources.batches.context import Context
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.tasks import TASKS

BLANK = 9
NUMBERS = {"vocab_size": 20, "model_type": "any", "num_mel_bins": 8}
TOKEN = {"audio_token_id": BLANK}


class Transducer(nn.Module):
    def forward(
        self, input_features: Tensor, decoder_input_ids: Tensor, labels: Tensor
    ) -> None: ...


class LanguageModel(nn.Module):
    def forward(
        self, input_features: Tensor, input_ids: Tensor, labels: Tensor
    ) -> None: ...

    def get_audio_features(self, input_features: Tensor) -> Tensor:
        return input_features.mean(1, keepdim=True).expand(-1, 3, -1)


def batch_of(task: str, model: nn.Module, sizes: str, **config: int) -> dict[str, Any]:
    named = SimpleNamespace(**{**NUMBERS, **config})
    model.config = named  # type: ignore[assignment]
    return TASKS[task].make(Context(model, named, Sizes.of(sizes), task))


def test_a_transducer_reads_a_blank_and_its_transcript() -> None:
    batch = batch_of("transducer", Transducer(), "2x40x6", blank_token_id=BLANK)
    assert batch["labels"].shape == (2, 6)
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"])
    assert (batch["decoder_input_ids"][:, 0] == BLANK).all()


def test_a_language_model_that_hears_has_places_for_the_sound_in_its_text() -> None:
    batch = batch_of("speech-to-text", LanguageModel(), "2x12", audio_token_id=BLANK)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 12)
    assert (batch["input_ids"] == BLANK).sum(1).tolist() == [3, 3]


def test_a_table_of_positions_fixes_the_frames_but_not_of_a_projection() -> None:
    table = {"max_source_positions": 15}
    fixed = batch_of("ctc", Transducer(), "2x40x6", blank_token_id=BLANK, **table)
    assert fixed["input_features"].shape == (2, 8, 30)
    table["feature_projection_input_dim"] = 16
    free = batch_of("ctc", Transducer(), "2x40x6", blank_token_id=BLANK, **table)
    assert free["input_features"].shape == (2, 40, 16)


class Waves(nn.Module):
    """Reads waveforms with a channel, and asks for a mask of them."""

    def forward(
        self, input_values: Tensor, padding_mask: Tensor, input_ids: Tensor
    ) -> None: ...

    def get_audio_features(self, input_values: Tensor, padding_mask: Tensor) -> Tensor:
        if input_values.dim() != 3 or not padding_mask.all():
            raise RuntimeError("needs a channel")
        return input_values[:, :, :5].mT


def test_a_recording_has_the_layout_and_the_masks_that_the_model_reads() -> None:
    batch = batch_of("audio-text-to-text", Waves(), "2x12", num_mel_bins=1, **TOKEN)
    assert batch["input_values"].shape[:2] == (2, 1)
    assert batch["padding_mask"].shape == (2, batch["input_values"].shape[2])
    assert (batch["input_ids"] == BLANK).sum(1).tolist() == [5, 5]


class Telling(nn.Module):
    """An encoder that tells how many features it makes of so many frames."""

    def _get_feat_extract_output_lengths(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        return frames // 2, frames // 10


class Hearing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Telling()

    def forward(self, input_features: Tensor, input_ids: Tensor) -> None: ...


def test_a_model_that_makes_features_in_forward_alone_has_places_for_them() -> None:
    table = {"max_source_positions": 20}
    batch = batch_of("audio-text-to-text", Hearing(), "2x12", **TOKEN, **table)
    assert batch["input_features"].shape == (2, 8, 40)
    assert (batch["input_ids"] == BLANK).sum(1).tolist() == [4, 4]


class Deaf(Waves):
    def get_audio_features(self, input_values: Tensor, padding_mask: Tensor) -> Tensor:
        raise ValueError(f"cannot read {input_values.dim()} sizes")


def test_a_model_that_reads_no_layout_says_what_it_said_to_the_first() -> None:
    with pytest.raises(ValueError, match="cannot read 2 sizes"):
        batch_of("audio-text-to-text", Deaf(), "2x12", num_mel_bins=1, **TOKEN)


def test_a_model_that_has_no_places_for_sound_reads_as_much_text() -> None:
    batch = batch_of("audio-text-to-text", LanguageModel(), "2")
    assert batch["input_ids"].shape == (2, 3)


class Stacked(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = nn.Linear(5, 5)
        self.encoder = nn.Linear(24, 4)


def test_frames_are_as_wide_as_the_first_layer_of_sound() -> None:
    batch = batch_of("audio-text-to-text", Stacked(), "2x12", **TOKEN)
    assert batch["input_features"].shape[2] == 24
    model = Stacked()
    model.conv = nn.Conv2d(1, 2, 3)
    batch = batch_of("audio-text-to-text", model, "2x12", **TOKEN)
    assert batch["input_features"].shape[2] == NUMBERS["num_mel_bins"]


class Seeing(nn.Module):
    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> None: ...


def test_a_model_that_hears_nothing_gets_an_image() -> None:
    batch = batch_of("audio-text-to-text", Seeing(), "2", image_size=6)
    assert batch["pixel_values"].shape == (2, 3, 6, 6)


@pytest.mark.parametrize(("window", "frames"), [({}, 26), ({"n_window": 5}, 20)])
def test_features_are_whole_windows_of_the_table_of_positions(
    window: dict[str, int], frames: int
) -> None:
    batch = batch_of(
        "transducer",
        Transducer(),
        "2",
        blank_token_id=BLANK,
        max_source_positions=13,
        **window,
    )
    assert frames in batch["input_features"].shape
