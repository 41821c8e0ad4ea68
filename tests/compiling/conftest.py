"""What tests of compiled steps share: a cache of Inductor's, and one C++ header."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from ckplan.tracing.costs.cost_cache import cache_folder


@pytest.fixture(autouse=True, scope="session")
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep Inductor's caches in a folder of the tests, and its warnings to torch.

    A new folder would also have Inductor compile six programs, to see whether vectors
    work: eight seconds. They do, in as many forms as the CPU has.
    """
    folder = str(tmp_path_factory.mktemp("inductor"))
    works = config.patch({"cpp.vec_isa_ok": True})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), works:
        patch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *_: True)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Begin every test without code and plans that others have made."""
    torch._dynamo.reset()
    folder = cache_folder()
    assert folder is not None
    shutil.rmtree(folder / "compiled", ignore_errors=True)
