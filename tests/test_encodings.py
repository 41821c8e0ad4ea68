"""Smaller forms give back the same bits, whatever the geometry."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckplan.encodings import (
    BITS,
    decode,
    encode,
    encoded_bytes,
    form_of,
    is_dense,
    pack_planes,
    unpack_planes,
)

DTYPES = [torch.bool, torch.float32, torch.float16, torch.bfloat16, torch.float64]


def dense(rng: Random, dtype: torch.dtype) -> torch.Tensor:
    """Zeros and ones in a tensor of random sizes, its dimensions in random order."""
    sizes = [rng.randint(0 if rng.random() < 0.05 else 1, 9) for _ in range(3)]
    tensor = torch.tensor([rng.random() < 0.5 for _ in range(math.prod(sizes))])
    order = rng.sample(range(3), 3)
    return tensor.to(dtype).reshape(sizes).permute(order)


@given(rng=st.randoms(use_true_random=False), dtype=st.sampled_from(DTYPES))
def test_bits_come_back_as_they_were(rng: Random, dtype: torch.dtype) -> None:
    tensor = dense(rng, dtype)
    small = encode(BITS, tensor)
    assert small is not None
    again = decode(small)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride()
    assert again.dtype == dtype
    held = small.data.untyped_storage().nbytes()
    assert held == encoded_bytes(BITS, tensor.numel())


@pytest.mark.parametrize("length", [*range(1, 18), 63, 64, 65, 1000, 1024])
def test_bits_are_those_of_numpy(length: int) -> None:
    torch.manual_seed(length)
    tensor = torch.rand(length) < 0.5
    small = encode(BITS, tensor)
    assert small is not None
    planes = np.zeros((8, 8 * -(-length // 64)), dtype=bool)
    planes.ravel()[:length] = tensor.numpy()
    expected = np.packbits(planes, axis=0, bitorder="little")
    assert small.data.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(8,), (2, 4), (3, 8, 5), (16, 1)])
def test_planes_for_a_compiler_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask = torch.rand(shape) < 0.5
    packed = pack_planes(mask)
    expected = np.packbits(mask.reshape(8, -1).numpy(), axis=0, bitorder="little")
    assert packed.numpy().tobytes() == expected.tobytes()
    again = unpack_planes(packed, shape)
    assert again.dtype == torch.bool
    assert torch.equal(again, mask)


@pytest.mark.parametrize("form", ["int16", "int32"])
def test_indices_come_back_as_they_were(form: str) -> None:
    largest = torch.iinfo(getattr(torch, form)).max
    tensor = torch.tensor([[0, 1, largest], [5, 7, 0]]).t()
    small = encode(form, tensor)
    assert small is not None
    again = decode(small)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride()
    assert small.data.untyped_storage().nbytes() == encoded_bytes(form, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 4)[:, :2],  # gaps
        torch.ones(4)[1:],  # begins inside its storage
        torch.ones(1).expand(4),  # one element, four times
    ],
)
def test_tensors_with_gaps_are_left_alone(tensor: torch.Tensor) -> None:
    assert encode(BITS, tensor) is None


def test_dense_is_what_torch_means_by_it() -> None:
    for seed in range(200):
        rng = Random(seed)
        tensor = dense(rng, torch.float32)
        if tensor.numel() and rng.random() < 0.5:
            tensor = tensor[tuple(slice(None, None, rng.randint(1, 2)) for _ in "abc")]
        expected = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        assert (
            is_dense(tensor.size(), tensor.stride()) == expected or not tensor.numel()
        )


@pytest.mark.parametrize(
    ("name", "output", "dtype", "shape", "expected"),
    [
        ("bernoulli_", 0, torch.float32, (3,), "bits"),
        ("bernoulli", 0, torch.bfloat16, (3,), "bits"),
        ("bernoulli_", 0, torch.int64, (3,), None),
        ("native_dropout", 1, torch.bool, (3,), "bits"),
        ("native_dropout", 0, torch.float32, (3,), None),
        ("max_pool2d_with_indices", 1, torch.int64, (8, 3, 181, 181), "int16"),
        ("max_pool2d_with_indices", 1, torch.int64, (8, 3, 182, 182), "int32"),
        ("max_pool3d_with_indices", 1, torch.int64, (3, 64, 64, 8), "int16"),
        ("max_pool2d_with_indices", 0, torch.float32, (8, 3, 9, 9), None),
        ("relu", 0, torch.float32, (3,), None),
    ],
)
def test_forms_are_for_what_always_has_them(
    name: str,
    output: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    expected: str | None,
) -> None:
    assert form_of(name, output, dtype, shape) == expected
