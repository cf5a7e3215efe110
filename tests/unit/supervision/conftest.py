"""Agents and servers that wait for each other as long as a busy machine takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

LONG_S = 120.0


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """No test but those of silence, which set their own limits, ends by one of these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ANSWER_S", "CONNECT_S", "HEARTBEAT_TIMEOUT_S"):
            patch.setattr(f"phalanx.supervision.remote.{name}", LONG_S)
        patch.setattr("phalanx.supervision.rank_agent.HEARTBEAT_TIMEOUT_S", LONG_S)
        patch.setattr("phalanx.supervision.tls_listener.HANDSHAKE_S", LONG_S)
        yield
