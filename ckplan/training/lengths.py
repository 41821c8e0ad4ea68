"""Batches of several lengths: a plan must fit the longest, and costs as the mean."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckplan import files
from ckplan.errors import WorkloadError
from ckplan.training.workload import Workload, tensors_of


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the batches that a training sees."""

    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The largest length."""
        return max(self.lengths)

    @property
    def mean(self) -> int:
        """The mean length, rounded."""
        return round(sum(self.lengths) / len(self.lengths))

    def whole(self, workload: Workload) -> Workload:
        """The workload, whose batch has the largest length.

        Raises:
            WorkloadError: It has another one.
        """
        found = length_of(workload)
        if found != self.longest:
            _check_has_length(workload)
            raise WorkloadError(
                f"the batch is {found} long, and the longest of --lengths is "
                f"{self.longest}",
                needed="a batch with the longest sequences, which the plan must fit",
                hint=f"--batch 8x{self.longest}, or an option of the factory by --set",
            )
        return workload

    def cut_to_mean(self, workload: Workload) -> Workload:
        """The workload with its batch cut to the mean length.

        In all tensors of batch and target, every size but the first that equals the
        length is cut: of tokens, masks and positions.
        """
        whole, mean = length_of(self.whole(workload)), self.mean

        done: dict[int, torch.Tensor] = {}  # one tensor may be both batch and target

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in done:
                shorter = leaf
                for dimension, size in enumerate(leaf.shape):
                    if dimension and size == whole:
                        shorter = shorter.narrow(dimension, 0, mean)
                done[id(leaf)] = leaf if shorter is leaf else shorter.clone()
            return done[id(leaf)]

        batch, target = pytree.tree_map(cut, workload.data)
        return replace(workload, batch=batch, target=target)


def length_of(workload: Workload) -> int:
    """The second size of the batch's first tensor that has one; 0 without."""
    found = (x.shape[1] for x in tensors_of(workload.batch) if x.dim() > 1)
    return next(found, 0)


def _check_has_length(workload: Workload) -> None:
    """Refuse images, and sound whose frames are fixed."""
    first = next((x for x in tensors_of(workload.batch) if x.dim() > 1), None)
    if first is None or (first.dim() > 2 and first.is_floating_point()):
        shape = "no tensor" if first is None else f"shape {[*first.shape]}"
        raise no_lengths(f"its batch has {shape}, without a length that varies")


def no_lengths(why: str) -> WorkloadError:
    """The error of ``--lengths`` for a model whose batches have no length."""
    return WorkloadError(
        f"cannot use --lengths with this model: {why}",
        needed="batches of ROWSxLENGTH: of tokens, or of samples of sound",
        hint="leave out --lengths; ckplan record keeps the largest batch of a loop",
    )


def parse_lengths(text: str) -> Lengths:
    """Read ``128,512,2048``, or a file of numbers.

    Raises:
        WorkloadError: There is no number, or something else.

    >>> parse_lengths("128,512,2048").mean
    896
    """
    if re.fullmatch(r"[0-9, ]+", text) is None and Path(text).is_file():
        text = files.read_bytes(text, "list of lengths").decode(errors="replace")
    words = re.split(r"[,\s]+", text.strip(", \t\r\n"))
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", word) for word in words):
        wrong = next(w for w in words if not re.fullmatch(r"[1-9][0-9]{0,8}", w))
        raise WorkloadError(
            f"cannot read the lengths: {wrong!r} is none",
            needed="whole numbers above zero with commas between, or a file of them",
            hint="--lengths 128,512,2048",
        )
    return Lengths(tuple(map(int, words)))
