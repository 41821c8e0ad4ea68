"""GPT-2 language model with dropout, 12 layers and 384 wide unless told otherwise.

Profile it with ``ckplan profile configs/workloads/gpt2.py --set layers=24``.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build(
    *,
    layers: int = 12,
    width: int = 384,
    heads: int = 6,
    batch: int = 8,
    length: int = 256,
    vocab: int = 4096,
    dropout: float = 0.1,
) -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    """Return the model and one batch of random tokens."""
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocab,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    tokens = torch.randint(vocab, (batch, length))
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its default; says so, or torch.compile breaks
    return model, {"input_ids": tokens, "labels": tokens}
