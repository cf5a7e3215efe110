"""The gateway's process: what ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from phalanx.errors import ExitCode
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.fleet import Fleet
from phalanx.gateway.gateway_process import Gateway
from phalanx.gateway.relay.proxy import Proxy
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.listening import bind


@pytest.mark.parametrize(("owner", "method"), [(Proxy, "watch"), (Fleet, "_check"), (AsyncDispatcher, "tick")])
def test_a_background_task_that_fails_ends_the_gateway_with_its_cause_in_the_log(owner, method, monkeypatch, caplog):
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(owner, method, fail)
    config = GatewayConfig(port=0, worker_urls=("http://127.0.0.1:1",))

    async def exit_code() -> int:
        with bind("127.0.0.1", 0) as listener:
            return await asyncio.wait_for(Gateway(config, listener).run(), 60)

    assert asyncio.run(exit_code()) == ExitCode.CRASH
    assert "ZeroDivisionError: a bug" in caplog.text
