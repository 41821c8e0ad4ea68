"""What ``ckplan.record`` costs, in seconds of the thread that trains.

A transformer of four sizes trains with AdamW. Of each: a step without a recorder, what
comes on top of the step before the recorded one, since every tensor that is alive is
looked for once there, and the recorded step. ``all over a step`` is both of what comes
on top over one step. Other steps cost nothing. The claim holds if a recorded step of
0.1 s or more takes at most twice as long as another one. Shorter ones may take longer,
as each op costs the same time more, however small it is: two columns say what no
recorder in Python can do without. ``bytes alone`` is a step under a mode of torch that
follows storages, and hooks that copy what autograd saves: no bytes can be known with
less. ``least`` also describes the tensors of each op, finds the line that ran it, the
module around it and the node of autograd that it differentiates, as a trace needs them;
it does nothing with all this. Where it is about 2, a recorder cannot stay below 2.

    python scripts/record_cost.py

Seconds are of the processor, medians of ROUNDS, so that other programs matter little.
Exit code 1 if the claim does not hold.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import _measuring as measuring
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import ckplan
from ckplan.tracing.faking.backward_pass import reachable_nodes

FIXED = 0.1  # seconds of a step, below which the recorder's own share is larger
MOST = 2.0
ROUNDS = 5
STEPS = 4  # in one round
SIZES = {  # layers, width, rows of 128 tokens
    "short": (4, 64, 4),
    "0.1 s": (4, 128, 8),
    "0.3 s": (4, 256, 8),
    "1 s": (8, 256, 16),
}
HEADERS = (
    *("step", "ops", "seconds", "beginning", "recorded", "recorded / step"),
    *("bytes alone / step", "least / step"),
    *("all over a step", "another step", "graph, when read"),
)


@dataclass(frozen=True)
class Row:
    """Seconds of one size."""

    name: str
    num_ops: int
    plain: float
    begun: float  # on top of the step before the recorded one
    recorded: float
    followed: float  # with a mode that follows storages, and nothing else
    described: float  # with one that describes the ops, too
    after: float  # a step while the recorder is still open
    graph: float  # measuring the ops, when ``recorder.graph`` is read

    @property
    def ratio(self) -> float:
        """The recorded step over a step without a recorder."""
        return self.recorded / self.plain

    def cells(self) -> list[str]:
        """A row of the table."""
        over = (self.begun + self.recorded - self.plain) / self.plain
        seconds = (self.plain, self.begun, self.recorded)
        return [
            *(self.name, str(self.num_ops), *(f"{one:.3f}" for one in seconds)),
            f"{self.ratio:.2f}",
            *(f"{one / self.plain:.2f}" for one in (self.followed, self.described)),
            *(f"{over:.2f}", f"{self.after / self.plain:.2f}", f"{self.graph:.2f}"),
        ]


class Follower(TorchDispatchMode):
    """Numbers the storages of every op and sees them freed: the least for bytes.

    No op is described, no call of a module is watched. What autograd saves is copied,
    so that it is seen when nothing else holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}
        self._ops: list[tuple[Any, list[int], list[int]]] = []
        self._freed: list[tuple[int, int]] = []
        self._skips = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._skips:
            return func(*args, **kwargs)
        reads = self._numbers((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        made = self._numbers(out if isinstance(out, (tuple, list)) else (out,))
        self._ops.append((func, reads, made))
        return out

    @contextmanager
    def following(self) -> Iterator[None]:
        """A scope in which steps are followed."""
        with saved_tensors_hooks(self.copied, lambda one: one), self:
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Take gradients."""
        loss.backward()

    def _numbers(self, values: Any) -> list[int]:
        found = []
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                address = storage._cdata
                if address not in self._alive:
                    gone = partial(self._gone, address)
                    self._alive[address] = weakref.ref(storage, gone)
                found.append(address)
            elif type(value) is list:
                found += self._numbers(value)
        return found

    def _gone(self, address: int, reference: Any) -> None:
        if self._alive.get(address) is reference:
            del self._alive[address]
        self._freed.append((address, len(self._ops)))

    def copied(self, saved: torch.Tensor) -> torch.Tensor:
        """What is saved in its place."""
        if isinstance(saved, nn.Parameter):
            return saved
        self._skips = True
        try:
            return saved.detach().clone()
        finally:
            self._skips = False


class Describer(Follower):
    """Also notes the tensors, line, module and node of every op."""

    def __init__(self) -> None:
        super().__init__()
        self._described: list[tuple[Any, ...]] = []
        self._calls: list[tuple[nn.Module, int]] = []
        self._place = 0  # the call that runs, or the node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._skips:
            return func(*args, **kwargs or {})
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != __file__:
            frame = frame.f_back
        line = None if frame is None else (frame.f_code, frame.f_lasti)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        values = (*args, *(kwargs or {}).values(), out)
        self._described.append((*self._describe(values), self._place, line))
        return out

    def _describe(self, values: Any) -> list[Any]:
        found: list[Any] = []
        for one in values:
            if isinstance(one, torch.Tensor):
                found.append((one.dtype, one.shape, one.stride(), one.layout))
            elif isinstance(one, (list, tuple)):
                found.append(self._describe(one))
            else:
                found.append(one)
        return found

    @contextmanager
    def following(self) -> Iterator[None]:
        """A scope in which steps are followed, and calls of modules."""
        hooks = nn.modules.module
        with ExitStack() as stack:
            for hook in (
                hooks.register_module_forward_pre_hook(lambda one, _: self._enter(one)),
                hooks.register_module_forward_hook(lambda one, *_: self._enter(one)),
            ):
                stack.callback(hook.remove)
            stack.enter_context(super().following())
            yield

    def _enter(self, module: nn.Module) -> None:
        self._calls.append((module, len(self._ops)))
        self._place = len(self._calls)

    def backward(self, loss: torch.Tensor) -> None:
        """Take gradients, and note the nodes that run."""
        assert loss.grad_fn is not None
        for node in reachable_nodes([loss.grad_fn]):
            node.register_prehook(partial(self._begin, node._sequence_nr()))
            node.register_hook(self._end)
        loss.backward()

    def _begin(self, number: int, *_: object) -> None:
        self._place = number

    def _end(self, *_: object) -> None:
        self._place = 0


class Block(nn.Module):
    """Attention and a perceptron, as in a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inside(self.norms[0](x)).unflatten(2, (3, 4, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.outside(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def main() -> int:
    """Record every size; print the table, write it."""
    parser = measuring.make_parser(__doc__, only=True)
    args = parser.parse_args()
    torch.manual_seed(measuring.SEED)
    rows = []
    for name in measuring.chosen(SIZES, args.only):
        rows.append(_row_of(name))
        measuring.say("  ".join(rows[-1].cells()))
    table = measuring.make_table(HEADERS, [row.cells() for row in rows], texts=1)
    broken = [
        f"{row.name}: the recorded step takes {row.ratio:.2f} of another one"
        for row in rows
        if row.plain >= FIXED and row.ratio > MOST
    ]
    report = measuring.Report("record_cost", "Recording", __doc__, [table], broken)
    return measuring.finish(report, args, whole=not args.only)


def _row_of(name: str) -> Row:
    layers, width, batch = SIZES[name]
    model = nn.Sequential(*(Block(width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, 128, width)

    def step(backward: Callable[[Any], None] = torch.Tensor.backward) -> float:
        start = time.thread_time()
        backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - start

    for _ in range(STEPS):
        step()
    rounds = []
    for _ in range(ROUNDS + 1):
        plain = [step() for _ in range(STEPS)]
        with ckplan.record(model, optimizer) as recorder:
            first, recorded, *rest = [step() for _ in range(STEPS)]
        least = []
        for mode in (Follower(), Describer()):
            with mode.following():
                least.append(median([step(mode.backward) for _ in range(STEPS)]))
        begun = first - median(plain)
        rounds.append((median(plain), begun, recorded, *least, median(rest)))
    plain, begun, *others = map(median, zip(*rounds[1:], strict=True))
    start = time.thread_time()
    num_ops = len(recorder.graph.ops)
    graph = time.thread_time() - start
    return Row(name, num_ops, plain, begun, *others, graph)


if __name__ == "__main__":
    measuring.run(main)
