"""What CUDA would hold, told without a GPU: closed forms, and torch's own lists."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import MegatronLayer, mean_square
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from typer.testing import CliRunner

import ckplan
from ckplan.cli import app
from ckplan.errors import CkplanError, WorkloadError
from ckplan.gpus import Gpu
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.allocations import added_to_gradients, replayed
from ckplan.simulating.simulate import simulate
from ckplan.tracing.costs.cost_cache import Cost
from ckplan.tracing.costs.op_arguments import arguments
from ckplan.tracing.costs.roofline import roofline
from ckplan.tracing.cuda import cpu_as_cuda
from ckplan.tracing.cuda.attention_workspaces import _splits, _tile
from ckplan.tracing.cuda.autocast import (
    FLOAT32,
    FLOAT32_APPENDED,
    FLOAT32_RESULT,
    LOWER_PRECISION,
    REFUSED,
    WIDEST,
    registered,
)
from ckplan.tracing.cuda.cublas import (
    WORKSPACE_BYTES,
    WORKSPACE_PERSISTS,
    kept_bytes,
    workspace_bytes,
)
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.tracing.recording.recording import RawOp
from ckplan.tracing.target import TraceTarget, find_target
from ckplan.training.workload import Workload

ROOT = Path(__file__).parents[3]
A100, HOPPER, TURING, BLACKWELL = (8, 0), (9, 0), (7, 5), (10, 0)
SINCE = torch.__version__


def block(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def on_cuda(model: nn.Module, batch: Any, **options: Any) -> Graph:
    return ckplan.profile(model, batch, loss=mean_square, device="cuda", **options)


def forward_names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops[: graph.num_forward]]


def kept(graph: Graph) -> int:
    return graph.bytes_by_kind["activation"]


# -- closed forms --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "b", "h", "a"), [(256, 2, 128, 4), (128, 4, 256, 2), (512, 1, 64, 8)]
)
def test_a_layer_of_megatron_holds_what_the_paper_says(
    s: int, b: int, h: int, a: int
) -> None:
    # Korthikanti et al., "Reducing activation recomputation in large transformer
    # models", equation (1): s b h (34 + 5 a s / h) bytes, statistics of norms apart.
    def held(layers: int) -> int:
        model = nn.Sequential(*(MegatronLayer(h, a, 0.1) for _ in range(layers)))
        batch = torch.randn(s, b, h, dtype=torch.float16)
        return kept(on_cuda(model.half(), batch))

    statistics = 2 * 2 * block(s * b * 4)
    assert held(3) - held(2) == s * b * h * 34 + 5 * a * s * s * b + statistics


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        heads = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(*heads, **self.options)
        return out.transpose(1, 2).flatten(2)


def test_flash_attention_keeps_its_inputs_its_output_and_one_float_a_row() -> None:
    batch, length, width, heads = 2, 128, 64, 4
    x = torch.randn(batch, length, width, dtype=torch.float16)
    graph = on_cuda(Attention(is_causal=True).half(), x)
    at = forward_names(graph).index("_scaled_dot_product_flash_attention")
    saved = {
        s.storage
        for s in graph.saved
        if s.packed_at in (at, at + 1) and s.unpacked_at >= 0
    } - {i for i, s in enumerate(graph.storages) if s.kind == "input"}
    tensor, rows = batch * length * width * 2, batch * heads * length * 4
    sizes = sorted(graph.storages[s].bytes for s in saved)
    assert sizes[-5:] == [rows, *[tensor] * 4]
    assert all(size == 512 for size in sizes[:-5])  # seed and offset of dropout
    backward = next(op for op in graph.ops if "flash_attention_backward" in op.name)
    accumulators = batch * heads * length * 4 * (1 + 32)  # 16 wide are 32 in tiles
    assert backward.workspace.bytes == accumulators


def test_a_mask_of_dropout_is_one_byte_each_and_an_eighth_as_bits() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64))
    graph = on_cuda(model, torch.randn(512, 64))
    at = forward_names(graph).index("native_dropout")
    mask = graph.storages[graph.ops[at].outputs[1]]
    assert mask.bytes == 512 * 256
    assert graph.encoding_of[at, 1].bytes == 512 * 256 // 8


def test_adamw_steps_over_lists_and_makes_one_more_of_every_parameter() -> None:
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
    graph = on_cuda(model, torch.randn(8, 100))
    live = simulate(graph).live_bytes
    update = live[2 * graph.backward_stop : -1]  # the last moment is after it all
    roots = sum(block(4 * p.numel()) for p in model.parameters())
    assert max(update) - min(update) == roots
    assert "_foreach_sqrt" in {op.name for op in graph.ops[graph.backward_stop :]}
    states = 2 * roots  # and their counts of steps, which are not on the GPU
    assert graph.bytes_by_kind["optimizer"] == states


@pytest.mark.parametrize(
    ("optimizer", "op", "states"),
    [
        ("sgd", "_foreach_add_", 0),
        ("momentum", "_foreach_mul_", 1),
        ("adamw:fused", "_fused_adamw_", 2),
        ("sgd:fused", "_fused_sgd_", 0),
        ("adafactor", "lerp_", 0),
    ],
)
def test_optimizers_step_as_on_cuda(optimizer: str, op: str, states: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    graph = on_cuda(model, torch.randn(8, 64), optimizer=optimizer, clip=1.0)
    names = [one.name for one in graph.ops[graph.backward_stop :]]
    assert op in names or f"_foreach_{op}" in names
    assert "_foreach_norm" in names
    if optimizer != "adafactor":
        # Counts of steps, which are there on the GPU.
        counts = 2 * 512 if optimizer == "adamw:fused" else 0
        held = graph.bytes_by_kind["optimizer"]
        assert held == states * 2 * 64 * 64 * 4 + counts


@pytest.mark.parametrize(
    ("capability", "default"),  # of torch, written as in CUBLAS_WORKSPACE_CONFIG
    [
        (TURING, ":4096:2:16:8"),
        (A100, ":4096:2:16:8"),
        (HOPPER, ":4096:8"),
        (BLACKWELL, ":4096:8"),
    ],
)
def test_workspaces_of_cublas_are_those_of_its_default_configuration(
    capability: tuple[int, int], default: str
) -> None:
    sizes_and_counts = [int(number) for number in default.split(":")[1:]]
    pairs = zip(sizes_and_counts[::2], sizes_and_counts[1::2], strict=True)
    expected = sum(kib * count for kib, count in pairs) * 1024
    assert workspace_bytes(capability) == expected
    if WORKSPACE_PERSISTS:
        assert kept_bytes(capability, {"mm"}) == [expected]


def test_everything_is_in_blocks_and_cublas_has_its_workspaces() -> None:
    graph = on_cuda(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)), torch.randn(5, 7))
    assert not any(storage.bytes % 512 for storage in graph.storages)
    assert not any(op.workspace.bytes % 512 for op in graph.ops)
    held = [
        one.bytes
        for one in graph.storages
        if (one.kind, one.maker) == ("temporary", BEFORE_STEP)
        and one.last != BEFORE_STEP
    ]
    assert held[:2] == [WORKSPACE_BYTES] * (2 if WORKSPACE_PERSISTS else 0)
    assert simulate(graph).live_bytes[-1] >= sum(held)
    multiply = [op.workspace.bytes for op in graph.ops if op.name in ("mm", "addmm")]
    assert multiply
    assert (max(multiply) < WORKSPACE_BYTES) == WORKSPACE_PERSISTS
    parameters = (7 * 9, 9, 9 * 3, 3)
    total = sum(block(4 * numel) for numel in parameters)
    assert graph.bytes_by_kind["parameter"] == total


@pytest.mark.parametrize(
    ("make", "op", "bytes_kept"),
    [
        (lambda: nn.RMSNorm(64), "_fused_rms_norm", 512 * 4),
        (lambda: nn.LayerNorm(64), "native_layer_norm", 2 * 512 * 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_of_norms_are_float32(
    make: Callable[[], nn.Module], op: str, bytes_kept: int, dtype: torch.dtype
) -> None:
    def held(norms: int) -> int:
        layers = [nn.Linear(64, 64), *(make() for _ in range(norms))]
        model = nn.Sequential(*layers, nn.Linear(64, 64)).to(dtype)
        graph = on_cuda(model, torch.randn(512, 64, dtype=dtype))
        assert forward_names(graph).count(op) == norms
        return kept(graph)

    assert held(2) - held(1) == 512 * 64 * dtype.itemsize + bytes_kept


def test_batch_norm_is_cudnns_but_in_bfloat16() -> None:
    def names(dtype: torch.dtype) -> list[str]:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(dtype)
        return forward_names(on_cuda(model, torch.randn(2, 3, 8, 8, dtype=dtype)))

    assert "cudnn_batch_norm" in names(torch.float32)
    assert "native_batch_norm" in names(torch.bfloat16)


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


@pytest.mark.parametrize(
    ("inner", "op", "workspace"),
    [
        (nn.LSTMCell(32, 32), "_thnn_fused_lstm_cell", 4),
        (nn.GRUCell(32, 32), "_thnn_fused_gru_cell", 5),
    ],
)
def test_cells_keep_one_workspace(inner: nn.Module, op: str, workspace: int) -> None:
    graph = on_cuda(Recurrent(inner), torch.randn(64, 32))
    found = next(one for one in graph.ops if one.name == op)
    made = [graph.storages[s].bytes for s in found.creates]
    assert made[-1] == 64 * 32 * workspace * 4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_are_one_op_of_cudnn_and_say_that_it_is_estimated(
    kind: Any,
) -> None:
    net = kind(16, 32, num_layers=2, bidirectional=True, batch_first=True)
    graph = on_cuda(Recurrent(net), torch.randn(4, 10, 16))
    assert forward_names(graph).count("_cudnn_rnn") == 1
    assert any("estimated" in note for note in graph.notes)


def test_recurrent_nets_are_measured_with_all_weights_in_one_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[RawOp] = []

    def costs(ops: Sequence[RawOp], gpu: Gpu) -> list[Cost]:
        seen.extend(ops)
        return roofline(ops, gpu)

    monkeypatch.setattr("ckplan.tracing.seconds.roofline", costs)
    net = nn.LSTM(16, 32, num_layers=2, proj_size=8)
    on_cuda(Recurrent(net), torch.randn(4, 10, 16))
    found = [op for op in seen if "_cudnn_rnn" in str(op.func)]
    assert len(found) == 2  # forward and backward
    for op in found:
        args, _ = arguments(op, torch.device("cpu"))
        assert args[3].numel() == sum(weight.numel() for weight in net.parameters())


# -- which attention -----------------------------------------------------------------


FLASH, EFFICIENT, CUDNN, MATH = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_safe_softmax",
)
HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
SHARED = MATH if SINCE < (2, 14) else EFFICIENT
ALIGNED = SINCE >= (2, 13)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of ops, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "aten" and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen() -> Iterator[Callable[[tuple[int, int]], Any]]:
    """A scope of the translation that notes which ops run."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def enter(capability: tuple[int, int]) -> Seen:
            stack.enter_context(fake_tensors())
            stack.enter_context(cpu_as_cuda(capability))
            return stack.enter_context(Seen())

        yield enter


