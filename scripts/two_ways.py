"""Proves that both ways to trace for CUDA without a GPU see the same step.

Every workload of configs/workloads, the zoo's included, is profiled for CUDA twice, in
float32 and under autocast: on fake CUDA tensors, where torch itself dispatches to
CUDA's ops, and on fake CPU tensors, where we translate what they do. It needs a build
of torch with CUDA, and no GPU. Nothing here is a measurement.

    python scripts/two_ways.py
    python scripts/two_ways.py --only gpt2 --gpu "RTX 4090"

"same" is a graph that is the same in all that it holds: ops, storages, lifetimes; but
for single numbers on the host, which the translation counts on the card. Exit code 1
if two peaks are more than 0.1 % apart, or a step runs one way alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from unittest import mock

import _measuring as measuring
import torch

from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import simulate
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.units import format_bytes

TYPES = {"fp32": Training(), "bf16": Training(amp="bf16")}
MOST_APART = 0.001
_DISPATCHED = "traced under fake CUDA tensors"
HEADERS = ("workload", "types", "ops", "fake CUDA", "translated", "error", "step")


@dataclass(frozen=True)
class Row:
    """One workload in one choice of types, seen in two ways."""

    workload: str
    types: str
    dispatched: Graph | str  # or why there is none
    translated: Graph | str

    def cells(self) -> list[str]:
        """A row of the table."""
        one, other = self.dispatched, self.translated
        if isinstance(one, str) or isinstance(other, str):
            step = "raises in both" if one == other else "one way alone"
            return [self.workload, self.types, "", "", "", "", step]
        peaks = [simulate(graph).peak_bytes for graph in (one, other)]
        same = _alike(one, other)
        apart = abs(len(one.ops) - len(other.ops))
        step = "same" if same else f"{apart} ops apart" if apart else "other layouts"
        return [
            self.workload,
            self.types,
            f"{len(one.ops):,}",
            *map(format_bytes, peaks),
            measuring.format_error(peaks[1], peaks[0]),
            step,
        ]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        one, other = self.dispatched, self.translated
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                yield f"{self.workload}, {self.types}: one way alone runs"
            return
        error = measuring.relative_error(
            simulate(other).peak_bytes, simulate(one).peak_bytes
        )
        if abs(error) > MOST_APART:
            yield f"{self.workload}, {self.types}: peaks are {error:+.2%} apart"


def main() -> int:
    """Profile everything in both ways; print the table, write it."""
    args = measuring.make_parser(__doc__, only=True, gpu="A100 40GB").parse_args()
    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        raise CkplanError(
            "cannot trace in both ways here",
            needed="a build of torch with CUDA, and no GPU",
            hint="pip install torch==2.13.0",
        )
    rows = [
        row_of(name, types, args.gpu)
        for name in measuring.chosen(measuring.everything(), args.only)
        for types in TYPES
    ]
    report = measuring.Report(
        "two_ways",
        "Two ways to trace for CUDA without a GPU",
        __doc__,
        [
            f"For the card {args.gpu}:",
            measuring.make_table(HEADERS, [row.cells() for row in rows], texts=2),
        ],
        [what for row in rows for what in row.broken()],
    )
    return measuring.finish(report, args)


def row_of(name: str, types: str, gpu: str) -> Row:
    """Profile one workload in both ways."""
    measuring.say(f"{name}, {types}")
    return Row(name, types, *(_seen(name, types, gpu, way) for way in (True, False)))


def _seen(name: str, types: str, gpu: str, dispatched: bool) -> Graph | str:
    training = TYPES[types]
    with mock.patch.object(torch.backends.cuda, "is_built", lambda: dispatched):
        try:
            torch.manual_seed(0)
            graph = profile_workload(
                WorkloadSpec(measuring.location_of(name)),
                training=training,
                device="cuda",
                gpu=gpu,
            )
        except CkplanError as error:
            return error.what
    fell_back = dispatched and not any(_DISPATCHED in note for note in graph.notes)
    return _why(graph.notes) if fell_back else graph


def _alike(one: Graph, other: Graph) -> bool:
    rest = {field.name for field in fields(Graph)} - {"notes", "storages"}
    return (
        all(getattr(one, name) == getattr(other, name) for name in rest)
        and len(one.storages) == len(other.storages)
        and all(
            first in (second, replace(second, bytes=0))
            for first, second in zip(one.storages, other.storages, strict=True)
        )
    )


def _why(notes: Sequence[str]) -> str:
    return next(note for note in notes if note.startswith("not traced"))


if __name__ == "__main__":
    measuring.run(main)
