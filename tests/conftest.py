"""What holds for all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _costs_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Keep measured costs for as long as the tests run, away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPLAN_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield
