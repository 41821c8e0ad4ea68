"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from commands import folder, run, trace, traced  # noqa: F401 - fixtures
from hypothesis import HealthCheck, settings
from threads import one_thread  # noqa: F401 - a fixture

# A machine that is busy with something else is no reason to fail.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Products of tiles have the bits of whole ones on CPUs of any maker: without it, oneMKL
# sums in another order on some. It is read by the first product of a process.
os.environ["MKL_CBWR"] = "AUTO,STRICT"

_MUCH_GARBAGE = 500_000  # containers made and not yet freed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--serial",
        choices=("yes", "no", "only"),
        default="yes",
        help="whether tests marked serial run: with the others, not, or alone",
    )


def pytest_runtest_setup() -> None:
    """Collect garbage between tests alone, and only what is worth it.

    Half of the tests' time would go to it: torch has a million objects to look at.
    """
    gc.disable()
    if gc.get_count()[0] > _MUCH_GARBAGE:
        gc.collect()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    wanted = config.getoption("--serial")
    if wanted == "yes":
        return
    is_serial = [item.get_closest_marker("serial") is not None for item in items]
    pairs = list(zip(items, is_serial, strict=True))
    left_out = [item for item, serial in pairs if serial != (wanted == "only")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, serial in pairs if serial == (wanted == "only")]


@pytest.fixture(scope="session", autouse=True)
def _costs_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Keep measured costs for as long as the tests run, away from the user's own.

    Masks are not measured, but cost in any test what drawing them again costs; nor is
    how much faster two threads move bytes.
    """
    import torch

    from ckplan.tracing.costs.byte_seconds import KEY
    from ckplan.tracing.costs.cost_cache import cost_cache
    from ckplan.tracing.costs.mask_seconds import KEYS

    seconds = zip((*KEYS, KEY), (8e-9, 8e-9, 0.0, 8e-9, 0.0, 0.5), strict=True)
    kept = {key: (one,) * 3 for key, one in seconds}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPLAN_CACHE", str(tmp_path_factory.mktemp("costs")))
        threads = torch.get_num_threads()
        for count in {1, 2, threads}:
            torch.set_num_threads(count)
            cost_cache(torch.device("cpu")).learn_runs(kept)
        torch.set_num_threads(threads)
        yield


@pytest.fixture
def quick_collector() -> Iterator[None]:
    """Let the collector look only at what a test makes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _first_calls() -> None:
    """Let no test see what torch computes only the first time."""
    from ckplan.training.warm_up import warm_up_vector_kernels

    warm_up_vector_kernels()
