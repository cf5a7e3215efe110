"""Which processes are servers, and how a user names them. `e2e/test_models_by_name.py` has real ones."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from phalanx.cli import ps, stop
from phalanx.cluster.local_servers import LocalServer, end, kind_of
from phalanx.cluster.replica_layout import REPLICAS_FILE
from phalanx.errors import ConfigError

PYTHON = "/opt/venv/bin/python3.12"
ONE = LocalServer(
    pid=10, models=["qwen3:4b"], addresses=["127.0.0.1:8000"], ranks=1, bytes=1, supervised=False
)  # fmt: skip
OTHER = LocalServer(
    pid=11, models=["qwen3:4b", "draft"], addresses=["[::1]:8001"], ranks=2, bytes=1, supervised=True
)  # fmt: skip
NAMED = LocalServer(
    pid=13, models=["/models/smol"], served_as=["chat", "other"], addresses=[], ranks=1, bytes=1, supervised=False
)  # fmt: skip
GATEWAY = LocalServer(
    pid=12, kind="gateway", models=[], addresses=["127.0.0.1:8080"], ranks=0, bytes=1, supervised=False
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ([PYTHON, "-P", "-m", "phalanx", "serve", "demo"], "serve"),
        ([PYTHON, "/opt/venv/bin/phalanx", "serve"], "serve"),
        (["/opt/venv/bin/phalanx", "serve"], "serve"),
        ([PYTHON, "-m", "phalanx", "gateway", "--worker-urls", "http://a:8000"], "gateway"),
        ([PYTHON, "-m", "phalanx", "gateway", "--replicas", REPLICAS_FILE], "gateway"),
        ([PYTHON, "-m", "phalanx", "rank", "serve", "--socket", "s"], None),
        (["mpirun", "-n", "2", PYTHON, "-m", "phalanx", "serve", "x"], None),
        ([PYTHON, "-m", "phalanx", "pull", "serve"], None),
        ([PYTHON, "-m", "phalanx", "launch", "gateway"], None),
        (["vi", "phalanx", "serve"], None),
        ([], None),
    ],
)
def test_the_command_line_tells_a_server_and_a_gateway(command: list[str], kind: str | None):
    assert kind_of(command) == kind


def test_a_server_is_named_by_process_port_or_model():
    chosen = stop._chosen
    assert chosen("10", [ONE, OTHER]) == chosen("8000", [ONE, OTHER]) == chosen(None, [ONE]) == ONE
    assert chosen("gateway", [ONE, OTHER, GATEWAY]) == chosen("8080", [ONE, OTHER, GATEWAY]) == GATEWAY
    assert chosen("127.0.0.1:8000", [ONE, OTHER]) == ONE and chosen("[::1]:8001", [ONE, OTHER]) == OTHER
    assert chosen("8001", [ONE, OTHER]) == chosen("draft", [ONE, OTHER]) == OTHER
    assert chosen("smol", [ONE, NAMED]) == chosen("chat", [ONE, NAMED]) == chosen("/models/smol", [ONE, NAMED]) == NAMED
    for which, found, said in (
        ("qwen3:4b", [ONE, OTHER], "There are 2 such servers: 10, 11"),
        (None, [ONE, OTHER], "There are 2 such servers: 10, 11"),
        (None, [ONE, GATEWAY], "There are 2 such servers: 10, 12"),
        ("serve", [ONE], "that 'serve' names"),
        (None, [], "There is no server or gateway of this user on this machine."),
        ("1", [ONE, OTHER], "that '1' names"),
    ):
        with pytest.raises(ConfigError, match=said):
            chosen(which, found)


def test_ps_shows_the_names_that_a_server_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(ps, "local_servers", lambda: [NAMED])
    assert ps.command() == 0 and "  /models/smol as chat, other  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "server", "said"),
    [
        (None, ONE, "stopped 10: qwen3:4b at 127.0.0.1:8000\n"),
        (None, GATEWAY, "stopped 12: gateway at 127.0.0.1:8080\n"),
        ("8000", ONE, "stopped 10\n"),
    ],
)
def test_stop_without_a_name_says_what_it_stopped(
    which: str | None, server: LocalServer, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.setattr(stop, "local_servers", lambda: [server])
    monkeypatch.setattr(stop, "end", lambda server, timeout: True)
    assert stop.command(which) == 0 and capsys.readouterr().out == said


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
