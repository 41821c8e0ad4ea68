"""Children of the server are as good as new processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckplan.verifying import fork_server
from ckplan.verifying.fork_server import ForkedProcess, can_fork, fork_to

pytestmark = pytest.mark.skipif(not can_fork(), reason="forks only on Linux")
FACTS = """
import os, sys, threading, torch
print(sorted(set(os.environ) & {"ONE", "CKPLAN_TWO"}), os.getcwd(), sys.stdin.read())
print(torch.cuda.is_initialized(), threading.active_count(), torch.get_num_threads())
print("an error", file=sys.stderr)
sys.exit(7)
"""


def said_by(process: ForkedProcess, words: bytes = b"") -> tuple[str, int]:
    process.stdin.write(words)
    process.stdin.close()
    with process.stdout:
        return process.stdout.read().decode(), process.wait()


def test_a_child_has_its_own_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    said_by(fork_to("", os.environ))  # the server's folder is another
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "CKPLAN_TWO": "", "OMP_NUM_THREADS": "1"}
    out, code = said_by(fork_to(FACTS, environ), b"words")
    assert out == f"['CKPLAN_TWO'] {tmp_path} words\nFalse 1 1\n"
    assert capfd.readouterr() == ("", "an error\n")
    assert code == 7


def test_variables_that_libraries_read_are_those_of_the_server():
    code = "import os; print(os.environ['ONE'])"
    others = [fork_to(code, {**os.environ, "ONE": str(n)}) for n in (1, 2)]
    assert [said_by(one)[0] for one in others] == ["1\n", "2\n"]
    servers = {id(fork_server._server_of({**os.environ, "ONE": n})) for n in "12"}
    assert len(servers) == 2
    again = {**os.environ, "ONE": "1", "COLUMNS": "7", "CKPLAN_CACHE": "elsewhere"}
    assert id(fork_server._server_of(again)) in servers


def test_of_many_environments_the_last_ones_keep_a_server() -> None:
    made = [fork_server._server_of({**os.environ, "ONE": n}) for n in "345"]
    assert made[0]._process.wait(60) == 0
    assert all(one.is_alive for one in made[1:])
    assert fork_server._server_of({**os.environ, "ONE": "4"}) is made[1]


def test_a_child_that_is_killed_or_slow_is_told_apart():
    slow = fork_to("import time; time.sleep(600)", os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        slow.wait(0.01)
    slow.kill()
    assert slow.wait() == slow.wait() == -signal.SIGKILL
    slow.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(slow.pid, 0)
    said_by(slow)


def test_a_server_that_died_is_replaced():
    environ = {**os.environ, "ONE": "dies"}
    before = fork_server._server_of(environ)
    before._process.kill()
    before._process.wait()
    assert said_by(fork_to("print(1)", environ)) == ("1\n", 0)
    assert fork_server._server_of(environ) is not before


def test_the_server_ends_with_its_parent():
    code = (
        "import os; from ckplan.verifying.fork_server import _server_of, fork_to\n"
        "process = fork_to('', os.environ)\n"
        "process.stdin.close(); process.stdout.close()\n"
        "print(process.wait(), _server_of(os.environ)._process.pid)"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    ended, server = map(int, found.stdout.split())
    assert (ended, found.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
