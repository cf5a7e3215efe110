"""Replicas that attack the gateway with what they answer."""

from __future__ import annotations

import asyncio

import pytest
from support.gateways import gateway
from support.stub_replica import Call, StubReplica

from phalanx.gateway.relay.event_reader import EventReader


@pytest.mark.parametrize("status", ["000", "101"])
def test_a_status_that_ends_no_request_is_not_passed_on(status):
    async def answer(call: Call) -> None:
        await call.send(
            f"HTTP/1.1 {status} X\r\nUpgrade: x\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n".encode()
        )

    async def scenario() -> None:
        async with StubReplica(answer) as stub, gateway(stub.url, retry_max_retries=0) as client:
            found, body = await client.ask()
            assert found == 502 and "status" in body["error"]["message"]

    asyncio.run(scenario())


def test_others_are_served_while_a_stream_of_tiny_events_is_read(monkeypatch):
    turns = 0
    fed: list[tuple[int, int]] = []
    feed = EventReader.feed

    def noting(self: EventReader, data: bytes) -> bytes:
        fed.append((turns, len(data)))
        return feed(self, data)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def answer(call: Call) -> None:
        await call.begin()
        await call.piece(b"\n" * (1 << 17) + b"data: [DONE]\n\n")
        await call.end()

    async def scenario() -> None:
        async with StubReplica(answer) as stub, gateway(stub.url) as client:
            task = asyncio.create_task(others())
            assert await client.stream() == ["[DONE]"]
            task.cancel()

    monkeypatch.setattr(EventReader, "feed", noting)
    asyncio.run(scenario())
    assert max(n_bytes for _, n_bytes in fed) <= 4096
    assert len({turn for turn, _ in fed}) >= (1 << 17) // 4096
