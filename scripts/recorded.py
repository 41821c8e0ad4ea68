"""Proves that scripts of all kinds are recorded to the byte and planned to the bit.

Twelve small training scripts, in the styles that people use: nanoGPT, accumulation
with clipping and an average of the weights, a GAN, contrastive towers, batches of
several lengths, segmentation, PPO, a diffusion trainer, the Trainer of transformers,
fine-tuning with LoRA, Accelerate, Lightning. Each runs under ``ckplan record``, which
finds model and optimizer. A plan is solved from the trace. Then the script trains
without the plan and with it. Kept where both predicted peaks are within 0.1 % of those
of the allocator, and parameters, buffers, gradients, optimizer state and random state
are bitwise equal after 20 steps.

    python scripts/recorded.py
    python scripts/recorded.py --only language --only lora

Shown are bytes and bits, which do not depend on who else uses the machine. Exit code 1
if any of it does not hold.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _measuring as measuring
import _train
import torch
from loops import state_of
from measured import peak_bytes_of
from torch import nn

import ckplan
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.script import ScriptRecorder, record_script
from ckplan.training.fingerprint import parameter_shapes
from ckplan.training.script import Script
from ckplan.units import format_bytes

SCRIPT = Path(_train.__file__)
STEPS, MEASURED_STEPS = 20, 4
MOST_ERROR = 0.001
TITLES = {
    "language": "nanoGPT style, held logits",
    "accumulated": "accumulation, clipping, EMA",
    "generator": "GAN",
    "towers": "contrastive, two towers",
    "lengths": "batches of several lengths",
    "segmenter": "segmentation",
    "ppo": "PPO",
    "denoiser": "diffusion trainer, EMA",
    "transformers": "Trainer, accumulation",
    "lora": "SFT with LoRA in the Trainer",
    "accelerate": "Accelerate, bf16, clipping",
    "lightning": "Lightning",
}
HEADERS = (
    *("script", "style", "peak", "measured", "error"),
    *("planned", "measured", "error", f"bits after {STEPS} steps"),
)


@dataclass(frozen=True)
class Row:
    """One script: predicted and measured bytes, and whether bits are equal."""

    name: str
    predicted: tuple[int, int]  # without the plan, with it
    measured: tuple[int, int]
    num_regions: int
    num_compared: int  # tensors
    differing: int

    @property
    def errors(self) -> list[float]:
        """Of both predictions, as fractions of the measured peaks."""
        both = zip(self.predicted, self.measured, strict=True)
        return [one / other - 1 for one, other in both]

    def cells(self) -> list[str]:
        """A row of the table."""
        cells = [self.name, TITLES[self.name]]
        for one, other in zip(self.predicted, self.measured, strict=True):
            cells += [format_bytes(one), format_bytes(other)]
            cells.append(measuring.format_error(one, other))
        same = f"{self.num_compared} tensors equal"
        return [*cells, same if not self.differing else f"{self.differing} DIFFER"]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        if max(map(abs, self.errors)) > MOST_ERROR:
            yield f"{self.name}: a predicted peak is wrong by more than 0.1 %"
        if self.differing or not self.num_compared:
            yield f"{self.name}: {self.differing} tensors differ"
        if not self.num_regions or self.measured[1] >= self.measured[0]:
            yield f"{self.name}: the plan saves nothing"


def main() -> int:
    """Record, plan and train every script; print the table, write it."""
    parser = measuring.make_parser(__doc__, only=True)
    args = parser.parse_args()
    names = measuring.chosen(TITLES, args.only)
    rows = []
    for name in names:
        measuring.say(name)
        rows.append(_row_of(name))
        measuring.say("  ".join(rows[-1].cells()))
    table = measuring.make_table(HEADERS, [row.cells() for row in rows], texts=2)
    broken = [what for row in rows for what in row.broken()]
    report = measuring.Report("recorded", "Recorded scripts", __doc__, [table], broken)
    return measuring.finish(report, args, whole=not args.only)


def _row_of(name: str) -> Row:
    graph = _apart(_recorded, name)
    plan = ckplan.solve(graph, _train.loop_of(name).budget)
    replays = simulate(graph), simulate(graph, resolve(plan, graph))
    peaks = [_apart(_peak, name, graph, one) for one in (None, plan)]
    compared, differing = _apart(_compared, name, graph, plan)
    return Row(
        name,
        (replays[0].peak_bytes, replays[1].peak_bytes),
        (peaks[0], peaks[1]),
        len(plan.regions),
        compared,
        differing,
    )


def _apart(function: Any, *args: Any) -> Any:
    """Run a function in a process of its own, as libraries keep state."""
    with multiprocessing.get_context("fork").Pool(1) as process:
        return process.apply(_quiet, (function, args))


def _quiet(function: Any, args: Sequence[Any]) -> Any:
    _train.quietly()
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args)


def _recorded(name: str) -> Graph:
    """The trace that ``ckplan record scripts/_train.py NAME 4`` writes."""
    found: list[Graph] = []

    def keep(watch: ScriptRecorder) -> None:
        assert watch.recorder is not None, "internal error: nothing is recorded"
        found.append(watch.recorder.graph)

    record_script(Script(str(SCRIPT), (name, str(MEASURED_STEPS))), recorded=keep)
    return found[0]


def _made(loop: Any, graph: Graph, plan: Plan | None) -> Any:
    """The models and optimizers of a script; that which was recorded with a plan."""
    state = loop.make()
    if plan is not None:
        shapes = graph.fingerprint["parameters"]
        models = [one for one in state if isinstance(one, nn.Module)]
        (model,) = (one for one in models if parameter_shapes(one) == shapes)
        ckplan.apply(model, plan)
    return state


def _peak(name: str, graph: Graph, plan: Plan | None) -> int:
    """Most bytes allocated in a few steps."""
    loop = _train.loop_of(name)
    state = _made(loop, graph, plan)
    models = [one for one in state if isinstance(one, nn.Module)]
    held = [t for m in models for t in (*m.parameters(), *m.buffers())]
    if name not in _train.LOOPS:
        held.append(sys.modules["trainer_loops"].TOKENS)
    return peak_bytes_of(lambda: loop.run(state, MEASURED_STEPS), held)


def _compared(name: str, graph: Graph, plan: Plan) -> tuple[int, int]:
    """How many tensors are compared after training, and how many differ."""
    loop = _train.loop_of(name)
    ends = []
    for one in (None, plan):
        state = _made(loop, graph, one)
        loop.run(state, STEPS)
        ends.append(state_of(state))
    same = list(map(torch.equal, *ends))
    assert len(ends[0]) == len(ends[1]), "internal error: other tensors"
    return len(same), same.count(False)


if __name__ == "__main__":
    measuring.run(main)
