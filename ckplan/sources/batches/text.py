"""Batches of token ids."""

from __future__ import annotations

from typing import Any

import torch

from ckplan.sources.batches.context import Context

_OBJECTS = 36  # boxes per image, as LXMERT was trained on
_CHOICES = 4  # answers per question, as of the common multiple-choice sets


def tokens(context: Context, *shape: int) -> dict[str, Any]:
    """Token ids, and what else a text model needs beside them."""
    shape = shape or (context.rows, context.length)
    batch: dict[str, Any] = {"input_ids": context.ids(*shape)}
    if context.takes("bbox"):
        batch["bbox"] = torch.zeros(*shape, 4, dtype=torch.long)
    if context.takes("visual_feats", "visual_pos"):
        width = context.number("visual_feat_dim")
        batch["visual_feats"] = torch.randn(*shape[:-1], _OBJECTS, width)
        batch["visual_pos"] = torch.rand(*shape[:-1], _OBJECTS, 4)
    return batch


def causal(context: Context) -> dict[str, Any]:
    """Ids that are their own labels."""
    batch = tokens(context)
    return {**batch, "labels": batch["input_ids"].clone()}


def masked(context: Context) -> dict[str, Any]:
    """Ids with a label for every token."""
    batch = tokens(context)
    return {**batch, "labels": context.ids(*batch["input_ids"].shape)}


def seq2seq(context: Context) -> dict[str, Any]:
    """Ids for the encoder, labels for the decoder: ``--batch ROWSxSOURCExTARGET``."""
    batch = tokens(context)
    return {**batch, "labels": decoder_labels(context, 2, context.length)}


def decoder_labels(context: Context, position: int, default: int) -> torch.Tensor:
    """Labels of a decoder, whose length is the size at ``position`` of ``--batch``."""
    length = context.sizes.take(position, default, "target tokens per row")
    decoder = context.config.get_text_config(decoder=True)
    config = decoder if hasattr(decoder, "vocab_size") else None
    return context.ids(context.rows, length, config=config)


def sequence_classification(context: Context) -> dict[str, Any]:
    """One label per row. Every row ends in the end token, which some models read."""
    batch = tokens(context)
    end = getattr(context.text, "eos_token_id", None)
    end = end[0] if isinstance(end, list) and end else end
    if isinstance(end, int) and 0 <= end < context.vocab:
        batch["input_ids"][:, -1] = end
    return {**batch, "labels": context.row_labels()}


def token_classification(context: Context) -> dict[str, Any]:
    """One label per token."""
    return {**tokens(context), "labels": context.classes(context.rows, context.length)}


def question_answering(context: Context) -> dict[str, Any]:
    """Positions of the first and last token of every answer.

    Every row ends in the end token. Where the configuration names a separator, there
    are three, two of them behind the question, as RoBERTa and Longformer read it.
    """
    batch = tokens(context)
    end = getattr(context.text, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < context.vocab:
        batch["input_ids"][:, -1] = end
    _separate(context, batch["input_ids"])
    starts = torch.randint(context.length, (context.rows,))
    return {**batch, "start_positions": starts, "end_positions": starts.clone()}


def multiple_choice(context: Context) -> dict[str, Any]:
    """Several candidate rows per question: ``--batch ROWSxTOKENSxCHOICES``."""
    rows, length = context.rows, context.length
    choices = context.sizes.take(2, _CHOICES, "choices per row")
    labels = torch.randint(choices, (rows,))
    batch = tokens(context, rows, choices, length)
    _separate(context, batch["input_ids"])
    return {**batch, "labels": labels}


def _separate(context: Context, ids: torch.Tensor) -> None:
    """Put separators behind a quarter of every row, twice, and at its end."""
    separator = getattr(context.text, "sep_token_id", None)
    if isinstance(separator, int) and context.length > 4:
        question = context.length // 4
        ids[..., [question, question + 1, -1]] = separator


def next_sentence(context: Context) -> dict[str, Any]:
    """One of two labels per row."""
    return {**tokens(context), "labels": torch.randint(2, (context.rows,))}


def pretraining(context: Context) -> dict[str, Any]:
    """Labels for every head of a model that is trained from nothing."""
    batch = masked(context)
    for name in ("next_sentence_label", "sentence_order_label"):
        if context.takes(name):
            batch[name] = torch.randint(2, (context.rows,))
    if type(context.model).__name__.startswith("Electra"):
        batch["labels"] = torch.randint(2, (context.rows, context.length))
    return batch
