"""The streaming client against a real HTTP server: text, counts, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.web import chunk, events, usage, web_server

from phalanx.bench.http_client import RequestFailed, TimedExchange, first_model, open_client, stream_chat
from phalanx.errors import ConfigError

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def ask(status: int, answer: str, said: list[str] | None = None) -> TimedExchange:
    async def run(url: str) -> TimedExchange:
        async with open_client(url) as client:
            return await stream_chat(client, BODY, on_text=None if said is None else said.append)

    with web_server(lambda path, body: (status, answer)) as url:
        return asyncio.run(run(url))


def test_text_counts_and_times() -> None:
    said: list[str] = []
    exchange = ask(
        200, ": keep-alive\n\n" + events(chunk(""), chunk("Hel"), chunk("lo"), chunk(finish="stop"), usage(3, 4)), said
    )
    assert said == ["Hel", "lo"]
    assert (exchange.text, exchange.finish_reason) == ("Hello", "stop")
    assert (exchange.prompt_tokens, exchange.completion_tokens) == (3, 4)
    assert len(exchange.arrivals) == 2
    assert exchange.ttft_s is not None
    assert 0 < exchange.ttft_s <= exchange.arrivals[-1] - exchange.sent


def test_the_request_asks_for_a_stream_with_usage() -> None:
    seen: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, str]:
        seen.append((path, body))
        return 200, events(chunk("x", "stop"))

    async def run(url: str) -> None:
        async with open_client(url) as client:
            await stream_chat(client, BODY)

    with web_server(answer) as url:
        asyncio.run(run(url))
    assert seen == [("/v1/chat/completions", {**BODY, "stream": True, "stream_options": {"include_usage": True}})]


def test_an_answer_without_text_has_no_times() -> None:
    exchange = ask(200, events(chunk(finish="stop"), usage(3, 1)))
    assert (exchange.ttft_s, exchange.tpot_s, exchange.tokens_per_s) == (None, None, None)


def test_tokens_are_counted_by_usage_and_not_by_chunks() -> None:
    exchange = TimedExchange(
        text="ab", finish_reason="stop", prompt_tokens=1, completion_tokens=5, sent=0.0, arrivals=(1.0, 3.0)
    )
    assert exchange.tpot_s == 0.5
    assert exchange.tokens_per_s == 2.0


def test_the_speed_is_the_servers_own_if_it_sent_timing() -> None:
    exchange = TimedExchange(
        text="ab", finish_reason="stop", prompt_tokens=1, completion_tokens=9, sent=0.0, arrivals=(1.0, 1.1),
        timing={"tpot": 0.25},
    )  # fmt: skip
    assert exchange.tokens_per_s == 4.0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"error": {"message": "no room", "type": "x"}}', "answered 429: no room"),
        ('{"error": "no room"}', "answered 429: no room"),
        ("no room", "answered 429: no room"),
    ],
)
def test_a_refusal_carries_status_and_message(answer: str, said: str) -> None:
    with pytest.raises(RequestFailed, match=said) as caught:
        ask(429, answer)
    assert caught.value.status == 429


def test_a_refused_key_says_where_to_give_one() -> None:
    with pytest.raises(RequestFailed, match="answered 401") as caught:
        ask(401, '{"error": {"message": "no key"}}')
    assert "--api-key" in caught.value.remedy


def test_an_error_event_fails_the_request() -> None:
    with pytest.raises(RequestFailed, match="engine gone"):
        ask(200, events(chunk("a"), {"error": {"message": "engine gone"}}))


def test_a_stream_without_done_is_broken() -> None:
    with pytest.raises(RequestFailed, match="broke off"):
        ask(200, events(chunk("a"), done=False))


def test_no_server_is_named() -> None:
    async def run(url: str) -> None:
        async with open_client(url) as client:
            await first_model(client)

    with web_server(lambda path, body: (200, "{}")) as url:
        pass
    with pytest.raises(RequestFailed, match=url):
        asyncio.run(run(url))


def test_https_of_a_server_without_it_says_so() -> None:
    async def run(url: str) -> None:
        async with open_client(url.replace("http://", "https://")) as client:
            await first_model(client)

    with (
        web_server(lambda path, body: (200, "{}")) as url,
        pytest.raises(RequestFailed, match=r"No answer from https.*[^.]\.$") as caught,
    ):
        asyncio.run(run(url))
    assert "try http://" in caught.value.remedy


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(ConfigError, match=r"key\.pem is not a certificate \(PEM\): no certificate is in it\. Give"):
        open_client("https://127.0.0.1:1", certificate=file)


def test_first_model() -> None:
    async def run(url: str) -> str:
        async with open_client(url) as client:
            return await first_model(client)

    with web_server(lambda path, body: (200, '{"data": [{"id": "a"}, {"id": "b"}]}')) as url:
        assert asyncio.run(run(url)) == "a"
    with web_server(lambda path, body: (200, '{"data": []}')) as url, pytest.raises(RequestFailed, match="no model"):
        asyncio.run(run(url))
