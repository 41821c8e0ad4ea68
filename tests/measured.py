"""Peaks as the allocator of the CPU has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ckplan.training.allocator import log_allocations


def peak_bytes_of(run: Callable[[], object], held: Iterable[torch.Tensor] = ()) -> int:
    """Most bytes allocated while ``run`` runs, on top of tensors held all along."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    with log_allocations() as log:
        run()
    return sum(sizes.values()) + log.peak_bytes
