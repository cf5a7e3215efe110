"""Replicas that attack the gateway with what they answer."""

from __future__ import annotations

import asyncio

import pytest
from support.gateways import CHAT, gateway
from support.stub_replica import Call, StubReplica

from phalanx.gateway.relay.event_reader import EventReader

FORBIDDEN = (
    "Access-Control-Allow-Origin: *", "Access-Control-Allow-Credentials: true", "Set-Cookie: a=b",
    "Refresh: 0; url=http://evil.example", 'Alt-Svc: h3="evil.example:443"',
    "Strict-Transport-Security: max-age=99999999", "Location: http://evil.example", 'Clear-Site-Data: "*"',
    "Content-Security-Policy: default-src *", "Link: <http://evil.example>; rel=preload", "X-Accel-Redirect: /etc/",
    "WWW-Authenticate: Basic realm=evil", "X-Of-Tomorrow: 1", "X-Request-Id: theirs", "X-Phalanx-Replica: another",
)  # fmt: skip
"""Headers of a replica that no client gets: they would act on the gateway's address, or pass for the gateway's own."""
PASSED = (
    "Cache-Control: no-cache", "Retry-After: 7", "retry-after-ms: 7000", "x-should-retry: true", "request-id: req_1",
    "anthropic-organization-id: o", "openai-processing-ms: 3", "x-ratelimit-remaining-tokens: 5",
    "X-Phalanx-Of-Tomorrow: 1", "X-Accel-Buffering: no", "Content-Language: de",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_headers_of_a_replica_pass_only_if_clients_read_them(kind):
    lines = [*FORBIDDEN, *PASSED]

    async def answer(call: Call) -> None:
        body = b"{}" if kind == "application/json" else b"data: [DONE]\n\n"
        head = ["HTTP/1.1 200 OK", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *lines]
        await call.send("\r\n".join([*head, "", ""]).encode() + body)

    async def scenario() -> None:
        async with StubReplica(answer) as stub, gateway(stub.url) as client:
            async with client.request("POST", CHAT, {"model": "m"}, X_Request_Id="mine") as response:
                assert response.status == 200 and response.content_type == kind
                found = {(name.lower(), value) for name, value in response.headers.items()}
            ours = {("x-request-id", "mine"), ("x-phalanx-replica", stub.name), ("server", "phalanx")}
            of_http = {"content-type", "content-length", "transfer-encoding", "date"}
            assert {pair for pair in found if pair[0] not in of_http} == ours | {split(line) for line in PASSED}

    asyncio.run(scenario())


def split(line: str) -> tuple[str, str]:
    """A header's name, in small letters, and its value."""
    name, _, value = line.partition(": ")
    return name.lower(), value


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/v1/files"])
@pytest.mark.parametrize(
    "keys", [{"api_key": ("of-clients",)}, {"worker_key": "wrong"}, {}], ids=["key", "shared", "none"]
)
def test_what_a_replica_says_of_the_gateways_key_is_no_clients_matter(keys, path):
    """Without keys of the gateway, the client's own is for the replica, and the client hears what is wrong with it."""

    async def answer(call: Call) -> None:
        await call.whole(401, {"error": {"message": "Incorrect key: sk-12"}}, WWW_Authenticate='Basic realm="evil"')

    async def scenario() -> None:
        async with StubReplica(answer) as stub, gateway(stub.url, key="of-clients", **keys) as client:
            async with client.request("POST", path, {"model": "m", "stream": True}) as response:
                said = await response.text()
                if keys:
                    assert (response.status, response.headers.get("WWW-Authenticate")) == (502, None)
                    assert stub.name in said and "--worker-key" in said and "sk-12" not in said
                else:
                    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert "sk-12" in said
                assert len(stub.calls) == 1

    asyncio.run(scenario())


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
