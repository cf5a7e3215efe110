"""A small model's server that does not start, or does not answer, is named in one line. (What it times: tests/e2e.)"""

from __future__ import annotations

import pytest

from phalanx.cluster import small_server
from phalanx.errors import ClusterError


def test_a_server_that_answers_nothing_is_ended(monkeypatch: pytest.MonkeyPatch):
    script = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "print(f'phalanx is ready: http://127.0.0.1:{s.getsockname()[1]}/v1 (model demo)', flush=True); input()"
    )
    monkeypatch.setattr(small_server, "RUN_PHALANX", ("-c", script))
    monkeypatch.setattr(small_server, "LIMIT_S", 2.0)
    with pytest.raises(ClusterError, match=r"does not (start|answer) here"):
        small_server.timed_steps(1, 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit(1)", r"A group of demo \(--tp 2 --pp 1\) does not start here"),
        ("print('something else')", r"A group of demo \(--tp 2 --pp 1\) does not start here"),
        ("print('phalanx is ready: http://127.0.0.1:9/v1 (model demo)', flush=True); input()", "does not answer here"),
    ],
)
def test_a_server_that_cannot_be_timed_is_named(monkeypatch: pytest.MonkeyPatch, script: str, said: str):
    monkeypatch.setattr(small_server, "RUN_PHALANX", ("-c", script))
    with pytest.raises(ClusterError, match=said) as raised:
        small_server.timed_steps(1, 2)
    assert "\n" not in raised.value.message
