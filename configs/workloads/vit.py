"""Vision transformer classifying images, small with 16 x 16 patches by default.

Profile it with ``ckplan profile configs/workloads/vit.py --set batch=16``.
"""

import torch
from transformers import ViTConfig, ViTForImageClassification


def build(
    *,
    layers: int = 12,
    width: int = 384,
    heads: int = 6,
    batch: int = 8,
    size: int = 224,
    patch: int = 16,
    classes: int = 1000,
    dropout: float = 0.0,
) -> tuple[ViTForImageClassification, dict[str, torch.Tensor]]:
    """Return the model and one batch of random images."""
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=size,
        patch_size=patch,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(classes, (batch,)),
    }
