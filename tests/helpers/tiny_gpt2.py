"""A GPT-2 of two layers, and a plan for it."""

from __future__ import annotations

import torch
import torch._dynamo
from torch import nn

from ckplan.plan.plan import Plan, PlannedRegion

LAYERS = Plan(regions=(PlannedRegion("transformer.h.[0..1]"),))


def gpt2(dropout: float = 0.1) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=16,
        vocab_size=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        loss_type="ForCausalLMLoss",
    )
    return transformers.GPT2LMHeadModel(config).train()


def ids(batch: int = 4) -> dict[str, torch.Tensor]:
    found = torch.randint(
        64, (batch, 16), generator=torch.Generator().manual_seed(batch)
    )
    return {"input_ids": found, "labels": found}
