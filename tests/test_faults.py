"""The faults of ``scripts/faults.py`` are of lines and tests that are there."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_fault_changes_a_line_and_names_tests() -> None:
    faults = runpy.run_path(str(ROOT / "scripts" / "faults.py"))["FAULTS"]
    assert len(faults) >= 60
    for fault in faults:
        text = (ROOT / "ckplan" / fault.file).read_text()
        assert fault.old in text, f"{fault.file}: no {fault.old!r}"
        assert text.replace(fault.old, fault.new, 1) != text
        for name in fault.tests.split(" -k")[0].split():
            assert (ROOT / "tests" / name.partition("::")[0]).exists(), name
