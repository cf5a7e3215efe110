"""What every answer has, whatever was asked: request ids, error codes that typed clients take, HEAD, slashes."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, EOS, TEMPLATE, fake_engine, running_server, served, serving

from phalanx.errors import EngineUnavailable, PhalanxError, QueueFull
from phalanx.http.connection_table import ConnectionLimits
from phalanx.http.error_responses import error_body, headers_of, public_failure
from phalanx.server.server_app import create_app
from phalanx.supervision.fake_engine import replying

URL = "/v1/chat/completions"
KEYED = replace(CONFIG, api_key=("secret",), queue=0, engine=replace(CONFIG.engine, max_num_seqs=1))


def run(tokenizer, scenario, *, config=CONFIG):
    async def main():
        fake = fake_engine(tokenizer, replying([*tokenizer.encode("hello"), *tokenizer.eos_ids]))
        async with asyncio.timeout(60), serving(tokenizer, fake, config) as client:
            await scenario(client, fake)

    asyncio.run(main())


async def answers(client):
    """One answer of each kind: (what it is, the response)."""
    key = {"Authorization": "Bearer secret"}
    yield "answer", await client.post(URL, json=CHAT, headers=key)
    yield "stream", await client.post(URL, json={**CHAT, "stream": True}, headers=key)
    yield "health", await client.get("/health")
    yield "bad field", await client.post(URL, json={**CHAT, "temperature": -1}, headers=key)
    yield "bad body", await client.post(URL, content=b"{", headers={**key, "Content-Type": "application/json"})
    yield "no key", await client.post(URL, json=CHAT)
    yield "foreign host", await client.get("/health", headers={"Host": "evil.example"})
    yield "unknown model", await client.post(URL, json={**CHAT, "model": "gpt-4"}, headers=key)
    yield "unknown path", await client.get("/v2/models")
    yield "wrong method", await client.get(URL)
    yield "no JSON", await client.post(URL, content=b"{}", headers={**key, "Content-Type": "text/plain"})


STATUSES = {
    "answer": 200,
    "stream": 200,
    "health": 200,
    "bad field": 400,
    "bad body": 400,
    "no key": 401,
    "foreign host": 403,
    "unknown model": 404,
    "unknown path": 404,
    "wrong method": 405,
    "no JSON": 415,
}


def test_every_answer_has_a_request_id_and_every_error_a_code_that_is_a_string_or_null(tokenizer):
    async def scenario(client, engine):
        seen = {}
        ids = set()
        async for name, response in answers(client):
            seen[name] = response.status_code
            ids.add(response.headers["x-request-id"])
            if response.status_code >= 400:
                assert isinstance(response.json()["error"]["code"], str | None), name
        assert seen == STATUSES
        assert len(ids) == len(STATUSES)
        text = (await client.get("/metrics", headers={"x-api-key": "secret"})).text
        for endpoint, status, n in (
            (URL, 200, 2),
            (URL, 400, 2),
            (URL, 401, 1),
            ("/health", 200, 1),
            ("unknown", 403, 1),
            ("unknown", 404, 1),
        ):
            labels = f'endpoint="{endpoint}",model_name="tiny",status="{status}"'
            assert f"phalanx:http_requests_total{{{labels}}} {n}.0" in text

    run(tokenizer, scenario, config=KEYED)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full", retry_after=1.0), "rate_limit_exceeded"),
        (EngineUnavailable("down", retry_after=1.0), None),
        (PhalanxError("a bug"), None),
    ],
)
def test_errors_of_a_server_in_trouble_have_no_numbers_as_codes(error, code):
    assert error_body(public_failure(error), "/v1/models")["error"]["code"] == code


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/api/chat"])
def test_the_answer_of_a_full_server_is_that_of_the_common_table(tokenizer, path):
    async def main():
        app = create_app(CONFIG, fake_engine(tokenizer), tokenizer)
        async with asyncio.timeout(60), served(app, limits=ConnectionLimits(1, 1)) as client:
            _, out = await asyncio.open_connection("127.0.0.1", client.port)
            head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            out.write(head.encode() + b"Content-Length: 9\r\n\r\n")  # its key is accepted: it makes way for no other
            while (response := await client.get(path)).headers.get("connection") != "close":
                pass
            assert (await client.get("/health")).status_code == 200
            out.close()
            return response

    response = asyncio.run(main())
    error = EngineUnavailable("The server has as many connections as it may have (--max-connections).")
    assert response.status_code == 503 and response.json() == error_body(public_failure(error), path)
    wanted = {name.lower(): value for name, value in headers_of(error).items()}
    assert wanted.items() <= dict(response.headers).items()
    assert "x-request-id" in response.headers and (path != "/v1/models" or b'"code":null' in response.content)


@pytest.mark.parametrize(
    ("given", "repeated"),
    [
        ("abc-123", True),
        ("req_1.2:3/4@5=6+7", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("two words", False),
        ('"quoted"', False),
        ("<script>", False),
        ("", False),
    ],
)
def test_a_clients_own_request_id_is_repeated_if_it_is_sane(tokenizer, given, repeated):
    async def scenario(client, engine):
        response = await client.get("/version", headers={"X-Request-Id": given})
        answered = response.headers["x-request-id"]
        assert (answered == given) is repeated
        assert repeated or answered.startswith("req_")

    run(tokenizer, scenario)


def test_an_error_that_nothing_handles_names_its_request(tokenizer, monkeypatch, caplog):
    async def scenario(client, engine):
        def bug(*_):
            raise RuntimeError("a bug")

        monkeypatch.setattr(tokenizer, "describe", bug)
        response = await client.get("/tokenizer_info", headers={"X-Request-Id": "mine"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "mine"
        error = response.json()["error"]
        assert "mine" in error["message"] and error["code"] is None
        assert "mine" in caplog.text

    run(tokenizer, scenario)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_head_is_get_without_a_body(tokenizer, path):
    async def scenario(client, engine):
        got, headed = await client.get(path), await client.head(path)
        assert (headed.status_code, headed.content) == (got.status_code, b"") == (200, b"")
        assert headed.headers["content-type"] == got.headers["content-type"]

    run(tokenizer, scenario)


def test_head_of_what_only_takes_posts(tokenizer):
    async def scenario(client, engine):
        assert (await client.head(URL)).status_code == 405
        assert (await client.head("/nope")).status_code == 404

    run(tokenizer, scenario)


def test_a_slash_at_the_end_of_a_path_changes_nothing(tokenizer):
    """Without a redirect: many clients drop the body, or the key, when they follow one."""

    async def scenario(client, engine):
        assert (await client.post(f"{URL}/", json=CHAT)).status_code == 200
        assert (await client.post("/v1/completions//", json={"prompt": "the"})).status_code == 200
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
        assert (await client.get("/nope/")).status_code == 404

    run(tokenizer, scenario)


def test_tokenizer_info_has_the_special_tokens_and_the_template_and_needs_the_key(tokenizer):
    async def scenario(client, engine):
        assert (await client.get("/tokenizer_info")).status_code == 401
        info = (await client.get("/tokenizer_info", headers={"x-api-key": "secret"})).json()
        assert info == {
            "bos_token": None,
            "eos_token": EOS,
            "pad_token": None,
            "unk_token": None,
            "chat_template": TEMPLATE,
        }

    run(tokenizer, scenario, config=KEYED)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_an_offer_of_another_protocol_is_answered_in_this_one_and_not_logged(tokenizer, caplog, protocol):
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: " + protocol
    with running_server(tokenizer, fake_engine(tokenizer)) as running:
        with socket.create_connection(("127.0.0.1", running.server.port), timeout=60) as connection:
            connection.sendall(request + b"\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"version"' in answer
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
