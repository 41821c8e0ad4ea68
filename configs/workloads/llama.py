"""Llama language model with grouped-query attention and no dropout.

Profile it with ``ckplan profile configs/workloads/llama.py --set layers=16``.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(
    *,
    layers: int = 8,
    width: int = 384,
    heads: int = 6,
    groups: int = 2,
    batch: int = 8,
    length: int = 256,
    vocab: int = 32000,
    inner: int | None = None,
    dtype: str = "float32",
) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Return the model and one batch of random tokens."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner or 8 * width // 3,
        max_position_embeddings=length,
        vocab_size=vocab,
        use_cache=False,
    )
    tokens = torch.randint(vocab, (batch, length))
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    return model, {"input_ids": tokens, "labels": tokens}
