"""Batches of sound: waveforms, or features of short frames."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from ckplan.sources.batches.context import Context
from ckplan.sources.batches.text import decoder_labels

_SAMPLES = 160_000  # ten seconds at 16 kHz
_FRAMES = 1000  # ten seconds of 10 ms
_TRANSCRIPT = 64  # tokens for ten seconds of speech
ARGUMENTS = ("input_features", "input_values", "audio_values", "audio_input_ids")
"""Arguments of forward that carry sound."""
_MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask")
_FEATURES = (
    "feature_projection_input_dim",
    "input_dim",
    "num_mel_bins",
    "input_feat_per_channel",
    "mel_bins",
    "n_mels",
    "input_feat_size",
    "feature_size",
)


def sound(context: Context) -> dict[str, Any]:
    """The sound argument of forward alone, without labels."""
    if context.takes("input_features"):
        first, second = _features(context)
        batch = {"input_features": torch.randn(context.rows, first, second)}
        of_sound = context.takes("attention_mask") and not context.takes("input_ids")
        if second < first and of_sound:  # one row per frame
            batch["attention_mask"] = torch.ones(context.rows, first, dtype=torch.long)
        return batch
    name = "input_values" if context.takes("input_values") else context.main_input
    bins = getattr(context.config, "num_mel_bins", None)
    frames = getattr(context.config, "max_length", None)
    if isinstance(bins, int) and isinstance(frames, int) and bins > 1:
        return {name: torch.randn(context.rows, frames, bins)}  # a spectrogram
    samples = context.sizes.take(1, _SAMPLES, "samples per row")
    return {name: torch.randn(context.rows, samples)}


def _features(context: Context) -> tuple[int, int]:
    bins = context.number(*_FEATURES)
    source = context.number("max_source_positions", default=0)
    # A projection of frames, as of Wav2Vec2-BERT, takes any number of them.
    any_length = context.number("feature_projection_input_dim", default=0)
    if source and not any_length and context.config.model_type != "speech_to_text":
        # By its table of positions, as of Whisper, in whole windows, as of Qwen3-ASR.
        window = 2 * context.number("n_window", default=1)
        return bins, 2 * source // window * window
    return context.sizes.take(1, _FRAMES, "frames per row"), _stacked(context, bins)


def _stacked(context: Context, bins: int) -> int:
    """Width of a frame: of several neighbours, if the first layer reads so many."""
    named = context.model.named_modules()
    modules = [module for name, module in named if "language_model" not in name]
    if any(isinstance(module, nn.Conv2d) for module in modules):
        return bins  # it reads the bins one by one
    layers = [one for one in modules if isinstance(one, (nn.Linear, nn.Conv1d))]
    widths = [layer.weight.shape[1] for layer in layers]
    stacked = widths and bins not in widths and widths[0] % bins == 0
    return widths[0] if stacked else bins


def with_masks(
    context: Context, batch: dict[str, Any], named: Container[str]
) -> dict[str, Any]:
    """Sound with those masks of it that are named and forward takes; no padding."""
    data = next(iter(batch.values()))
    frames = max(data.shape[1:])
    mask = torch.ones(context.rows, frames, dtype=torch.long)
    taken = [name for name in _MASKS if name in named and context.takes(name)]
    return {**batch, **dict.fromkeys(taken, mask)}


def num_features(context: Context, batch: dict[str, Any]) -> int | None:
    """Features of one recording, as the encoder tells; None if it does not."""
    frames = max(next(iter(batch.values())).shape[1:])
    for module in context.model.modules():
        lengths_of = getattr(module, "_get_feat_extract_output_lengths", None)
        if lengths_of is not None:
            found = lengths_of(torch.tensor(frames))  # behind all layers, or each stage
            return int(found[-1] if isinstance(found, tuple) else found)
    return None


def classification(context: Context) -> dict[str, Any]:
    """One label per recording."""
    return {**sound(context), "labels": context.row_labels()}


def frame_classification(context: Context) -> dict[str, Any]:
    """One label per frame."""
    batch = sound(context)
    data = next(iter(batch.values()))
    frames = data.shape[1]
    lengths = getattr(context.model, "_get_feat_extract_output_lengths", None)
    if lengths is not None:
        frames = int(lengths(torch.tensor(frames)))
    classes = context.number("num_labels")
    labels = torch.randint(2, (context.rows, frames, classes)).float()
    return {**batch, "labels": labels}


def transcription(context: Context) -> dict[str, Any]:
    """A short transcript per recording, for CTC and transducers.

    The decoder of a transducer reads a blank and then the transcript.
    """
    batch = sound(context)
    frames = num_features(context, batch) or 2 * _TRANSCRIPT
    most = max(min(_TRANSCRIPT, frames // 2), 1)  # CTC needs a frame for each, and more
    length = context.sizes.take(2, most, "transcript tokens per row")
    labels = context.ids(context.rows, length)
    batch["labels"] = labels
    if context.takes("decoder_input_ids"):
        blanks = torch.full((context.rows, 1), context.number("blank_token_id"))
        batch["decoder_input_ids"] = torch.cat([blanks, labels], dim=1)
    return batch


def speech_to_text(context: Context) -> dict[str, Any]:
    """Sound for the encoder, a transcript for the decoder."""
    return {**sound(context), "labels": decoder_labels(context, 2, _TRANSCRIPT)}


def layouts(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Sound in the layouts that encoders read: as it is, or with channels first."""
    yield batch
    name, data = next(iter(batch.items()))
    other = data.unsqueeze(1) if data.dim() == 2 else data.transpose(1, 2).contiguous()
    yield {**batch, name: other}
