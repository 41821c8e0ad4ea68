"""What the README says of tests: each row of its table names one that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "transformers": "transformers",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "peft": "peft",
}


def rows() -> list[list[str]]:
    """Cells of the table of what plans work in."""
    text = (ROOT / "README.md").read_text()
    section = text.partition("## In a training loop of somebody else")[2]
    lines = (x for x in section.partition("\n##")[0].splitlines() if x[:1] == "|")
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_names_a_test_that_is_there() -> None:
    header, _, *table = rows()
    assert header == ["what", "version", "line", "test", "result"]
    assert len(table) > 20
    there = set(
        re.findall(r"def (test_\w+)", _text("integrations/test_integrations.py"))
    )
    for row in table:
        names = re.findall(r"`(test_\w+(?:\.py)?)`", row[3])
        assert names, row
        for name in names:
            assert name in there or [*(ROOT / "tests").rglob(name)], name


def test_versions_are_those_that_the_tests_run_with() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = dict(line.partition(";")[0].split("==") for line in lines if "==" in line)
    pins = {name: version.strip() for name, version in pins.items()}
    for what, version, *_ in rows()[2:]:
        found = next((PACKAGES[key] for key in PACKAGES if key in what), None)
        if version.startswith("torch "):
            assert version.removeprefix("torch ") == pins["torch"].partition("+")[0]
        elif found is not None:
            assert version == pins[found]
        else:  # DeepSpeed is no extra
            assert version == "0.19.8"


def _text(name: str) -> str:
    return (ROOT / "tests" / name).read_text()
