"""The streaming client against a real HTTP server: text, counts, errors."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path
from typing import Any

import pytest
from support.web import chunk, events, raw_server, usage, web_server

from phalanx.bench import http_client
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
        text="ab", finish_reason="stop", prompt_tokens=1, completion_tokens=5, sent=0.5, arrivals=(1.0, 2.0), ended=3.0
    )
    assert exchange.tpot_s == 0.5  # to the stream's end, since the last tokens may have no text
    assert (exchange.ttft_s, exchange.e2el_s) == (0.5, 2.5)
    assert exchange.tokens_per_s == 2.0


def test_the_speed_is_the_servers_own_if_it_sent_timing() -> None:
    exchange = TimedExchange(
        text="ab", finish_reason="stop", prompt_tokens=1, completion_tokens=9, sent=0.0, arrivals=(1.0, 1.1),
        ended=1.1, timing={"tpot": 0.25},
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


async def first_of(url: str) -> str:
    async with open_client(url) as client:
        return await first_model(client)


def test_first_model() -> None:
    run = first_of
    with web_server(lambda path, body: (200, '{"data": [{"id": "a"}, {"id": "b"}]}')) as url:
        assert asyncio.run(run(url)) == "a"
    with web_server(lambda path, body: (200, '{"data": []}')) as url, pytest.raises(RequestFailed, match="no model"):
        asyncio.run(run(url))


# A server that is none, or means harm --------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
ERROR = b"HTTP/1.1 500 No\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "body",
    ["<html>", "", "[]", "3", "null", "[" * 100_000, '{"data": "abc"}', '{"data": {"a": 1}}', '{"data": [{}]}',
     '{"data": ["x"]}', '{"data": [{"id": 3}]}', '{"data": [{"id": ""}]}', '{"data": [{"id": "' + "x" * 513 + '"}]}',
     r'{"data": [{"id": "\ud800"}]}', '{"data": [{"id": "m", "max_model_len": "9; rm"}]}',
     '{"data": [{"id": "m", "max_model_len": -1}]}', '{"data": [{"id": "m", "max_model_len": 1e400}]}'],
    ids=range(17),
)  # fmt: skip
def test_what_is_no_list_of_models_is_an_error_that_names_the_address(body: str) -> None:
    with (
        web_server(lambda path, asked: (200, body)) as url,
        pytest.raises(RequestFailed, match=f"{url}/models is not a list of models: .") as caught,
    ):
        asyncio.run(first_of(url))
    assert len(str(caught.value)) < 500 and caught.value.remedy


@pytest.mark.parametrize("name", [r"a\u001b[2J", r"a\nerror: forged", r"a\tb", r"\u202eevil", r"a\u0000"])
def test_a_models_name_commands_no_terminal(name: str) -> None:
    with (
        web_server(lambda path, asked: (200, f'{{"data": [{{"id": "good"}}, {{"id": "{name}"}}]}}')) as url,
        pytest.raises(RequestFailed, match="control characters in its name") as caught,
    ):
        asyncio.run(first_of(url))
    assert caught.value.message.isprintable()


def test_a_list_of_models_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LIST_S", 0.2)
    with raw_server(silent=True) as url, pytest.raises(RequestFailed, match=f"{url}/models did not answer"):
        asyncio.run(first_of(url))
    with (
        raw_server(endless=b"HTTP/1.1 103 Early Hints\r\n\r\n") as url,
        pytest.raises(RequestFailed, match=f"{url}/models did not answer"),
    ):
        asyncio.run(first_of(url))


BOMB = gzip.compress(bytes(1 << 24))


def test_nothing_is_read_without_end() -> None:
    with raw_server(OK, b"\r\n", endless=b" " * 4096) as url, pytest.raises(RequestFailed, match="answers more than"):
        asyncio.run(first_of(url))
    with (
        raw_server(ERROR, b"\r\n", endless=b"no " * 4096) as url,
        pytest.raises(RequestFailed, match="answered 500: no"),
    ):
        asyncio.run(first_of(url))
    for status in (OK, ERROR):
        with (
            raw_server(status, b"Content-Encoding: gzip\r\n\r\n", BOMB) as url,
            pytest.raises(RequestFailed, match="in the encoding 'gzip', which was not asked for"),
        ):
            asyncio.run(first_of(url))


async def stream_from(url: str) -> TimedExchange:
    async with open_client(url) as client:
        return await stream_chat(client, BODY)


@pytest.mark.parametrize(("limit", "what"), [("MAX_EVENT", "an event"), ("MAX_STREAM", "an answer")])
def test_no_stream_is_kept_without_end(limit: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, limit, 1 << 20)
    endless = b"x" * 4096 if limit == "MAX_EVENT" else events(chunk("x"), done=False).encode()
    with (
        raw_server(OK, b"\r\ndata: ", endless=endless) if limit == "MAX_EVENT"
        else raw_server(OK, b"\r\n", endless=endless) as url,
        pytest.raises(RequestFailed, match=f"sends {what} of more than 1 MiB"),
    ):  # fmt: skip
        asyncio.run(stream_from(url))


@pytest.mark.parametrize(
    "event",
    ["{nope", "3", "[]", "[" * 100_000, '{"choices": 3}', '{"choices": [3]}', '{"choices": [{"delta": 3}]}',
     '{"choices": [{"delta": {"content": 3}}]}', '{"choices": [{"delta": {"content": [{"text": "x"}]}}]}',
     '{"choices": [{"delta": {"reasoning": {}}}]}', '{"choices": [{"delta": {"tool_calls": [3]}}]}',
     '{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": {}}}]}}]}', '{"usage": 3}',
     r'{"usage": {"completion_tokens": "\u001b[2J"}}', '{"usage": {"completion_tokens": -1}}', '{"timing": [1]}',
     '{"timing": {"tpot": "x"}}', r'{"choices": [{"delta": {"content": "\ud800"}}]}'],
    ids=range(18),
)  # fmt: skip
def test_an_event_of_another_form_fails_the_request(event: str) -> None:
    with pytest.raises(RequestFailed, match=r"/chat/completions sent an event that is not OpenAI's: ."):
        ask(200, f"data: {event}\n\ndata: [DONE]\n\n")


def test_an_error_of_null_is_none() -> None:
    assert ask(200, events({"error": None, **chunk("x", "stop")})).text == "x"


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_lines_end_as_in_server_sent_events(end: str) -> None:
    assert ask(200, events(chunk("a"), chunk("b", "stop")).replace("\n", end)).text == "ab"
