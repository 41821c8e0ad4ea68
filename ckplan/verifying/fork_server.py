"""Child processes that start at once: forks of a process that has imported torch.

The server imports torch, runs no kernel and starts no thread, and forks once for each
request. A fork is then as good as a new process, without seconds of imports. CUDA is
not for it: the libraries of a driver do not survive a fork.

A request is a size with four file descriptors (the child's stdin, stdout and stderr,
and a pipe that tells its end), and then as many pickled bytes. The child's parent is a
small process that waits for it and writes its process id and its exit code to that
pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

_SIZE = struct.Struct("=q")
_LATER = ("COLUMNS", "LINES", "PWD", "OLDPWD", "_")  # not read by imports, as these:
_LATER_PREFIXES = ("CKPLAN_", "PYTEST_")


def can_fork() -> bool:
    """Whether this system forks processes that have imported torch."""
    return sys.platform == "linux"


class ForkedProcess:
    """A forked child, with the interface of ``subprocess.Popen`` as far as it is used.

    Args:
        stdin: Pipe to the child.
        stdout: Pipe from the child.
        ended: Pipe from its parent: its process id, then its exit code.
    """

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO, ended: BinaryIO) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self._ended = ended
        self._code: int | None = None

    @functools.cached_property
    def pid(self) -> int:
        """Process id, or 0 if the child never started."""
        return _read_number(self._ended, otherwise=0)

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: The child runs for longer than ``timeout``.
        """
        if self._code is None and self.pid:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a training step", timeout or 0.0)
            self._code = _read_number(self._ended, otherwise=-signal.SIGKILL)
        self._ended.close()
        return -signal.SIGKILL if self._code is None else self._code

    def kill(self) -> None:
        """End the child, if it still runs."""
        if self._code is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_to(code: str, environ: Mapping[str, str]) -> ForkedProcess:
    """Start a child that runs Python code, in this folder, with this stderr.

    Args:
        code: Its source; ``sys.path`` is that of the server.
        environ: Environment variables of the child.
    """
    order = pickle.dumps(_Order(code, dict(environ), str(Path.cwd())))
    child_stdin, stdin = os.pipe()
    stdout, child_stdout = os.pipe()
    ended, child_ended = os.pipe()
    given = (child_stdin, child_stdout, 2, child_ended)
    try:
        _server_of(environ).send(order, given)
    finally:
        for descriptor in (child_stdin, child_stdout, child_ended):
            os.close(descriptor)
    return ForkedProcess(
        os.fdopen(stdin, "wb"),
        os.fdopen(stdout, "rb"),
        os.fdopen(ended, "rb", buffering=0),
    )


class _Order(NamedTuple):
    """What a child runs, and where."""

    code: str
    environ: dict[str, str]
    folder: str


class _Server:
    """The server, as its parent sees it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; from {__name__} import main; main()"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**environ},
                start_new_session=True,  # Ctrl-C reaches only the parent
            )
        atexit.register(self.close)

    def send(self, order: bytes, descriptors: tuple[int, ...]) -> None:
        """Request a child."""
        socket.send_fds(self._channel, [_SIZE.pack(len(order))], descriptors)
        self._channel.sendall(order)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def retire(self) -> None:
        """Let the process end after what it was asked for."""
        self._channel.close()

    def close(self) -> None:
        """End the process; its children go on."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


_MOST = 2  # servers at a time: each takes hundreds of MiB
_servers: dict[frozenset[tuple[str, str]], _Server] = {}


def _server_of(environ: Mapping[str, str]) -> _Server:
    """The server whose libraries were imported under such variables."""
    key = frozenset(
        (name, value)
        for name, value in environ.items()
        if name not in _LATER and not name.startswith(_LATER_PREFIXES)
    )
    server = _servers.pop(key, None)
    if server is None or not server.is_alive:
        server = _Server(environ)
    _servers[key] = server  # the last that was asked for
    while len(_servers) > _MOST:
        _servers.pop(next(iter(_servers))).retire()
    return server


def _read_number(pipe: BinaryIO, otherwise: int) -> int:
    found = pipe.read(_SIZE.size)
    return _SIZE.unpack(found)[0] if found else otherwise


def main() -> None:
    """Serve requests until the parent ends; in a child, run its code."""
    import torch._dynamo  # noqa: F401 - optimizers import it in their first step

    import ckplan.applying
    import ckplan.verifying.worker  # noqa: F401

    gc.freeze()  # children share these objects and need not look at them
    order = _serve()
    if order is not None:
        os.environ.clear()
        os.environ.update(order.environ)
        os.chdir(order.folder)
        exec(order.code, {"__name__": "__main__"})


def _serve() -> _Order | None:
    """What to run, in each child; None in the server, in the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    with socket.socket(fileno=os.dup(0)) as channel:
        while True:
            size, descriptors, _, _ = socket.recv_fds(channel, _SIZE.size, 4)
            if not size:
                return None
            order = channel.recv(_SIZE.unpack(size)[0], socket.MSG_WAITALL)
            if os.fork() == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
    _fork_and_keep(*descriptors)
    found: _Order = pickle.loads(order)
    return found


def _fork_and_keep(stdin: int, stdout: int, stderr: int, ended: int) -> None:
    """Fork the child, in which this returns, and wait for it, in its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.closerange(0, ended)
        os.write(ended, _SIZE.pack(pid))
        _, status = os.waitpid(pid, 0)
        os.write(ended, _SIZE.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    os.close(ended)
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
