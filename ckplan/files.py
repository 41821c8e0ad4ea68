"""Read and write files: written whole or not at all, with errors that help."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from ckplan.errors import CkplanError, did_you_mean
from ckplan.units import format_bytes


def write_text(path: str | Path, text: str, *, force: bool) -> None:
    """Write a text in UTF-8, as ``write_bytes`` writes bytes."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: str | Path, data: bytes, *, force: bool) -> None:
    """Write a file whole or not at all, making its folder where there is none.

    Whatever interrupts this, ``path`` holds either what it held before or all of
    ``data``. A link keeps pointing where it did; a device (``/dev/stdout``) is
    simply written to.

    Args:
        path: The file to write.
        data: Everything that it shall hold.
        force: Whether to overwrite a file that exists.

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
    """Return all that a file holds.

    Args:
        path: The file to read.
        what: What the user takes it for ("trace", "plan"), for the error message.

    Raises:
        CkplanError: There is no such file, or it cannot be read.
    """
    path = Path(path)
    try:
        return path.read_bytes()
    except OSError as error:
        near = _nearest(path)
        raise CkplanError(
            f"cannot read the {what} '{path}': {_reason(error)}",
            needed=f"the path of a {what} that exists and may be read",
            hint=f"did you mean '{near}'?" if near else f"ls {path.parent}",
        ) from error


def newest(folder: str | Path, pattern: str) -> Path | None:
    """Return the file changed last among those of a folder that match, if any."""
    files = [path for path in Path(folder).glob(pattern) if path.is_file()]
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path), default=None)


def _write_whole(target: Path, data: bytes, *, force: bool) -> None:
    """Write beside the target, then give the finished file its name in one step."""
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
    """Give a finished file a name, unless that name is taken, however recently."""
    try:
        try:
            target.hardlink_to(temporary)
        except FileExistsError:
            raise
        except OSError:  # a drive without hard links
            _reserve_and_replace(temporary, target)
    except FileExistsError:
        raise exists(target) from None


def exists(path: Path) -> CkplanError:
    """The error for a file that must not be overwritten."""
    return CkplanError(
        f"cannot write '{path}': it already exists",
        needed="a path that does not exist yet, or leave to overwrite",
        hint="--force to overwrite it, or another name with -o",
    )


def _reserve_and_replace(temporary: Path, target: Path) -> None:
    """Do the same without a link: for a moment the name holds an empty file."""
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


def _nearest(path: Path) -> Path | None:
    """Return the file beside a path whose name is most like it, if any."""
    try:
        names = sorted(file.name for file in path.parent.iterdir() if file.is_file())
    except OSError:
        return None
    near = did_you_mean(path.name, names)
    return path.with_name(near) if near else None
