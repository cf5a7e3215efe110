"""Requests as bytes on a socket: what is expensive or ambiguous is refused, and what follows it is not read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from aiohttp import web
from msgspec.structs import replace
from support.connection import Connection
from support.http_parsing import CHUNKED, POST, REFUSED
from support.serving import CHAT, CONFIG, Running, fake_engine, running_server, served

from phalanx.config import MIB
from phalanx.errors import InvalidRequest
from phalanx.http.connection import HttpConnection
from phalanx.http.connection_table import ConnectionLimits, ConnectionTable, Deadlines
from phalanx.server import server_app
from phalanx.server.requests import intake
from phalanx.server.requests.intake import Intake
from phalanx.supervision.fake_engine import replying

OVERRIDDEN = {"connection_made", "connection_lost", "data_received", "handle_error"}
"""What the connection means to have in aiohttp's place."""
GOOD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
ANSWER = re.compile(rb"HTTP/1\.[01] \d{3}")
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def running(tokenizer) -> Iterator[Running]:
    with running_server(tokenizer, fake_engine(tokenizer, replying([5, 0]))) as running:
        yield running


def answers(running: Running, *pieces: bytes) -> list[bytes]:
    """The first lines of the answers to these bytes, up to the end of the connection."""
    return [answer.split(b"\r\n")[0] for answer in texts(running, *pieces)]


def texts(running: Running, *pieces: bytes) -> list[bytes]:
    found = b""
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=60) as client:
        for piece in pieces:
            with suppress(ConnectionError):  # the server may have closed it already
                client.sendall(piece)
        with suppress(ConnectionError):
            while data := client.recv(1 << 16):
                found += data
    begins = [begin.start() for begin in ANSWER.finditer(found)]
    return [found[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]


@pytest.mark.parametrize("step", [1 << 20, 700])
@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_expensive_or_ambiguous_is_refused_and_what_follows_it_is_not_read(running, data, step):
    sent = data + GOOD
    (answer,) = texts(running, *(sent[at : at + step] for at in range(0, len(sent), step)))
    if data.startswith(CHUNKED):  # its head is right: nothing is at its path, or its body was refused before that
        assert answer.split(b" ")[1] in (b"400", b"404")
    else:
        assert answer.split(b" ")[1] == b"400" and b"The request is not HTTP: " in answer


@pytest.mark.parametrize("data", [data for data in REFUSED.values() if data.startswith(CHUNKED)])
def test_a_body_that_is_read_and_goes_wrong_is_refused(running, data):
    head = POST.replace(b"/v1/none", b"/tokenize") + b"Content-Type: application/json\r\n"
    sent = data.replace(POST, head)
    begin = sent.index(b"\r\n\r\n") + 4
    (answer,) = texts(running, sent[:begin], *(sent[at : at + 700] for at in range(begin, len(sent), 700)))
    assert answer.split(b" ")[1] == b"400"


@pytest.mark.parametrize("n", [3, 100])
def test_requests_before_one_that_is_refused_are_answered(running, n):
    """Of a hundred, aiohttp's parser holds some back until it is called without data."""
    found = answers(running, n * GOOD + REFUSED["CONNECT"] + GOOD)
    assert [line.split(b" ")[1] for line in found] == [b"200"] * n + [b"400"]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_after_an_offer_of_another_protocol_the_connection_goes_on_in_this_one(running, protocol):
    offer = GOOD.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % protocol)
    assert answers(running, offer + LAST) == [b"HTTP/1.1 200 OK"] * 2
    assert answers(running, offer, LAST) == [b"HTTP/1.1 200 OK"] * 2


def test_many_requests_in_one_piece_are_all_answered(running):
    assert answers(running, 100 * GOOD + LAST) == [b"HTTP/1.1 200 OK"] * 101


def test_a_body_in_chunks_is_read_after_the_client_was_told_to_send_it(running):
    body = json.dumps({"prompt": "hello"}).encode()
    head = POST.replace(b"/v1/none", b"/tokenize") + b"Content-Type: application/json\r\nExpect: 100-continue\r\n"
    head += b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"1\r\n%b\r\n" % body[at : at + 1] for at in range(len(body)))
    assert answers(running, head, chunks + b"0\r\n\r\n") == [b"HTTP/1.1 100 Continue", b"HTTP/1.1 200 OK"]


