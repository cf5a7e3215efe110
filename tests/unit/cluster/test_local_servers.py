"""Which processes are servers, and how a user names them. `e2e/test_models_by_name.py` has real ones."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from phalanx.cli import stop
from phalanx.cluster.local_servers import LocalServer, end, is_server
from phalanx.errors import ConfigError

PYTHON = "/opt/venv/bin/python3.12"
ONE = LocalServer(
    pid=10, models=["qwen3:4b"], addresses=["127.0.0.1:8000"], ranks=1, bytes=1, supervised=False
)  # fmt: skip
OTHER = LocalServer(
    pid=11, models=["qwen3:4b", "draft"], addresses=["[::1]:8001"], ranks=2, bytes=1, supervised=True
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "serves"),
    [
        ([PYTHON, "-P", "-m", "phalanx", "serve", "demo"], True),
        ([PYTHON, "/opt/venv/bin/phalanx", "serve"], True),
        (["/opt/venv/bin/phalanx", "serve"], True),
        ([PYTHON, "-m", "phalanx", "rank", "serve", "--socket", "s"], False),
        (["mpirun", "-n", "2", PYTHON, "-m", "phalanx", "serve", "x"], False),
        ([PYTHON, "-m", "phalanx", "pull", "serve"], False),
        (["vi", "phalanx", "serve"], False),
        ([], False),
    ],
)
def test_the_command_line_tells_a_server(command: list[str], serves: bool):
    assert is_server(command) == serves


def test_a_server_is_named_by_process_port_or_model():
    chosen = stop._chosen
    assert chosen("10", [ONE, OTHER]) == chosen("8000", [ONE, OTHER]) == chosen(None, [ONE]) == ONE
    assert chosen("8001", [ONE, OTHER]) == chosen("draft", [ONE, OTHER]) == OTHER
    for which, found, said in (
        ("qwen3:4b", [ONE, OTHER], "There are 2 such servers: 10, 11"),
        (None, [ONE, OTHER], "There are 2 such servers: 10, 11"),
        (None, [], "There is no server of this user on this machine."),
        ("1", [ONE, OTHER], "that '1' names"),
    ):
        with pytest.raises(ConfigError, match=said):
            chosen(which, found)


def test_a_server_of_up_is_not_stopped_behind_its_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop, "local_servers", lambda: [OTHER])
    monkeypatch.setattr(stop, "end", lambda *_: pytest.fail("stopped"))
    with pytest.raises(ConfigError, match=r"started by `phalanx up`. Run `phalanx down`"):
        stop.command(None)


def test_a_process_that_is_no_server_any_more_is_not_signalled():
    sleeping = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        taken = LocalServer(pid=sleeping.pid, models=[], addresses=[], ranks=0, bytes=0, supervised=False)
        assert end(taken, 0.1) and psutil.pid_exists(sleeping.pid) and sleeping.poll() is None
    finally:
        sleeping.communicate(b"\n")
    assert sleeping.returncode == 0


def test_a_server_that_does_not_end_in_time_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stop, "local_servers", lambda: [ONE])
    monkeypatch.setattr(stop, "end", lambda server, timeout: False)
    with pytest.raises(ConfigError, match=r"Process 10 has not ended in 0.5 s.*Run the same command again"):
        stop.command("8000", 0.5)
