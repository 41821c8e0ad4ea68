"""Batches that workers of a ``DataLoader`` have made, and the loop not yet taken."""

from __future__ import annotations

import torch
from torch.utils.data import dataloader

from ckplan.collector import instances_of
from ckplan.training.workload import tensors_of

_ITERATOR = "_MultiProcessingDataLoaderIter"
_BATCHES = "_task_info"  # of an iterator: by number, (worker,) or (worker, batch)


def waiting_tensors() -> list[torch.Tensor]:
    """The tensors of batches that wait in this process.

    A batch waits here if it came before another one that is to be taken first. How many
    do depends on how fast the workers are, so they are no part of a step. torch has no
    public name for them: without the private ones, none are known.
    """
    kind = getattr(dataloader, _ITERATOR, None)
    iterators = [] if kind is None else instances_of(kind)
    batches = [getattr(one, _BATCHES, {}) for one in iterators]
    return tensors_of([[*known.values()] for known in batches])
