"""``scripts/environment`` leaves what is not its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "environment"


def test_an_environment_behind_a_link_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    mine = shutil.copy(SCRIPT, tmp_path / "scripts")
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    (tmp_path / ".venv").symlink_to(other)
    ended = subprocess.run(["bash", mine], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 3
    assert "is a link" in ended.stderr
    assert (other / "kept").exists()
