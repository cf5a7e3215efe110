"""The gateway is an application on the server's HTTP stack: what both have to decide, they decide alike."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.gateways import CHAT, errors, gateway, run
from support.serving import fake_engine, make_tokenizer, serving
from support.stub_replica import StubReplica, begins, hangs, streaming

from phalanx.gateway.relay.proxy import Proxy
from phalanx.http.connection_table import Deadlines
from phalanx.http.listening import bind

OF_ONE = frozenset(("date", "content-length"))  # headers whose values may differ between two answers


async def answer_of(port: int, sent: bytes) -> bytes:
    """What is answered to these bytes, up to the end of the connection."""
    source, out = await asyncio.open_connection("127.0.0.1", port)
    out.write(sent)
    answer = await source.read()
    out.close()
    return answer


def taken_apart(answer: bytes) -> tuple[str, dict[str, str], str]:
    """Status, headers and body, without what two right answers may differ in."""
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    headers = {name.lower(): value for name, value in pairs if name.lower() not in OF_ONE}
    assert len(headers) == len(pairs) - len(OF_ONE), answer
    headers["x-request-id"] = re.sub("req_[0-9a-f]{32}", "a new one", headers.get("x-request-id", "none"))
    return status, headers, body.replace("gateway", "server")


def request(first: str, *lines: str, host: str = "localhost", body: bytes = b"") -> bytes:
    length = [] if any("Content-Length" in line for line in lines) else [f"Content-Length: {len(body)}"]
    head = [f"{first} HTTP/1.1", f"Host: {host}", "Connection: close", *lines, *length]
    return "".join(f"{line}\r\n" for line in head).encode() + b"\r\n" + body


JSON = "Content-Type: application/json"
ZIPPED, DEFLATED = gzip.compress(b"{}"), zlib.compress(b"{}")
ALIKE = {
    "a name of another site": request("GET /health", host="evil.example"),
    "the same in Anthropic's words": request("POST /v1/messages", JSON, host="evil.example", body=b"{}"),
    "the same in Ollama's words": request("POST /api/chat", JSON, host="evil.example", body=b"{}"),
    "no name": request("GET /version", host=""),
    "an unknown path": request("GET /v2/x"),
    "a wrong method": request("POST /health", JSON, body=b"{}"),
    "HEAD": request("HEAD /version"),
    "a slash at the end": request("GET /version/"),
    "an id": request("GET /version", "X-Request-Id: mine-1"),
    "an id that is markup": request("GET /version", "X-Request-Id: <b>"),
    "a form": request("POST /v1/messages", "Content-Type: text/plain", body=b"{}"),
    "of a page": request(f"POST {CHAT}", "Origin: null", body=b"{}"),
    "too large by its length": request(f"POST {CHAT}", JSON, f"Content-Length: {9 << 20}"),
    "an encoding that is not read": request(f"POST {CHAT}", JSON, "Content-Encoding: deflate", body=DEFLATED),
    "damaged": request(f"POST {CHAT}", JSON, "Content-Encoding: gzip", body=ZIPPED[:-6] + b"xxxxxx"),
    "cut short": request("POST /api/chat", JSON, "Content-Encoding: gzip", body=ZIPPED[:-3]),
    "two members": request(f"POST {CHAT}", JSON, "Content-Encoding: gzip", body=ZIPPED * 2),
    "not HTTP": b"GET / HTCPCP/1.0\r\n\r\n",
}


def test_server_and_gateway_answer_alike(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path)

    async def scenario() -> None:
        async with (
            serving(tokenizer, fake_engine(tokenizer)) as server,
            StubReplica(streaming(1)) as a,
            gateway(a.url) as client,
        ):
            for name, sent in ALIKE.items():
                said = taken_apart(await answer_of(server.port, sent))
                assert taken_apart(await answer_of(client.gateway.port, sent)) == said, name
                assert said[0].split()[1] in ("200", "400", "403", "404", "405", "413", "415"), (name, said)
            assert not a.calls

    run(scenario())


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "message"), ("/v1/messages", "api_error"), ("/api/chat", "error")])
def test_a_bug_in_the_gateway_is_answered_with_its_id_in_the_paths_own_words(path, kind, monkeypatch, caplog):
    async def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Proxy, "forward", fails)

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, gateway(a.url) as client:
            async with client.request("POST", path, {"model": "m"}, X_Request_Id="mine-1") as response:
                said = await response.text()
                assert response.status == 500 and response.headers["x-request-id"] == "mine-1"
                assert kind in said and "the details of mine-1" in said and "a bug" not in said

    run(scenario())
    assert "ZeroDivisionError: a bug" in caplog.text


def test_answers_are_counted_by_status_also_errors_and_clients_that_leave():
    async def scenario() -> None:
        async with StubReplica(hangs) as a, gateway(a.url) as client:

            async def metrics() -> dict[str, str]:
                async with client.request("GET", "/metrics") as response:
                    lines = (await response.text()).splitlines()
                return dict(line.removeprefix("phalanx:gateway_").rsplit(" ", 1) for line in lines)

            assert (await client.ask(model="another"))[0] == 404
            asked = asyncio.create_task(client.ask())
            while not a.running:
                await asyncio.sleep(0.01)
            asked.cancel()
            while 'requests_total{code="499"}' not in (found := await metrics()):
                await asyncio.sleep(0.01)
            counted = {name: value for name, value in found.items() if name.startswith("requests_total")}
            assert counted == {'requests_total{code="404"}': "1.0", 'requests_total{code="499"}': "1.0"}
            assert found["clients_left_total"] == "1.0"

    run(scenario())


def test_a_port_of_its_own_for_metrics_has_the_same_deadlines_and_errors():
    async def scenario() -> None:
        with bind("127.0.0.1", 0) as listener:
            at, soon = listener.getsockname()[1], Deadlines(header_s=0.5)
            async with gateway("http://127.0.0.1:1", up=0, metrics=listener, deadlines=soon) as client:
                assert await answer_of(at, b"GET /met") == b""  # is closed
                for port in (at, client.gateway.port):
                    status, headers, body = taken_apart(await answer_of(port, request("GET /nothing")))
                    assert status == "HTTP/1.1 404 Not Found" and headers["x-request-id"] == "a new one"
                    assert json.loads(body)["error"]["message"] == "Not Found: GET /nothing"
                answer = await answer_of(at, request("HEAD /metrics"))
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n")

    run(scenario())


def test_a_removal_goes_on_when_the_admin_who_asked_for_it_leaves():
    """The replica was gone from the list, and its streams stayed on it."""

    async def scenario() -> None:
        async with StubReplica(begins) as a, gateway(a.url, admin_key="adm") as client:
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            call = client.request("DELETE", f"/admin/replicas/{a.name}?timeout=1", Authorization="Bearer adm")
            removing = asyncio.create_task(call.__aenter__())
            while (await client.get("/health"))[1]["replicas"]:
                await asyncio.sleep(0.01)
            removing.cancel()
            (said,) = errors(await stream)
            assert "was removed" in said

    run(scenario())
