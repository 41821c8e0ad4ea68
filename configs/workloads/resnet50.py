"""ResNet-50 classifying images; more layers lengthen its third stage.

Profile it with ``ckplan profile configs/workloads/resnet50.py --set layers=101``.
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def build(
    *, layers: int = 50, batch: int = 16, size: int = 128, classes: int = 1000
) -> tuple[ResNetForImageClassification, dict[str, torch.Tensor]]:
    """Return the model and one batch of random images."""
    config = ResNetConfig(
        layer_type="bottleneck",
        depths=[3, 4, (layers - 32) // 3, 3],
        num_labels=classes,
    )
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(classes, (batch,)),
    }
