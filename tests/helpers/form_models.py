"""Tiny models of many families. No library is imported before a factory runs.

``form_models_top.py`` has the same factories, with the libraries imported at its top.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any]

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}


def tokens(length: int = 24) -> dict[str, torch.Tensor]:
    """Two rows of ids, an attention mask of ones, and labels."""
    ids = torch.randint(0, 128, (2, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _decoder(kind: str, **sizes: Any) -> Made:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = sizes.pop("attention", "sdpa")
    config = AutoConfig.for_model(kind, **{**_SIZES, **sizes}, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train(), tokens()


def llama_grouped() -> Made:
    """Llama whose queries share keys, with ``sdpa``."""
    return _decoder("llama", num_key_value_heads=2)


def llama_eager() -> Made:
    """Llama with attention written out."""
    return _decoder("llama", num_key_value_heads=2, attention="eager")


def mistral_window() -> Made:
    """Mistral that looks back 8 tokens."""
    return _decoder("mistral", num_key_value_heads=2, sliding_window=8)


def mixtral() -> Made:
    """Mixture of experts."""
    return _decoder("mixtral", num_key_value_heads=2, **_EXPERTS)


def qwen3_moe() -> Made:
    """Mixture of experts with norms of queries and keys."""
    own = {"moe_intermediate_size": 32, "head_dim": 8}
    return _decoder("qwen3_moe", num_key_value_heads=2, **_EXPERTS, **own)


def gpt2() -> Made:
    """GPT-2."""
    return _decoder("gpt2", n_embd=32, n_layer=1, n_head=4, n_positions=64)


def bert() -> Made:
    """BERT that predicts masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES)).train(), tokens()


def t5() -> Made:
    """T5: encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config).train(), tokens()


def vit() -> Made:
    """Vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_SIZES, image_size=32, patch_size=8, num_labels=10)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    return ViTForImageClassification(config).train(), batch


def whisper() -> Made:
    """Whisper: audio encoder and text decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=128,
        d_model=32,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        decoder_start_token_id=1,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    batch = {"input_features": torch.randn(2, 16, 64), "labels": tokens(16)["labels"]}
    return WhisperForConditionalGeneration(config).train(), batch


def unet() -> Made:
    """A denoising net of diffusers."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16,),
        norm_num_groups=4,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        layers_per_block=1,
    )
    return model.train(), {"sample": torch.randn(2, 3, 16, 16), "timestep": 3}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embed(ids), is_causal=False)
        mixed: torch.Tensor = self.attention(hidden, hidden, hidden)[0]
        return mixed.square().mean()


def attention() -> Made:
    """Attention of torch alone."""
    return _Attention(), (tokens()["input_ids"],)


def timm_vit() -> Made:
    """A vision transformer of timm."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4
    )
    return model.train(), (torch.randn(2, 3, 32, 32),)


MODELS = (
    llama_grouped,
    llama_eager,
    mistral_window,
    mixtral,
    qwen3_moe,
    gpt2,
    bert,
    t5,
    vit,
    whisper,
    unet,
    attention,
)