def test_a_stream_of_http_1_0_ends_with_its_connection(running):
    """It has neither a length nor chunks; a client that asked to keep the connection waited for its end for 75 s."""
    body = json.dumps({"prompt": "hello", "stream": True}).encode()
    head = POST.replace(b"/v1/none", b"/v1/completions").replace(b"1.1", b"1.0") + b"Content-Type: application/json\r\n"
    asked = head + b"Connection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    (answer,) = texts(running, asked + LAST)
    assert answer.startswith(b"HTTP/1.0 200 ") and answer.endswith(b"data: [DONE]\n\n")


def test_a_body_that_nobody_reads_leaves_the_connection_open(running):
    refused = POST + b"Content-Length: 5\r\n\r\n12345"
    assert [line.split(b" ")[1] for line in answers(running, 3 * refused + LAST)] == [b"404", b"404", b"404", b"200"]


def test_the_connection_has_no_attribute_of_aiohttps():
    """It uses none of its private ones, and must not take their names."""
    limits = ConnectionTable(ConnectionLimits(1, 1))
    place = limits.admit("a", lambda: None)

    async def main() -> set[str]:
        server = web.Server(lambda request: None)
        return set(vars(HttpConnection(place, limits, Deadlines(), server, is_gateway=False)))

    theirs = {name for kind in HttpConnection.__mro__[1:] for name in dir(kind)}
    own = {name for name in asyncio.run(main()) | set(vars(HttpConnection)) if not name.startswith("__")}
    assert own & theirs == OVERRIDDEN


def test_headers_that_are_not_utf_8_are_keys_that_are_refused(tokenizer):
    with running_server(tokenizer, fake_engine(tokenizer), replace(CONFIG, api_key=("secret",))) as running:
        asked = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-api-key: \xff\xfe\r\n\r\n"
        assert answers(running, asked) == [b"HTTP/1.1 401 Unauthorized"]


# Clients that leave ----------------------------------------------------------------------------------------------


def test_an_end_of_what_a_client_sends_is_a_leaving(tokenizer):
    """As ever: a half-closed connection gets no answer, and its request is cancelled."""

    async def main() -> None:
        engine = fake_engine(tokenizer, manual=True)
        async with asyncio.timeout(60), served(server_app.create_app(CONFIG, engine, tokenizer)) as client:
            source, out = await asyncio.open_connection("127.0.0.1", client.port)
            body = json.dumps(CHAT).encode()
            head = POST.replace(b"/v1/none", b"/v1/chat/completions") + b"Content-Type: application/json\r\n"
            out.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not client.app.journal.unfinished:
                await asyncio.sleep(0)
            out.write_eof()
            assert await source.read() == b""
            while client.app.journal.unfinished:
                await asyncio.sleep(0)
            metrics = (await client.get("/metrics")).text
            assert 'endpoint="/v1/chat/completions",model_name="tiny",status="499"} 1.0' in metrics
            out.close()

    asyncio.run(main())


def test_a_flood_of_hang_ups_frees_no_memory_of_bodies_that_are_still_parsed(tokenizer, monkeypatch):
    """A thread cannot be stopped: a body that it still reads takes its share, whatever became of its client."""
    go_on, made = threading.Event(), []

    class Watched(Intake):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            made.append(self)

    def parse(*_):
        go_on.wait(60)
        raise InvalidRequest("too late")

    monkeypatch.setattr(server_app, "Intake", Watched)
    monkeypatch.setattr(intake, "parse_body", parse)

    async def main() -> None:
        app = server_app.create_app(CONFIG, fake_engine(tokenizer), tokenizer)
        taken = made[0]._bytes._held
        async with asyncio.timeout(60), served(app) as client:
            leaving = [Connection(client, "/v1/completions", {"prompt": "a" * MIB}) for _ in range(3)]
            while taken.total() < 3 * MIB:
                await asyncio.sleep(0)
            for connection in leaving:
                connection.left.set()
                await connection.task
            for _ in range(1000):
                await asyncio.sleep(0)
                assert taken.total() >= 3 * MIB
            go_on.set()
            while taken.total():
                await asyncio.sleep(0.001)

    asyncio.run(main())
