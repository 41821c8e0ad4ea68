"""Fake outputs that torch remembers: those that its kernels make anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensorMode

from ckplan.tracing.faking.fake_outputs import make_fake_mode
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec

WORKLOADS = Path(__file__).parents[2] / "configs" / "workloads"
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 1, "width": 64, "heads": 2, "batch": 2, "length": 16},
    "resnet50": {"batch": 2},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which that check reads
@pytest.mark.parametrize(
    ("name", "gpu"),
    [("gpt2", None), ("gpt2", "RTX 4090"), ("resnet50", "RTX 4090")],
)
def test_outputs_looked_up_are_those_of_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: str | None
) -> None:
    own, theirs = [0], [0]
    make_key = FakeTensorMode._cache_key
    begin = FakeTensorMode._cached_dispatch_impl

    def counted_key(*args: Any) -> Any:
        theirs[0] += 1
        return make_key(*args)

    def counted(*args: Any) -> Any:
        own[0] += 1
        return begin(*args)

    monkeypatch.setattr(FakeTensorMode, "_cache_key", counted_key)
    monkeypatch.setattr(FakeTensorMode, "_cached_dispatch_impl", counted)
    spec = WorkloadSpec(str(WORKLOADS / f"{name}.py"), options=SMALL[name])
    # Torch makes every output that it finds in its cache once more, and compares.
    with dynamo_config.patch(fake_tensor_cache_crosscheck_enabled=True):
        profile_workload(spec, gpu=gpu, in_step=False, replay=False)
    assert own[0] > 300
    assert theirs[0] < 0.2 * own[0]


def test_what_outputs_depend_on_is_in_the_key() -> None:
    """Ops on arguments that differ in one property; each has its kernel's output."""
    with make_fake_mode(), torch.no_grad():
        for _ in range(2):  # the second time they are looked up
            x = torch.empty(4, 6)
            assert (x + 1).dtype == torch.float32
            assert (torch.empty(4, 6, dtype=torch.int64) + 1).dtype == torch.int64
            assert (torch.empty(4, 6, dtype=torch.int64) + 1.0).dtype == torch.float32
            assert (torch.empty(4, 6, dtype=torch.bool) + True).dtype == torch.bool
            assert (torch.empty(4, 6, dtype=torch.bool) + 1).dtype == torch.int64
            assert torch.empty_like(x.t()).stride() == (1, 6)
            assert torch.empty_like(torch.empty(6, 4)).stride() == (4, 1)
            assert x[1:].view(-1).storage_offset() == 6
            assert x[:3].view(-1).storage_offset() == 0
            assert torch.sum(x, (0,)).shape == (6,)
            assert torch.sum(x, (1,)).shape == (4,)
            assert torch.sum(x, (0,), keepdim=True).shape == (1, 6)
            assert torch.cat([x, x]).shape == (8, 6)
            assert torch.cat([x, x], 1).shape == (4, 12)
            assert torch.empty(2, 3, device="meta").device.type == "meta"
            assert torch.empty(2, 3).device.type == "cpu"
            torch.set_default_dtype(torch.float64)
            try:
                assert torch.arange(0, 1, 0.5).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
            assert torch.arange(0, 1, 0.5).dtype == torch.float32
            z = torch.empty(4, dtype=torch.complex64)
            assert torch.view_as_real(z).shape == (4, 2)
            assert z.conj().is_conj() and not z.is_conj()
            assert z.conj().imag.is_neg() and not z.imag.is_neg()
            assert z.conj().resolve_conj().is_conj() is False
