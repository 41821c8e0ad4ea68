"""ResNet-50 classifying images; more layers lengthen its third stage.

Profile it with ``ckplan profile configs/workloads/resnet50.py --set layers=101``.
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def build(
    *,
    layers: int = 50,
    batch: int = 16,
    size: int = 128,
    classes: int = 1000,
    stages: int = 4,
) -> tuple[ResNetForImageClassification, dict[str, torch.Tensor]]:
    """Return the model, its first stages alone if wanted, and one batch."""
    config = ResNetConfig(
        layer_type="bottleneck",
        hidden_sizes=[256, 512, 1024, 2048][:stages],
        depths=[3, 4, (layers - 32) // 3, 3][:stages],
        num_labels=classes,
    )
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(classes, (batch,)),
    }
