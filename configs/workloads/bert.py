"""BERT predicting tokens, with dropout and a mask that hides nothing.

Profile it with ``ckplan profile configs/workloads/bert.py --set length=256``.
"""

import torch
from transformers import BertConfig, BertForMaskedLM


def build(
    *,
    layers: int = 12,
    width: int = 384,
    heads: int = 6,
    batch: int = 8,
    length: int = 128,
    vocab: int = 30522,
    dropout: float = 0.1,
) -> tuple[BertForMaskedLM, dict[str, torch.Tensor]]:
    """Return the model and one batch of random tokens."""
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        vocab_size=vocab,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    tokens = torch.randint(vocab, (batch, length))
    return BertForMaskedLM(config), {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens,
    }
