"""Files: whole or not at all, never over another one unasked, errors that help."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckplan import files
from ckplan.errors import CkplanError


def _raise(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def _everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(params=["links", "no links"])
def _any_drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on a drive with hard links, and as on one without."""
    if request.param == "no links":
        refusal = OSError(errno.EPERM, "Operation not permitted")
        monkeypatch.setattr(Path, "hardlink_to", _raise(refusal))


any_drive = pytest.mark.usefixtures("_any_drive")


@any_drive
@pytest.mark.parametrize("force", [False, True])
def test_a_new_file_is_written_with_the_folders_it_needs(tmp_path: Path, force: bool):
    path = tmp_path / "traces" / "today" / "plan.yaml"
    files.write_text(path, "ckplan: 1\r\n\u00e9\n", force=force)
    assert path.read_bytes() == b"ckplan: 1\r\n\xc3\xa9\n"
    assert _everything_in(tmp_path) == [
        "traces",
        "traces/today",
        "traces/today/plan.yaml",
    ]


@any_drive
def test_an_existing_file_is_kept_unless_forced(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    with pytest.raises(CkplanError) as caught:
        files.write_text(path, "new", force=False)
    assert f"cannot write '{path}': it already exists" == caught.value.what
    assert "--force" in caught.value.hint
    assert path.read_text() == "old"
    files.write_text(str(path), "new", force=True)
    assert path.read_text() == "new"
    assert _everything_in(tmp_path) == ["plan.yaml"]


@any_drive
def test_a_file_that_appears_at_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "plan.yaml"
    monkeypatch.setattr(os, "fsync", lambda _: path.write_text("somebody else's"))
    with pytest.raises(CkplanError, match="already exists"):
        files.write_text(path, "mine", force=False)
    assert path.read_text() == "somebody else's"
    assert _everything_in(tmp_path) == ["plan.yaml"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interruption_leaves_everything_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interruption: BaseException,
    force: bool,
):
    path = tmp_path / "plan.yaml"
    if force:
        path.write_text("old")
    before = _everything_in(tmp_path)
    monkeypatch.setattr(os, "fsync", _raise(interruption))
    with pytest.raises(type(interruption)):
        files.write_text(path, "new", force=force)
    assert before == _everything_in(tmp_path)
    assert not force or path.read_text() == "old"


def test_without_links_an_interruption_leaves_no_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Path, "hardlink_to", _raise(OSError(errno.EPERM, "no links")))
    monkeypatch.setattr(Path, "replace", _raise(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        files.write_text(tmp_path / "plan.yaml", "new", force=False)
    assert _everything_in(tmp_path) == []


def test_a_full_disk_is_a_three_line_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "plan.yaml"
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", _raise(full))
    with pytest.raises(CkplanError) as caught:
        files.write_bytes(path, b"x" * 2048, force=False)
    expected = (
        f"error: cannot write '{path}': no space left on device\n"
        "  needed: a folder that may be written to, with 2.00 KiB free\n"
        "  try:    another path"
    )
    assert expected == str(caught.value)
    assert _everything_in(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_in_the_way_is_named(tmp_path: Path, force: bool):
    with pytest.raises(CkplanError) as caught:
        files.write_text(tmp_path, "new", force=force)
    assert f"cannot write '{tmp_path}': it is a folder" == caught.value.what
    assert f"-o {tmp_path / 'NAME'}" == caught.value.hint


@pytest.mark.parametrize("rest", ["plan.yaml", "deeper/plan.yaml"])
def test_a_file_where_a_folder_is_needed_is_said(tmp_path: Path, rest: str):
    (tmp_path / "traces").write_text("a file")
    path = tmp_path / "traces" / rest
    with pytest.raises(CkplanError, match="a part of the path is a file"):
        files.write_text(path, "new", force=False)
    with pytest.raises(CkplanError, match="a part of the path is a file"):
        files.read_bytes(path, "plan")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_a_new_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path, mask: int):
    before = os.umask(mask)
    try:
        files.write_text(tmp_path / "plan.yaml", "new", force=False)
    finally:
        os.umask(before)
    mode = stat.S_IMODE((tmp_path / "plan.yaml").stat().st_mode)
    assert oct(0o666 & ~mask) == oct(mode)


def test_an_overwritten_file_keeps_its_permissions(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    path.chmod(0o600)
    files.write_text(path, "new", force=True)
    assert (oct(0o600), "new") == (
        oct(stat.S_IMODE(path.stat().st_mode)),
        path.read_text(),
    )


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link(tmp_path: Path, dangling: bool):
    target, link = tmp_path / "shared" / "plan.yaml", tmp_path / "plan.yaml"
    target.parent.mkdir()
    if not dangling:
        target.write_text("old")
    link.symlink_to("shared/plan.yaml")
    files.write_text(link, "new", force=not dangling)
    assert (str(link.readlink()), target.read_text()) == ("shared/plan.yaml", "new")
    assert _everything_in(tmp_path) == ["plan.yaml", "shared", "shared/plan.yaml"]


def test_a_device_is_written_to_not_replaced(tmp_path: Path):
    if not Path("/dev/null").is_char_device():
        pytest.skip("no /dev/null here")
    link = tmp_path / "nowhere"
    link.symlink_to("/dev/null")
    files.write_text(link, "gone", force=False)
    assert Path("/dev/null").is_char_device()
    assert link.is_symlink()


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path):
    data = bytes(range(256))
    files.write_bytes(tmp_path / "trace.json.gz", data, force=False)
    assert data == files.read_bytes(tmp_path / "trace.json.gz", "trace")


def test_a_missing_file_brings_up_the_nearest_one(tmp_path: Path):
    for name in ("gpt2.json.gz", "resnet50.json.gz"):
        (tmp_path / name).touch()
    with pytest.raises(CkplanError) as caught:
        files.read_bytes(tmp_path / "gtp2.json.gz", "trace")
    expected = (
        f"error: cannot read the trace '{tmp_path}/gtp2.json.gz': "
        "no such file or directory\n"
        "  needed: the path of a trace that exists and may be read\n"
        f"  try:    did you mean '{tmp_path}/gpt2.json.gz'?"
    )
    assert expected == str(caught.value)


@pytest.mark.parametrize("name", ["plan.yaml", "nowhere/plan.yaml"])
def test_a_missing_file_without_a_near_one_points_at_its_folder(
    tmp_path: Path, name: str
):
    (tmp_path / "plan.yamls").mkdir()  # near, but no file
    with pytest.raises(CkplanError) as caught:
        files.read_bytes(str(tmp_path / name), "plan")
    assert f"ls {(tmp_path / name).parent}" == caught.value.hint


def test_reading_a_folder_is_a_three_line_error(tmp_path: Path):
    with pytest.raises(CkplanError) as caught:
        files.read_bytes(tmp_path, "plan")
    assert f"cannot read the plan '{tmp_path}': it is a folder" == caught.value.what


def test_the_newest_file_is_the_one_changed_last(tmp_path: Path):
    for name, seconds in (("a.json", 3), ("b.json", 7), ("c.json", 5), ("d.txt", 9)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    (tmp_path / "folder.json").mkdir()
    assert tmp_path / "b.json" == files.newest(tmp_path, "*.json")


def test_of_files_of_one_age_the_newest_is_the_last_by_name(tmp_path: Path):
    for name in ("b.json", "c.json", "a.json"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    assert tmp_path / "c.json" == files.newest(str(tmp_path), "*.json")


def test_where_nothing_matches_there_is_no_newest_file(tmp_path: Path):
    assert files.newest(tmp_path, "*.json") is None
    assert files.newest(tmp_path / "nowhere", "*.json") is None