@pytest.mark.parametrize(
    ("card", "dtype", "options", "expected"),
    [
        (A100, HALF, {}, FLASH),
        (A100, BF16, {"is_causal": True}, FLASH),
        (A100, HALF, {"dropout_p": 0.1}, FLASH),
        (A100, HALF, {"width": 20}, FLASH),
        (A100, HALF, {"width": 256}, FLASH),
        (A100, HALF, {"width": 264}, EFFICIENT),
        (A100, FULL, {}, EFFICIENT),
        (A100, FULL, {"is_causal": True}, EFFICIENT),
        (A100, HALF, {"mask": True}, EFFICIENT),
        (A100, FULL, {"width": 20}, EFFICIENT),
        (A100, FULL, {"width": 18}, MATH),
        (A100, HALF, {"mask": True, "width": 20}, MATH),
        (A100, HALF, {"is_causal": True, "keys": 32}, EFFICIENT),
        (A100, torch.float64, {}, MATH),
        (A100, HALF, {"heads": 2, "enable_gqa": True}, FLASH),
        (A100, FULL, {"heads": 2, "enable_gqa": True}, SHARED),
        (A100, FULL, {"heads": 1}, SHARED),
        (A100, HALF, {"heads": 1, "mask": True}, SHARED),
        (A100, FULL, {"rank": 3}, SHARED),
        (A100, FULL, {"rank": 3, "heads": 2, "enable_gqa": True}, SHARED),
        (A100, FULL, {"rank": 3, "mask": True}, SHARED),
        (A100, FULL, {"rank": 2}, MATH),
        (A100, HALF, {"width": 264, "shifted": True}, MATH if ALIGNED else EFFICIENT),
        (TURING, HALF, {}, EFFICIENT),
        (TURING, BF16, {}, MATH),
        ((8, 6), HALF, {"width": 208}, EFFICIENT),
        ((8, 6), HALF, {"width": 256}, FLASH),
        ((8, 6), HALF, {"width": 256, "dropout_p": 0.1}, EFFICIENT),
        (HOPPER, HALF, {}, CUDNN),
        (HOPPER, HALF, {"mask": True}, CUDNN),
        (HOPPER, HALF, {"mask": True, "width": 264}, EFFICIENT),
        (HOPPER, HALF, {"dropout_p": 0.1}, CUDNN if SINCE < (2, 12) else FLASH),
        (HOPPER, HALF, {"dropout_p": 0.125}, CUDNN),
        (HOPPER, HALF, {"width": 136}, CUDNN if SINCE < (2, 14) else FLASH),
        (BLACKWELL, HALF, {}, CUDNN),
        (BLACKWELL, HALF, {"width": 136}, FLASH),
        (BLACKWELL, HALF, {"width": 256}, FLASH if SINCE < (2, 14) else CUDNN),
        (BLACKWELL, HALF, {"width": 192, "wide": 128}, CUDNN),
        (HOPPER, HALF, {"width": 192, "wide": 128}, CUDNN),
        (HOPPER, HALF, {"width": 256}, CUDNN),
        (HOPPER, HALF, {"mask": True, "mask_rank": 3}, EFFICIENT),
        (HOPPER, FULL, {}, EFFICIENT),
        ((12, 0), HALF, {}, FLASH),
    ],
)
def test_attention_takes_the_kernel_that_the_card_would(
    seen: Any,
    card: tuple[int, int],
    dtype: torch.dtype,
    options: dict[str, Any],
    expected: str,
) -> None:
    options = dict(options)
    width, keys = options.pop("width", 32), options.pop("keys", 64)
    heads, masked = options.pop("heads", 4), options.pop("mask", False)
    wide, rank = options.pop("wide", width), options.pop("rank", 4)
    shifted, mask_rank = options.pop("shifted", False), options.pop("mask_rank", 2)
    ops = seen(card)

    def some(*shape: int) -> torch.Tensor:
        shape = shape[-rank:]
        x = torch.randn(math.prod(shape) + shifted, dtype=dtype)
        return x[int(shifted) :].view(shape).requires_grad_()

    query = some(2, 4, 64, width)
    key, value = some(2, heads, keys, width), some(2, heads, keys, wide)
    mask = None
    if masked:
        mask = torch.ones([1, 1, 64, keys][-mask_rank:], dtype=torch.bool)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    assert out.shape == (*query.shape[:-1], wide)
    assert [name for name in ops.names if name in (FLASH, EFFICIENT, CUDNN, MATH)] == [
        expected
    ]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (SDPBackend.MATH, MATH),
        (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], FLASH),
    ],
)
def test_attention_keeps_to_what_sdpa_kernel_allows(
    seen: Any, allowed: Any, expected: str
) -> None:
    ops = seen(A100)
    x = torch.randn(2, 4, 64, 32, dtype=HALF, requires_grad=True)
    with sdpa_kernel(allowed):
        F.scaled_dot_product_attention(x, x, x)
    assert expected in ops.names


