"""Read and write files; writes are atomic. Which source this is."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from functools import cache
from pathlib import Path

from ckplan.errors import CkplanError, did_you_mean
from ckplan.units import format_bytes


def write_text(path: str | Path, text: str, *, force: bool) -> None:
    """Write a text in UTF-8, as ``write_bytes`` writes bytes."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: str | Path, data: bytes, *, force: bool) -> None:
    """Write a file atomically; creates its folder if needed.

    After an interruption, ``path`` holds either its old content or all of ``data``. A
    link keeps its target. A device such as ``/dev/stdout`` is written directly.

    Args:
        path: The file to write.
        data: The whole content.
        force: Whether to overwrite an existing file.

    Raises:
        CkplanError: The file exists and ``force`` is not set, or it cannot be
            written.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            target = Path(os.path.realpath(path)) if path.is_symlink() else path
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(target, data, force=force)
    except OSError as error:
        raise _cannot_write(path, len(data), error) from error


def read_bytes(path: str | Path, what: str) -> bytes:
    """Return the content of a file.

    Args:
        path: The file to read.
        what: The kind of file ("trace", "plan"), for error messages.

    Raises:
        CkplanError: There is no such file, or it cannot be read.
    """
    path = Path(path)
    try:
        return path.read_bytes()
    except OSError as error:
        near = nearest(path)
        raise CkplanError(
            f"cannot read the {what} '{path}': {_reason(error)}",
            needed=f"the path of a {what} that exists and may be read",
            hint=f"did you mean '{near}'?" if near else f"ls {path.parent}",
        ) from error


def newest(folder: str | Path, pattern: str) -> Path | None:
    """Return the most recently changed file that matches a pattern, if any."""
    files = [path for path in Path(folder).glob(pattern) if path.is_file()]
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path), default=None)


@cache
def source_digest(folder: str = "") -> str:
    """Digest of the source of ckplan, or of a folder of it.

    What is kept on disk says with it which code it is of. Without source, the version
    stands for it.
    """
    from ckplan import __version__

    found = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.joinpath(folder).rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _write_whole(target: Path, data: bytes, *, force: bool) -> None:
    """Write a temporary file beside the target, then rename it in one step."""
    temporary = target.with_name(f".ckplan-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not force:
            _name_new(temporary, target)
        else:
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _name_new(temporary: Path, target: Path) -> None:
    """Rename a finished file, unless a file of that name exists by now."""
    try:
        try:
            target.hardlink_to(temporary)
        except FileExistsError:
            raise
        except OSError:  # a drive without hard links
            _reserve_and_replace(temporary, target)
    except FileExistsError:
        raise exists(target) from None


def exists(path: Path, hint: str | None = None) -> CkplanError:
    """The error for a file that must not be overwritten."""
    return CkplanError(
        f"cannot write '{path}': it already exists",
        needed="a path that does not exist yet, or leave to overwrite",
        hint=hint or "--force to overwrite it, or another name with -o",
    )


def _reserve_and_replace(temporary: Path, target: Path) -> None:
    """Rename without a hard link; the target is an empty file for a moment."""
    target.open("xb").close()
    try:
        temporary.replace(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _cannot_write(path: Path, num_bytes: int, error: OSError) -> CkplanError:
    what = f"cannot write '{path}': {_reason(error)}"
    if isinstance(error, IsADirectoryError):
        return CkplanError(
            what, needed="the name of a file", hint=f"-o {path / 'NAME'}"
        )
    return CkplanError(
        what,
        needed=f"a folder that may be written to, with {format_bytes(num_bytes)} free",
        hint="another path",
    )


def _reason(error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a part of the path is a file, not a folder"
    return (error.strerror or str(error)).lower()


def nearest(path: Path, pattern: str = "*") -> Path | None:
    """Return the file in the same folder with the most similar name, if any."""
    try:
        found = [file.name for file in path.parent.glob(pattern) if file.is_file()]
    except OSError:
        return None
    near = did_you_mean(path.name, sorted(found))
    return path.with_name(near) if near else None
