"""Tensors whose bytes are not torch's own: others write them, and no version tells."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch.utils._python_dispatch import _disable_current_modes

_MOST_BYTES = 1 << 20  # of a constant; what is larger is data that a caller gives


def digest_of_foreign(storage: torch.UntypedStorage) -> bytes | None:
    """Digest of a small storage whose bytes are not torch's own, such as NumPy's.

    None for others: they have versions, or belong to processes that load data.
    """
    if storage.resizable() or storage.is_shared() or storage.nbytes() > _MOST_BYTES:
        return None
    return digest_of_bytes(storage)


def digest_of_bytes(storage: torch.UntypedStorage) -> bytes | None:
    """Digest of all bytes of a storage on the CPU; None for one elsewhere."""
    if storage.device.type != "cpu":
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        every_byte = torch.empty(0, dtype=torch.uint8).set_(storage)
        return blake2b(every_byte.numpy(), digest_size=16).digest()