def test_a_mask_of_odd_length_is_padded_and_the_math_path_drops_with_bools(
    seen: Any,
) -> None:
    ops = seen(A100)
    x = torch.randn(1, 2, 20, 32, requires_grad=True)
    bias = torch.zeros(20, 20, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    assert "constant_pad_nd" in ops.names
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
    assert "native_dropout" in ops.names
    assert not {"bernoulli_", "bernoulli"} & {*ops.names}


@pytest.mark.parametrize(
    ("card", "length", "version", "expected"),
    [
        (HOPPER, 64, 91500, FLASH),
        (HOPPER, 64, 92600, CUDNN),
        (HOPPER, 64, 92500, FLASH if SINCE >= (2, 15) else CUDNN),
        (BLACKWELL, 64, 92500, CUDNN),
        (BLACKWELL, 1, 92500, FLASH if SINCE >= (2, 14) else CUDNN),
        (BLACKWELL, 1, 92600, CUDNN),
    ],
)
def test_torch_keeps_off_what_a_version_of_cudnn_gets_wrong(
    seen: Any,
    monkeypatch: pytest.MonkeyPatch,
    card: tuple[int, int],
    length: int,
    version: int,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    ops = seen(card)
    query = torch.randn(2, 4, length, 32, dtype=HALF, requires_grad=True)
    key = torch.randn(2, 4, 64, 32, dtype=HALF)
    F.scaled_dot_product_attention(query, key, key)
    assert expected in ops.names


def test_cudnn_stands_back_for_determinism_but_not_for_a_warning(seen: Any) -> None:
    ops = seen(HOPPER)
    x = torch.randn(1, 2, 16, 32, dtype=HALF, requires_grad=True)
    try:
        for warn_only in (True, False):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            F.scaled_dot_product_attention(x, x, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name in ops.names if name in (CUDNN, FLASH)] == [CUDNN, FLASH]


def test_cudnn_returns_no_sums_where_there_is_no_backward(seen: Any) -> None:
    ops = seen(HOPPER)
    x = torch.randn(1, 2, 16, 32, dtype=HALF)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        x, x, x, None, False, 0.0, False, False
    )
    assert CUDNN in ops.names
    assert found[1] is None


@pytest.mark.skipif(SINCE < (2, 12), reason="torch 2.11 attends to nothing, too")
def test_attention_to_nothing_is_zeros_with_a_gradient(seen: Any) -> None:
    ops = seen(A100)
    x = torch.randn(2, 4, 16, 0, requires_grad=True)
    value = torch.randn(2, 4, 16, 8)
    out = F.scaled_dot_product_attention(x, x, value)
    assert out.shape == value.shape
    assert out.requires_grad
    assert not {FLASH, EFFICIENT, CUDNN, MATH} & {*ops.names}


def test_cudnn_has_no_gradient_for_a_mask(seen: Any) -> None:
    ops = seen(HOPPER)
    x = torch.randn(1, 2, 16, 32, dtype=HALF, requires_grad=True)
    bias = torch.zeros(16, 16, dtype=HALF, requires_grad=True)
    F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    F.scaled_dot_product_attention(x, x, x, attn_mask=bias.detach())
    assert ops.names.count(EFFICIENT) == ops.names.count(CUDNN) == 1


def test_a_mask_of_truths_becomes_what_is_added_in_one_op(seen: Any) -> None:
    ops = seen(A100)
    x, mask = torch.randn(1, 2, 16, 32, requires_grad=True), torch.ones(16, 16) > 0
    before = len(ops.names)
    F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    made = ops.names[before : ops.names.index(EFFICIENT)]
    assert [name for name in made if name not in ("expand", "detach")] == [
        "scalar_tensor",
        "scalar_tensor",
        "where",
    ]


@pytest.mark.parametrize(
    ("tasks", "slots", "blocks", "parts"),
    [
        (36, 296, 4, 4),  # asked of torch: 3 x 3 heads, 200 queries, on a B200
        (200, 216, 8, 1),  # busy enough
        (12, 216, 1, 1),  # nothing to split
    ],
)
def test_flash_attention_splits_keys_where_the_card_would_idle(
    tasks: int, slots: int, blocks: int, parts: int
) -> None:
    assert parts == _splits(tasks, slots, blocks)


@pytest.mark.parametrize(
    ("width", "half", "card", "drops", "tile"),
    [
        (64, True, A100, False, (64, 64, True)),
        (128, True, A100, False, (128, 128, True)),
        (128, True, (8, 6), False, (64, 64, False)),
        (96, True, (8, 9), False, (128, 64, True)),
        (96, True, (8, 9), True, (64, 64, False)),
        (128, True, TURING, False, (128, 64, True)),
        (256, True, (12, 0), False, (128, 64, False)),
        (128, False, A100, False, (128, 64, False)),
        (128, False, (12, 0), False, (64, 64, False)),
    ],
)
def test_backward_of_attention_goes_in_tiles_that_fit_the_card(
    width: int,
    half: bool,
    card: tuple[int, int],
    drops: bool,
    tile: tuple[int, int, bool],
) -> None:
    assert tile == _tile(width, half, card, drops)


def test_multihead_attention_of_torch_drops_with_bools() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    names = forward_names(on_cuda(layer, torch.randn(2, 16, 64)))
    assert names.count("native_dropout") == 3
    assert EFFICIENT in names
    assert not {"bernoulli_", "bernoulli"} & {*names}


# -- autocast ------------------------------------------------------------------------


def test_no_op_of_cudas_autocast_is_missing() -> None:
    lists = (LOWER_PRECISION, FLOAT32, FLOAT32_RESULT, FLOAT32_APPENDED, WIDEST)
    ours = [name for names in (*lists, REFUSED) for name in names]
    torchs = registered("AutocastCUDA") - {"_cudnn_rnn"}  # has a kernel of its own
    with_names = {name for name in torchs if re.search("[Dd]imname|names", name)}
    newer = {"rms_norm", "linalg_matrix_sqrth"}  # later than torch 2.11, than 2.13
    assert len(ours) == len(set(ours))
    assert torchs - set(ours) == with_names  # up to 2.11; fake tensors have no names
    assert set(ours) - torchs <= newer


def torchs_lists(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch's own tests of autocast on CUDA go by."""
    helpers: Any = types.ModuleType("torch.testing._internal.common_utils")
    helpers.TEST_WITH_ROCM, helpers.TestCase = False, object
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    name = "torch.testing._internal.autocast_test_lists"
    monkeypatch.delitem(sys.modules, name, raising=False)
    lists = importlib.import_module(name).AutocastTestLists(torch.device("cpu"))
    monkeypatch.delitem(sys.modules, name)
    return lists


@pytest.mark.filterwarnings("ignore")  # that torch's lists use deprecated calls
@pytest.mark.parametrize("lower", [HALF, BF16])
def test_ops_run_in_the_types_that_torchs_tests_of_cuda_expect(
    monkeypatch: pytest.MonkeyPatch, lower: torch.dtype
) -> None:
    with fake_tensors(), cpu_as_cuda(A100):
        lists = torchs_lists(monkeypatch)
        expected: dict[str, torch.dtype | None] = {
            "torch_fp16": lower,
            "nn_fp16": lower,
            "torch_fp32": FULL,
            "nn_fp32": FULL,
            "methods_fp32": FULL,
            "torch_need_autocast_promote": FULL,
            "torch_expect_builtin_promote": None,
        }
        checked = 0
        for group, dtype in expected.items():
            for row in getattr(lists, group):
                checked += check(row, group, dtype, lower)
    assert checked > 100


def check(row: Any, group: str, dtype: torch.dtype | None, lower: torch.dtype) -> bool:
    """Run one row of torch's lists: name, arguments, and perhaps more."""
    name, args, *more = row
    extra = more[0] if more else None
    if name.startswith("cudnn_convolution") or name in ("equal", "einsum"):
        return False  # kernels that are not here, values, a row that torch skips, too
    kwargs = extra if isinstance(extra, dict) else {}
    if isinstance(extra, torch.dtype):
        dtype = extra
    of = next(o for o in (torch, torch._C._nn, F, torch.Tensor) if hasattr(o, name))
    if group.startswith("methods"):
        of = torch.Tensor
    args = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(lower) if t.dtype == HALF else t, args
    )
    with torch.autocast("cuda", lower):
        out = getattr(of, name)(*args, **kwargs)
    first = pytree.tree_leaves(out)[0]
    if isinstance(first, torch.Tensor):
        assert first.dtype == dtype, (group, name, first.dtype)
    return True


def test_autocast_casts_a_weight_once_while_it_lasts(seen: Any) -> None:
    ops = seen(A100)
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    for _ in range(2):
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert layer(layer(x)).dtype == HALF
            with torch.autocast("cuda", enabled=False):
                assert layer(x).dtype == FULL
            with torch.autocast("cuda", dtype=BF16):
                assert torch.get_autocast_dtype("cuda") == BF16
            assert torch.get_autocast_dtype("cuda") == HALF
    assert not torch.is_autocast_enabled()
    # In each scope the weight and the input, and the weight no more for the second.
    assert ops.names.count("_to_copy") == 4


def test_a_weight_that_autocast_casts_without_gradients_has_one_afterwards(
    seen: Any,
) -> None:
    seen(A100)
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    with torch.autocast("cuda"):
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.inner(x).sigmoid()
            return F.binary_cross_entropy(found, torch.zeros_like(found))

    model, x = Classifier(), torch.randn(8, 4)
    ckplan.profile(model, x, device="cuda")
    with pytest.raises(WorkloadError, match="with_logits"):
        ckplan.profile(model, x, device="cuda", amp="fp16")


def test_recurrent_nets_run_in_the_types_of_autocast() -> None:
    net = nn.GRU(16, 16, batch_first=True)
    graph = on_cuda(Recurrent(net), torch.randn(4, 10, 16), amp="bf16")
    found = next(op for op in graph.ops if op.name == "_cudnn_rnn")
    assert graph.storages[found.outputs[0]].bytes == block(4 * 10 * 16 * 2)
    # The input, the state, four weights and, by the loss, the output:
    assert forward_names(graph).count("_to_copy") == 7


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_amp_is_cudas_and_not_cpus(amp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.softmax(torch.cat([self.inner(x), self.inner(x)], -1), -1)

    graph = on_cuda(Joined(), torch.randn(32, 64), amp=amp)
    assert any("autocast" in note for note in graph.notes)
    softmax = next(op for op in graph.ops if op.name == "_softmax")
    assert graph.storages[softmax.outputs[0]].bytes == 32 * 128 * 4
    casts = forward_names(graph).count("_to_copy")
    # Weight and bias once, the input twice; softmax takes fp16 as it is.
    assert casts == (5 if amp == "bf16" else 4)


# -- what Python is told -------------------------------------------------------------


SOURCE = """
import torch
from torch import nn

class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        scale = torch.ones(64, device=x.device)
        if torch.cuda.is_available() and x.is_cuda and x.device.type == "cuda":
            with torch.autocast("cuda"):
                return torch.tanh(self.inner(x) * scale.cuda())
        return self.inner(x)

def build():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Asking().to(device), torch.randn(32, 64).to(device)
"""


def test_the_workloads_own_code_believes_in_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckplan.tracing.profile import profile_workload
    from ckplan.training.loading import WorkloadSpec

    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec, device="cuda")
    assert "tanh" in forward_names(graph)
    tanh = next(op for op in graph.ops if op.name == "tanh")
    assert graph.storages[tanh.outputs[0]].bytes == 32 * 64 * 4  # promoted by `scale`
    assert any("is_available(): the workload was told True" in n for n in graph.notes)
    assert "tanh" not in forward_names(profile_workload(spec))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of rms_norm, up to torch 2.11
def test_nothing_of_the_translation_is_left_behind() -> None:
    def state() -> tuple[Any, ...]:
        halves = torch.randn(4, 8, dtype=BF16)
        with torch.autocast("cpu", BF16):
            types = F.softmax(halves, -1).dtype, torch.cat([halves, halves.float()])
        return (
            types[0],
            types[1].dtype,
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.cuda.is_available,
            torch.cuda.is_available(),
        )

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.RMSNorm(8))
    x = torch.randn(4, 8)
    before, graph = state(), ckplan.profile(model, x)
    on_cuda(model, x, amp="fp16")
    after, again = state(), ckplan.profile(model, x)
    assert before == after
    assert [op.name for op in again.ops] == [op.name for op in graph.ops]
    assert [s.bytes for s in again.storages] == [s.bytes for s in graph.storages]
    assert "bernoulli_" in forward_names(again)


