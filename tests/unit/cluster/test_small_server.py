"""A small model's server that does not start, or does not answer, is named in one line. (What it times: tests/e2e.)"""

from __future__ import annotations

import pytest

from phalanx.cluster import small_server
from phalanx.errors import ClusterError


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
