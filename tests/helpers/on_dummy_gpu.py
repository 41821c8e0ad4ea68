"""Compare ckplan's allocator model with torch's allocator on a dummy GPU.

python tests/helpers/on_dummy_gpu.py reductions
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from _blocks import CUDA, AskedFor, blocks
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

import ckplan
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.simulating.caching_allocator import Block, CachingAllocator, NoRoomError
from ckplan.simulating.reductions import Processors, Reduction, partial_result_blocks
from ckplan.tracing.cuda.cublas import kept_bytes
from ckplan.tracing.cuda.sdpa_backend import AttentionArgs, choose_backend
from ckplan.training.allocator import gpu_allocator_stats

SIZES = (1, 2, 3, 7, 8, 16, 31, 64, 100, 197, 384, 1000, 4096, 50257, 65536)
MOST = 20_000_000  # elements
_REFUSED = "aligned|contiguous|no kernel found|cuDNN Frontend"

OPS: dict[str, tuple[Callable[[Any, list[int]], Any], Callable[[int], int]]] = {
    "sum": (lambda x, dims: x.sum(dims), lambda size: max(size, 4)),
    "mean": (lambda x, dims: x.mean(dims), lambda size: max(size, 4)),
    "norm": (
        lambda x, dims: torch.linalg.vector_norm(x, dim=dims),
        lambda size: max(size, 4),
    ),
    "amax": (lambda x, dims: x.amax(dims), lambda size: size),
    "var": (lambda x, dims: x.var(dims), lambda size: 32 if size == 8 else 16),
    "max": (lambda x, dims: x.max(dims[0]), lambda size: 16),
    "argmax": (lambda x, dims: x.argmax(dims[0]), lambda size: 16),
}


def reductions(seed: int = 0, count: int = 400) -> None:
    """Workspaces of reductions, for tensors of all kinds."""
    rng = random.Random(seed)
    card = torch.cuda.get_device_properties(CUDA)
    processors = Processors(
        card.multi_processor_count, card.max_threads_per_multi_processor
    )
    aside = 0
    for _ in range(count):
        x = some_tensor(rng)
        name, (run, partial_bytes) = rng.choice([*OPS.items()])
        dims = rng.sample(range(x.dim()), rng.randint(1, x.dim()))
        dims = dims[:1] if name in ("max", "argmax") else dims
        outs, most, left = blocks(lambda run=run, x=x, dims=dims: run(x, dims))
        out = outs[0] if isinstance(outs, tuple) else outs
        size = x.element_size()
        reduction = Reduction(
            x.shape,
            x.stride(),
            frozenset(dims),
            size,
            partial_bytes(size),
            out.element_size(),
        )
        found = Counter(partial_result_blocks(reduction, processors))
        assert most - left == found, (name, reduction, most, left, found)
        aside += bool(found)
    assert aside > count / 20, "hardly any of them put something aside"


def some_tensor(rng: random.Random) -> torch.Tensor:
    """A tensor of random shape, dtype and order of dimensions, sometimes with gaps."""
    shape = [rng.choice(SIZES) for _ in range(rng.randint(1, 4))]
    while math.prod(shape) > MOST:
        shape[rng.randrange(len(shape))] = rng.choice((1, 2, 8))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    order = rng.sample(range(len(shape)), len(shape))
    x = torch.empty([shape[dim] for dim in order], dtype=dtype, device=CUDA)
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    if rng.random() < 0.2:
        x = x[tuple(slice(0, max(1, n // rng.randint(1, 2))) for n in x.shape)]
    return x


def caching_allocator() -> None:
    """The model gets all requests to torch's allocator while a model trains."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    layers = [torch.nn.Linear(700 + 37 * n, 737 + 37 * n) for n in range(12)]
    model = torch.nn.Sequential(*layers, torch.nn.GELU()).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (64, 900, 64, 2000, 1500):
        model(torch.empty(rows, 700, device=CUDA)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    log = torch.cuda.memory._snapshot()["device_traces"][0]
    ours = CachingAllocator(expandable="--expandable" in sys.argv)
    blocks: dict[int, Block] = {}
    most = 0
    for event in log:
        if event["action"] == "alloc":
            blocks[event["addr"]] = ours.allocate(event["size"])
            most = max(most, ours.allocated_bytes)
        elif event["action"] == "free_completed":
            ours.free(blocks.pop(event["addr"]))
    found = gpu_allocator_stats(CUDA)
    assert len(log) > 500
    assert ours.reserved_bytes == found.reserved_peak_bytes
    assert most == found.allocated_peak_bytes


def full_card(count: int = 2000) -> None:
    """The model runs out of memory where torch does, after freeing the same blocks.

    This holds unless addresses chosen by the driver decide which block is taken.
    """
    rng, capacity_bytes = random.Random(int(sys.argv[2])), 1_500_000_000
    expandable = "--expandable" in sys.argv
    ours = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    live: list[tuple[torch.Tensor, Block]] = []
    failed = 0
    for _ in range(count):
        if live and rng.random() < 0.45:
            _, block = live.pop(rng.randrange(len(live)))
            ours.free(block)
            continue
        size = round(2 ** rng.uniform(20.1, 28))
        free = [num_bytes for num_bytes, *_ in ours._large._free]
        block = _if_there_is_room(ours, size)
        opened = sum(not hole.after for hole in ours._large._holes) if expandable else 1
        if len({*free}) < len(free) or opened > 1:
            break  # of two like blocks, or of two segments, either may be the first
        tensor = None
        with contextlib.suppress(torch.OutOfMemoryError):
            tensor = torch.empty(size, dtype=torch.uint8, device=CUDA)
        assert (block is None) == (tensor is None)
        if block is None or tensor is None:
            failed += 1
        else:
            live.append((tensor, block))
        assert ours.reserved_bytes == torch.cuda.memory_reserved(CUDA)
    assert failed


def _if_there_is_room(ours: CachingAllocator, num_bytes: int) -> Block | None:
    with contextlib.suppress(NoRoomError):
        return ours.allocate(num_bytes)
    return None


class OnTwoStreams(torch.nn.Module):
    """Computes one half of what it returns beside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.side = torch.nn.Linear(64, 64), torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, main = torch.tanh(self.layer(x)), torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            gate = torch.sigmoid(torch.tanh(x))
        x.record_stream(self.side)
        main.wait_stream(self.side)
        gate.record_stream(main)
        return torch.sin(x) * gate


def streams() -> None:
    """Recomputation on one stream waits for work on the other."""
    model = torch.nn.Sequential(OnTwoStreams(), torch.nn.Linear(64, 64)).to(CUDA)
    ckplan.apply(model, Plan(regions=(PlannedRegion("0"),)))
    for _ in range(3):  # written down, and repeated
        out = model(torch.empty(8, 64, device=CUDA, requires_grad=True)).sum()
        with mock.patch.object(torch.cuda.Stream, "wait_stream", autospec=True) as wait:
            out.backward()
        side = model[0].side
        main = torch.cuda.current_stream()
        waited = [call.args for call in wait.call_args_list]
        assert (side, main) in waited, waited
        assert (main, side) in waited, waited


def attention(seed: int = 0, count: int = 2000) -> None:
    """Kernels that torch selects, for arguments of all kinds."""
    rng = random.Random(seed)
    taken = Counter[SDPBackend]()
    capability = torch.cuda.get_device_capability(CUDA)
    for _ in range(count):
        asked = some_attention(rng)
        found = choose_backend(asked, capability)
        query, key, value, mask, dropout, causal, scale, grouped = asked
        rest = {"scale": scale, "enable_gqa": grouped}
        number = torch._fused_sdp_choice(
            query, key, value, mask, dropout, causal, **rest
        )
        shapes = [(*t.shape, t.stride(), t.storage_offset()) for t in asked.tensors]
        rest |= {"dropout": dropout, "causal": causal, "dtype": query.dtype}
        assert found == SDPBackend(number), (shapes, rest, mask, SDPBackend(number))
        taken[found] += 1
    assert min(taken.values()) > count / 20, taken
    assert len(taken) > 1


def attention_workspaces(seed: int = 1, count: int = 500) -> None:
    """Workspaces of fused kernels, forward and backward."""
    rng = random.Random(seed)
    asked_for = AskedFor("attention")
    for _ in range(count):
        asked = some_attention(rng)
        if choose_backend(asked, asked_for.card.capability) == SDPBackend.MATH:
            continue
        query, key, value, mask, dropout, causal, scale, grouped = asked
        rest = {"scale": scale, "enable_gqa": grouped}
        try:
            with asked_for:
                out = scaled_dot_product_attention(
                    query, key, value, mask, dropout, causal, **rest
                )
                if out.requires_grad:
                    out.backward(torch.empty_like(out))
        except RuntimeError as error:  # chosen by torch, refused by the kernel
            assert re.search(_REFUSED, str(error)), error
        query.grad = None
    for name, found in asked_for.found.items():
        assert len(found) > 10, name
        assert all(one.said == one.found for one in found), (name, found)
    assert len(asked_for.found) >= 2


def losses() -> None:
    """Bytes of losses and their gradients, with reduction or without."""
    for loss in (
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.soft_margin_loss,
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
    ):
        for reduction in ("mean", "sum", "none"):
            x, y = (torch.empty(900, 1100, device=CUDA) for _ in range(2))
            asked_for = AskedFor(loss.__name__)
            with asked_for:
                out = loss(x.requires_grad_(), y, reduction=reduction)
                out.backward(torch.empty_like(out))
            assert asked_for.found, loss
            for op, (one,) in asked_for.found.items():
                apart = (one.found - one.said) + (one.said - one.found)
                assert apart in (Counter(), Counter([512])), (op, reduction, one)


TURNED: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "layer_norm": ((60, 70), lambda x: functional.layer_norm(x, x.shape[1:])),
    "rms_norm": ((60, 70), lambda x: functional.rms_norm(x, x.shape[1:])),
    "softmax": ((60, 70), lambda x: x.softmax(0)),
    "cumsum": ((60, 70), lambda x: x.cumsum(0)),
    "roll": ((60, 70), lambda x: x.roll(1, 0)),
    "topk": ((60, 70), lambda x: x.topk(3)[0]),
    "kthvalue": ((60, 70), lambda x: x.kthvalue(3)[0]),
    "median": ((60, 70), lambda x: x.median(1)[0]),
    "nll_loss": (
        (60, 60),
        lambda x: functional.nll_loss(x, torch.zeros(len(x), device=CUDA).long()),
    ),
    "im2col": ((4, 3, 60, 70), lambda x: functional.unfold(x, 3)),
    "col2im": ((4, 27, 58 * 68), lambda x: functional.fold(x, (60, 70), 3)),
    "reflection": ((4, 3, 60, 70), lambda x: functional.pad(x, (1,) * 4, "reflect")),
    "avg_pool2d": ((4, 3, 60, 70), lambda x: functional.avg_pool2d(x, 2)),
    "avg_pool3d": ((4, 3, 8, 8, 9), lambda x: functional.avg_pool3d(x, 2)),
    "max_pool2d": ((4, 3, 60, 70), lambda x: functional.max_pool2d(x, 2)),
    "max_pool3d": ((4, 3, 8, 8, 9), lambda x: functional.max_pool3d(x, 2)),
    "adaptive_avg": ((4, 3, 60, 70), lambda x: functional.adaptive_avg_pool2d(x, 4)),
    "adaptive_max": ((4, 3, 60, 70), lambda x: functional.adaptive_max_pool2d(x, 4)),
    **{
        f"upsample_{mode}": (
            (4, 3, 60, 70),
            lambda x, mode=mode: functional.interpolate(x, scale_factor=2, mode=mode),
        )
        for mode in ("nearest", "bilinear", "bicubic")
    },
}
"""Part of an op's name, a shape, and a function that has it."""


def copies() -> None:
    """What is made contiguous, where tensors and gradients are not."""
    for name, (shape, run) in TURNED.items():
        asked_for = AskedFor(name)
        x = turned(torch.empty(shape, device=CUDA)).requires_grad_()
        with asked_for:
            out = run(x)
            out.backward(turned(torch.empty(out.shape, device=CUDA)))
        assert asked_for.found, name
        for op, found in asked_for.found.items():
            assert all(one.said == one.found for one in found), (op, found)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Of the same shape, its last two dimensions swapped in memory."""
    if x.dim() < 2:
        return x
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def sorting(seed: int = 2, count: int = 200) -> None:
    """Workspaces of accumulation by index, which sorts the indices first."""
    rng = random.Random(seed)
    asked_for = AskedFor("index_put")
    for _ in range(count):
        rows = rng.choice((2, 255, 256, 257, 65536, 65537))
        length = rng.randint(1, 9999)
        tensor, values = (torch.empty(n, 3, device=CUDA) for n in (rows, length))
        index = torch.zeros(length, dtype=torch.long, device=CUDA)
        with asked_for:
            tensor.index_put((index,), values, accumulate=True)
    (found,) = asked_for.found.values()
    assert all(one.said == one.found for one in found), found


def group_norm(seed: int = 3, count: int = 200) -> None:
    """Factors, offsets and sums, of images that lie in any way."""
    rng = random.Random(seed)
    asked_for = AskedFor("group_norm")
    for _ in range(count):
        groups = rng.choice((1, 2, 8))
        channels = groups * rng.choice((1, 3, 64))
        shape = (7, channels, *rng.choice(((40,), (9, 1), (2, 16), (3, 4, 5))))
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
        x, gradient = (some_image(rng, shape, dtype) for _ in range(2))
        affine = rng.random() < 0.7
        norm = torch.nn.GroupNorm(groups, channels, affine=affine).to(CUDA, dtype)
        x = x.detach().requires_grad_(not affine or rng.random() < 0.8)
        with asked_for:
            norm(x).backward(gradient)
    for op, found in asked_for.found.items():
        wrong = [one for one in found if one.said != one.found]
        assert not wrong, (op, wrong)
    assert len(asked_for.found) == 2


def some_image(
    rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Its channels first or last, perhaps some of more."""
    batch, channels, *pixels = shape
    more = channels * rng.choice((1, 1, 2))
    x = torch.empty(batch, more, *pixels, dtype=dtype, device=CUDA)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last and rng.random() < 0.5:
        x = x.to(memory_format=last)
    return x[:, :channels]


def cublas() -> None:
    """What stays of a step in which only multiplications keep something."""
    layer = torch.nn.Linear(64, 64, device=CUDA)
    before = gpu_allocator_stats(CUDA).requested_bytes
    layer(torch.empty(32, 64, device=CUDA)).sum().backward()
    layer.zero_grad()
    capability = torch.cuda.get_device_capability(CUDA)
    said = kept_bytes(capability, ["addmm"]) + kept_bytes(capability, ["mm"])
    assert gpu_allocator_stats(CUDA).requested_bytes - before == sum(said)


def some_attention(rng: random.Random) -> AttentionArgs:
    """Queries, keys and values, now and then of different heads, and a mask."""
    batch, heads = rng.choice((1, 2, 3)), rng.choice((1, 2, 4))
    length = rng.choice((1, 2, 33, 64, 128))
    keys = length if rng.random() < 0.6 else rng.choice((1, 64, 65, 192))
    width = rng.choice((8, 20, 64, 128, 136, 192, 208, 232, 256, 264))
    wide = width if rng.random() < 0.8 else rng.choice((33, 64, 128))
    fewer = rng.choice((1, heads, heads))
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    needs_grad = rng.random() < 0.6

    def some(*shape: int, fit: bool = False) -> torch.Tensor:
        kind = "" if fit else rng.choice(("", "", "turned", "shifted", "gaps"))
        x = torch.empty(math.prod(shape) + 1, dtype=dtype, device=CUDA)
        x = x[1:] if kind == "shifted" else x[:-1]
        if kind == "turned":
            x = x.view(*shape[:-2], shape[-1], shape[-2]).transpose(-2, -1)
        if kind == "gaps":
            x = x.new_empty(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
        return x.view(shape) if x.dim() == 1 else x

    fit = rng.random() < 0.8
    query = some(batch, heads, length, width, fit=fit).requires_grad_(needs_grad)
    key = some(batch, fewer, keys, width, fit=fit)
    value = some(batch, fewer if rng.random() < 0.9 else 1, keys, wide, fit=fit)
    mask = None
    if rng.random() < 0.3:
        shape = rng.choice(([1, 1], [batch, 1], [batch, heads], [heads], []))
        mask = some(*shape, rng.choice((1, length)), keys, fit=fit)
        mask = mask.detach().requires_grad_(rng.random() < 0.2)
    dropout = rng.choice((0.0, 0.0, 0.1, 0.125))
    causal = mask is None and rng.random() < 0.3
    grouped = rng.random() < 0.5
    return AttentionArgs(query, key, value, mask, dropout, causal, None, grouped)


if __name__ == "__main__":
    tests = (
        reductions,
        caching_allocator,
        full_card,
        streams,
        attention,
        attention_workspaces,
        losses,
        copies,
        sorting,
        group_norm,
        cublas,
    )
    {test.__name__: test for test in tests}[sys.argv[1]]()
    os._exit(0)  # such a GPU is no good at shutting down