def test_real_tensors_are_left_alone_while_others_are_translated() -> None:
    x = torch.randn(2, 4, 16, 8, dtype=BF16)
    layers = [nn.BatchNorm2d(4), nn.Dropout(0.5), nn.LSTM(8, 8), nn.RMSNorm(8)]
    with cpu_as_cuda(A100):
        assert F.scaled_dot_product_attention(x, x, x).isfinite().all()
        assert layers[0](x.float()).isfinite().all()
        assert set(layers[1](torch.ones(64)).unique().tolist()) == {0, 2}
        assert layers[2](x[0].float())[0].isfinite().all()
        assert layers[3](x.float()).isfinite().all()


def test_what_cannot_be_told_without_a_gpu_says_so() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum().item() > 0 else x

    with pytest.raises(WorkloadError, match=r"without a GPU: .* value") as caught:
        on_cuda(Asking(), torch.randn(4, 8))
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(CkplanError, match="device 'tpu'"):
        ckplan.profile(nn.Linear(8, 8), torch.randn(4, 8), device="tpu")


def test_a_plan_for_cuda_on_cpu_warns_and_gives_the_right_gradients() -> None:
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)]
    model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(6)))
    x = torch.randn(4096, 64)
    solved = ckplan.solve(on_cuda(model, x), "60%")
    saved = (OpName("2", "native_dropout", 0),)  # on a CPU, it has another name
    plan = replace(solved, regions=(PlannedRegion("[0..5]", save=saved),))

    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        model.zero_grad()
        mean_square(model(x), None).backward()
        return model[0][0].weight.grad

    expected = gradient()
    with ckplan.planned(model, plan):
        with pytest.warns(UserWarning, match="for cuda, and the model runs on cpu"):
            found = gradient()
        assert any(region.missing for region in ckplan.status(model).regions)
    assert torch.equal(expected, found)


