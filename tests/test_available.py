"""Memory that a process can still have: of the machine, and of its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckplan import available
from ckplan.available import available_bytes

KIB, MIB = 1 << 10, 1 << 20
UNLIMITED = 9223372036854771712


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine with 1000 MiB left, whose process is in no group so far."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {2000 * KIB} kB\nMemAvailable: {1000 * KIB} kB\nHugePages_Free: 0\n"
    )
    (tmp_path / "own").write_text("")
    monkeypatch.setattr(available, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(available, "_OWN_GROUPS", tmp_path / "own")
    one = available._VERSION_1._replace(root=tmp_path / "v1")
    two = available._VERSION_2._replace(root=tmp_path / "v2")
    monkeypatch.setattr(available, "_VERSION_1", one)
    monkeypatch.setattr(available, "_VERSION_2", two)
    return tmp_path


def write(group: Path, limit: str, current: str, values: dict[str, object]) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / limit).write_text(f"{values['limit']}\n")
    (group / current).write_text(f"{values['used']}\n")
    stat = "".join(f"{k} {v}\n" for k, v in values.items() if k.endswith("_file"))
    (group / "memory.stat").write_text(f"anon 1\n{stat}")


def second(group: Path, **values: object) -> None:
    write(group, "memory.max", "memory.current", values)


def test_without_groups_it_is_what_the_machine_has_left(groups: Path) -> None:
    assert available_bytes() == 1000 * MIB
    (groups / "own").unlink()
    assert available_bytes() == 1000 * MIB
    (groups / "meminfo").write_text(f"MemTotal: {2000 * KIB} kB\n")  # an old kernel
    physical = available_bytes()
    assert 1000 * MIB < physical <= 1 << 62
    (groups / "meminfo").unlink()
    assert available_bytes() == physical


def test_a_container_has_what_its_limit_leaves_and_its_cached_files(
    groups: Path,
) -> None:
    (groups / "own").write_text("0::/\n")
    used: dict[str, object] = {"used": 70 * MIB, "inactive_file": 20 * MIB}
    second(groups / "v2", limit=100 * MIB, **used, active_file=5 * MIB)
    assert available_bytes() == 55 * MIB
    second(groups / "v2", limit=60 * MIB, used=70 * MIB, inactive_file=MIB)
    assert available_bytes() == 0
    second(groups / "v2", limit="max", used=70 * MIB)
    assert available_bytes() == 1000 * MIB


def test_the_tightest_of_the_groups_around_counts(groups: Path) -> None:
    (groups / "own").write_text("1:name=systemd:/x\n0::/job/step\n")
    second(groups / "v2" / "job" / "step", limit="max", used=MIB)
    second(groups / "v2" / "job", limit=300 * MIB, used=100 * MIB)
    assert available_bytes() == 200 * MIB
    second(groups / "v2" / "job" / "step", limit=50 * MIB, used=MIB)
    assert available_bytes() == 49 * MIB
    second(groups / "v2" / "other", limit=MIB, used=MIB)
    assert available_bytes() == 49 * MIB


def test_groups_of_the_first_version_count_too(groups: Path) -> None:
    (groups / "own").write_text("5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    whole: dict[str, object] = {"limit": UNLIMITED, "used": 10 * MIB}
    write(groups / "v1", *names, whole)
    assert available_bytes() == 1000 * MIB
    tight: dict[str, object] = {"limit": 90 * MIB, "used": 40 * MIB}
    # In a container, its own group is at the root, whatever it is called outside.
    write(groups / "v1", *names, tight | {"total_inactive_file": 4 * MIB})
    assert available_bytes() == 54 * MIB
