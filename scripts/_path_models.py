"""Tiny models for ``paths.py``: those of ``form_models.py`` and many more families.

No library is imported before a factory runs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
import form_models

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 4}
_TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_DEEPSEEK = {
    **_EXPERTS,
    **_LATENT,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def make(kind: str, task: str, attention: str, own: dict[str, Any]) -> Any:
    """A model of transformers from its configuration, and a batch for it."""
    import transformers

    sizes = {**_SIZES, **own}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = getattr(transformers, f"AutoModelFor{task}")
    model = auto.from_config(config, attn_implementation=attention).train()
    labels = torch.tensor([1, 2])
    if task == "ImageClassification":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels}
    batch = form_models.tokens()
    if task == "SequenceClassification":
        batch["labels"] = torch.tensor([0, 1])
    return model, batch


def _of(kind: str, task: str = "CausalLM", attention: str = "sdpa", **own: Any) -> Any:
    return partial(make, kind, task, attention, own)


_OTHERS: dict[str, Any] = {
    "qwen2": _of("qwen2", **_GROUPED),
    "qwen3": _of("qwen3", **_GROUPED),
    "phi3": _of("phi3", **_GROUPED),
    "gemma2": _of("gemma2", attention="eager", sliding_window=8, **_GROUPED),
    "gemma3": _of("gemma3_text", sliding_window=8, **_GROUPED),
    "olmo2": _of("olmo2", **_GROUPED),
    "granite": _of("granite", **_GROUPED),
    "cohere2": _of("cohere2", sliding_window=8, **_GROUPED),
    "stablelm": _of("stablelm", **_GROUPED),
    "gpt_neox": _of("gpt_neox"),
    "falcon": _of("falcon"),
    "starcoder2": _of("starcoder2", sliding_window=8, **_GROUPED),
    "smollm3": _of("smollm3", **_GROUPED),
    "glm4": _of("glm4", **_GROUPED),
    "nemotron": _of("nemotron", **_GROUPED),
    "gpt_oss": _of(
        "gpt_oss", attention="eager", sliding_window=8, **_GROUPED, **_EXPERTS
    ),
    "olmoe": _of("olmoe", **_GROUPED, **_EXPERTS),
    "granitemoe": _of("granitemoe", **_GROUPED, **_EXPERTS),
    "qwen2_moe": _of(
        "qwen2_moe", shared_expert_intermediate_size=32, **_GROUPED, **_EXPERTS
    ),
    "deepseek_v3": _of("deepseek_v3", **_DEEPSEEK),
    "mamba2": _of(
        "mamba2",
        attention="eager",
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
    "roberta": _of("roberta", "MaskedLM"),
    "modernbert": _of("modernbert", "MaskedLM", local_attention=8),
    "xlm_roberta": _of("xlm-roberta", "SequenceClassification"),
    "camembert_eager": _of("camembert", "MaskedLM", "eager"),
    "mbart": _of("mbart", "Seq2SeqLM", **_TWO_STACKS),
    "pegasus": _of("pegasus", "Seq2SeqLM", **_TWO_STACKS),
    "m2m_100": _of("m2m_100", "Seq2SeqLM", **_TWO_STACKS),
    "dinov2": _of("dinov2", "ImageClassification", **_IMAGE),
    "beit": _of("beit", "ImageClassification", **_IMAGE),
}

MODELS: dict[str, Any] = {
    f"tiny_{name}": factory
    for name, factory in (
        *((one.__name__, one) for one in form_models.MODELS),
        *_OTHERS.items(),
    )
}