# -- from the command line -----------------------------------------------------------


def test_gpt2_is_planned_for_a_gpu_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    sizes = {"layers": 2, "width": 128, "heads": 2, "batch": 4, "length": 128}
    settings = [f"--set={name}={value}" for name, value in sizes.items()]
    trace, plan = tmp_path / "gpt2.json.gz", tmp_path / "plan.yaml"

    def run(*args: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*args, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    target = str(ROOT / "configs" / "workloads" / "gpt2.py")
    where = ["--device", "cuda", "--gpu", "L4", "--amp", "bf16", "-o", str(trace)]
    step = run("profile", target, *settings, *where)
    assert step["notes"] == run("show", str(trace))["notes"]
    told = " ".join(step["notes"])
    for word in ("L4", "8.9", "flash kernel", "native_dropout", "CUDA's lists"):
        assert word in told
    solved = run("solve", str(trace), "--budget", "85%", "-o", str(plan))
    assert solved["peak_bytes"] <= 0.85 * solved["unplanned_peak_bytes"]
    loaded = ckplan.load_plan(plan)
    assert loaded.fingerprint["device"] == "cuda"


def test_another_device_is_refused_in_three_lines(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    done = CliRunner().invoke(app, ["profile", str(path), "--device", "tpu"])
    assert done.exit_code == 1
    lines = done.stderr.strip().splitlines()
    assert lines[-3].startswith("error: cannot profile on the device 'tpu'")


@pytest.fixture
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, as far as it is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("an_h100")
def test_a_card_is_here_if_the_gpu_that_is_here_has_its_kernels() -> None:
    assert find_target("cuda", None).is_here
    assert find_target(torch.device("cuda:0"), None).is_here
    assert find_target("cuda:0", "H200").is_here
    elsewhere = find_target("cuda", "RTX 4090")
    assert not elsewhere.is_here
    assert elsewhere.capability == (8, 9)
    assert find_target("cpu", "RTX 4090").is_here


@pytest.mark.usefixtures("an_h100")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(CkplanError, match="cannot use cuda:1: GPUs of this machine: 1"):
        find_target("cuda:1", None)


def test_a_gpu_that_has_nothing_left_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*size: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory on {device}")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CkplanError, match="cannot use cuda: CUDA out of memory on"):
        TraceTarget(torch.device("cuda"), None, is_here=True).begin()
    TraceTarget(torch.device("cpu"), None, is_here=True).begin()


def test_three_ways_agree_on_what_a_plan_for_cuda_holds(tmp_path: Path) -> None:
    from ckplan.verifying.dry_run import dry_run_workload

    def make() -> Workload:
        layers = [MegatronLayer(64, 4, 0.1) for _ in range(4)]
        model = nn.Sequential(nn.Linear(64, 64), *layers)
        return Workload(model, torch.randn(64, 8, 64), mean_square)

    workload = make()
    graph = on_cuda(workload.model, workload.batch)
    plan = ckplan.solve(graph, "75%")
    found = dry_run_workload(make, plan, trace=graph)
    assert plan.regions
    assert found.regions_ran
    # But for a scalar that dies a moment earlier or later:
    unplanned = simulate(graph).peak_bytes
    assert plan.predicted.peak_bytes - found.dry_run_peak_bytes in (0, 512)
    assert unplanned - found.unplanned_dry_run_peak_bytes in (0, 512)


# -- the other way: fake CUDA tensors, where torch has CUDA built in -----------------

built = pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(),
    reason="needs a build of torch with CUDA, and no GPU",
)


class Convolutions(nn.Module):
    """Layouts, norms and attention as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3)
        self.norm, self.group = nn.BatchNorm2d(16), nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.up(x)))
        rows = x.flatten(2).transpose(1, 2)
        found = self.attention(rows, rows, rows, need_weights=False)[0]
        x = found.transpose(1, 2).reshape_as(x)
        return self.drop(self.down(F.relu(self.group(x))))


def conv_workload() -> Workload:
    return Workload(Convolutions(), torch.randn(2, 3, 8, 8), mean_square)


def megatron_workload() -> Workload:
    model = nn.Sequential(MegatronLayer(64, 4, 0.1), nn.LayerNorm(64))
    return Workload(model, torch.randn(32, 4, 64), mean_square)


def recurrent_workload(inner: nn.Module) -> Workload:
    return Workload(Recurrent(inner), torch.randn(12, 4, 32), mean_square)


TWO_WAYS: dict[str, Callable[[], Workload]] = {
    "convolutions": conv_workload,
    "megatron": megatron_workload,
    "lstm": lambda: recurrent_workload(nn.LSTM(32, 32, num_layers=2, dropout=0.1)),
    "gru": lambda: recurrent_workload(nn.GRU(32, 32)),
    "attention": lambda: Workload(
        Attention(dropout_p=0.1, is_causal=True), torch.randn(2, 32, 64), mean_square
    ),
}


@built
def test_constants_are_moved_to_the_gpu_unseen_as_where_there_is_one() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            none = torch.tensor([], dtype=x.dtype, device=x.device)
            seen = torch.tensor([2.0]).to(x.device)
            return torch.cat([none, self.inner(x).flatten()]) * seen

    graph = on_cuda(Caching(), torch.randn(4, 8))
    assert any("fake CUDA tensors" in note for note in graph.notes)
    assert forward_names(graph).count("_to_copy") == 1


@built
@pytest.mark.parametrize("make", TWO_WAYS.values(), ids=TWO_WAYS)
@pytest.mark.parametrize("amp", [None, "bf16", "fp16"])
@pytest.mark.parametrize("gpu", ["A100 40GB", "T4", "H100"])
def test_fake_cuda_tensors_and_the_translation_agree(
    make: Callable[[], Workload],
    amp: str | None,
    gpu: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = make()
    ways = []
    for is_built in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda one=is_built: one)
        ways.append(on_cuda(workload.model, workload.batch, amp=amp, gpu=gpu))
    dispatched, cpu_as_cuda = ways
    assert any("fake CUDA tensors for" in note for note in dispatched.notes)
    assert any("translated" in note for note in cpu_as_cuda.notes)
    rest = {"notes": cpu_as_cuda.notes, "storages": cpu_as_cuda.storages}
    assert dataclasses.replace(dispatched, **rest) == cpu_as_cuda
    # A number on the host, as in ``count += 1``, the translation takes for one on CUDA.
    for one, other in zip(dispatched.storages, cpu_as_cuda.storages, strict=True):
        assert one == other or one == dataclasses.replace(other, bytes=0)


@built
@pytest.mark.parametrize("optimizer", ["sgd:fused", "momentum:fused", "adamw:fused"])
def test_fused_optimizers_need_no_translation(optimizer: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = {"optimizer": optimizer, "amp": "fp16", "scaler": True}
    graph = on_cuda(model, torch.randn(4, 8), **options)
    assert any("fake CUDA tensors for" in note for note in graph.notes)
    assert not any("not traced on" in note for note in graph.notes)


@built
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_what_neither_way_can_trace_says_why_of_both() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x).unflatten(-1, (2, 32)).transpose(1, 2)
            return flex_attention(q, q, q)

    with pytest.raises(WorkloadError) as caught:
        on_cuda(Flexible(64, 64), torch.randn(2, 32, 64))
    what, *_ = str(caught.value).splitlines()
    _, first, second = re.split("on fake CUDA tensors, |; translated from CPU, ", what)
    assert first == "flex_attention is called with functions, which no mode sees"
    assert "FlexAttention does not support backward on CPU" in second


@built
def test_what_stays_on_the_host_takes_nothing_of_the_card() -> None:
    class Moved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            on_host = torch.zeros(1000, 64)
            return super().forward(x + on_host[0].to(x.device))

    def peak(model: nn.Module) -> int:
        return simulate(on_cuda(model, torch.randn(8, 64))).peak_bytes

    assert peak(Moved(64, 64)) - peak(nn.Linear(64, 64)) < 8192


@built
def test_what_fake_cuda_tensors_cannot_do_is_translated_and_said() -> None:
    class Elsewhere(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.ones(4)  # on the CPU

    graph = on_cuda(Elsewhere(4, 4), torch.randn(2, 4))
    (why,) = (note for note in graph.notes if "not traced on fake CUDA" in note)
    assert "cuda:0" in why and "cpu" in why


# -- the rest ------------------------------------------------------------------------


def test_dropout_of_nothing_copies_nothing() -> None:
    # Torch has a composite in Python, for its compiler, that does.
    for p, train in ((0.0, True), (0.5, False)):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8))
        graph = on_cuda(model.train(train), torch.randn(4, 8))
        assert "clone" not in forward_names(graph)


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_convolutions_keep_channels_last_and_group_norm_from_torch_2_15_on(
    amp: str | None,
) -> None:
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    graph = on_cuda(model, x, amp=amp)
    names = forward_names(graph)
    norm = names.index("native_group_norm")
    copied = norm - 1 if torch.__version__ < (2, 14) else norm
    assert names.count("clone") == (copied != norm)
    held = graph.ops[copied].workspace.bytes
    held += sum(graph.storages[s].bytes for s in graph.ops[copied].creates[:1])
    normed = block(2 * 8 * 2 * 2 * 4)
    if torch.__version__ >= (2, 15):
        assert held == normed  # what the norm returns
    elif torch.__version__ >= (2, 14):
        assert held == 2 * normed
    else:
        assert names[copied] == "clone"


def test_a_group_norm_copies_what_is_neither_contiguous_nor_channels_last() -> None:
    class Turned(nn.GroupNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(2, 3)).transpose(2, 3)

    model = nn.Sequential(nn.Conv2d(8, 8, 1), Turned(2, 8), nn.Conv2d(8, 8, 1))
    graph = on_cuda(model, torch.randn(2, 8, 4, 6))
    size = block(2 * 8 * 4 * 6 * 4)
    for name, taken in (("native_group_norm", 1), ("native_group_norm_backward", 2)):
        (at,) = (i for i, op in enumerate(graph.ops) if op.name == name)
        if torch.__version__ < (2, 14):
            assert graph.ops[at - 1].name == "clone"
            assert graph.ops[at].workspace.before == ()
        else:
            assert graph.ops[at - 1].name != "clone"
            assert graph.ops[at].workspace.before == (size,) * taken


def test_autocast_casts_from_the_last_argument_to_the_first() -> None:
    # As GCC evaluates arguments, with which torch's wheels are made.
    graph = on_cuda(nn.Linear(64, 16), torch.randn(32, 64), amp="bf16")
    casts = [op for op in graph.ops[: graph.num_forward] if op.name == "_to_copy"]
    made = [graph.storages[op.creates[0]].bytes for op in casts[:3]]
    bias, weight, x = 16, 16 * 64, 32 * 64
    assert made == [block(2 * bias), 2 * weight, 2 * x]


def test_convolutions_alone_take_nothing_for_cublas() -> None:
    from ckplan.verifying.dry_run import dry_run_workload

    def make() -> Workload:
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        return Workload(nn.Sequential(*layers), torch.randn(4, 3, 16, 16), mean_square)

    workload = make()
    predicted = simulate(on_cuda(workload.model, workload.batch)).peak_bytes
    found = dry_run_workload(make, None, device="cuda").unplanned_dry_run_peak_bytes
    assert predicted < WORKSPACE_BYTES
    assert 0 <= predicted - found <= 512


class Scaled(nn.Conv2d):
    """Multiplies where nobody differentiates, as spectral norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.mv(self.weight.flatten(1), torch.ones(27)).norm()
        return super().forward(x) / scale


def test_cublas_works_in_backward_where_a_plan_multiplies_there() -> None:
    from ckplan.verifying.dry_run import dry_run_workload

    def make() -> Workload:
        layers = Scaled(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        return Workload(nn.Sequential(*layers), torch.randn(4, 3, 16, 16), mean_square)

    workload = make()
    graph = on_cuda(workload.model, workload.batch)
    plan = Plan(regions=(PlannedRegion("0", "rerun"),))
    planned = simulate(graph, resolve(plan, graph))
    found = dry_run_workload(make, plan, device="cuda")
    unplanned = simulate(graph).peak_bytes
    assert 0 <= unplanned - found.unplanned_dry_run_peak_bytes <= 1024
    assert 0 <= planned.peak_bytes - found.dry_run_peak_bytes <= 1024
    if WORKSPACE_PERSISTS:
        assert WORKSPACE_BYTES < unplanned < 2 * WORKSPACE_BYTES < planned.peak_bytes
        assert replayed(planned).allocated_bytes > 2 * WORKSPACE_BYTES


def test_steps_on_a_gpu_need_one(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "plan.yaml").write_text(
        "ckplan: 1\nfingerprint: {device: cuda}\nregions: []\n"
    )
    args = ["verify", str(tmp_path / "model.py"), str(tmp_path / "plan.yaml")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 1
    assert "no GPU" in done.stderr
    assert "--fake" in done.stderr
    done = CliRunner().invoke(app, [*args, "--fake", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["dry_run_peak_bytes"] > WORKSPACE_BYTES


def test_gradients_that_accumulate_begin_as_the_first_batchs() -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.GELU(), nn.Linear(500, 40))
    graph = ckplan.profile(
        model, torch.randn(8, 300), device="cuda", optimizer="sgd", accumulate=2
    )
    gradients = {
        number
        for number, one in enumerate(graph.storages)
        if (one.kind, one.maker) == ("gradient", BEFORE_STEP)
    }
    began_as = added_to_gradients(graph)
    assert {*began_as.values()} == gradients
    for made, gradient in began_as.items():
        assert graph.storages[made].bytes == graph.storages[gradient].bytes
        assert graph.storages[made].maker >= graph.num_forward
    held = sum(graph.storages[number].bytes for number in gradients)
    assert replayed(simulate(graph)).allocated_bytes > held
