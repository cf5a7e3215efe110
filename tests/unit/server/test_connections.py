"""Limits and deadlines of connections: the table by itself, and attacks on a real server with short deadlines."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from msgspec.structs import replace
from support.clock import LIMIT_S, Clock, moved_clock, wait_until
from support.serving import CHAT, CONFIG, Running, fake_engine, running_server

from phalanx.http.acceptor import Acceptor
from phalanx.http.connection import HttpConnection
from phalanx.http.connection_table import (
    RESERVE,
    ConnectionLimits,
    ConnectionSlot,
    ConnectionTable,
    Deadlines,
    TransferProgress,
    group_of,
)
from phalanx.supervision.fake_engine import replying

SHORT = Deadlines(header_s=1.0, body_s=0.5, read_s=0.5, progress_bytes=4096)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


# The table -------------------------------------------------------------------------------------------------------


class Book:
    """A table, and which of its connections were closed."""

    def __init__(self, total: int, per_address: int) -> None:
        self.table = ConnectionTable(ConnectionLimits(total, per_address))
        self.closed: list[str] = []

    def admit(self, name: str, address: str = "10.0.0.1", *, busy: bool = False) -> ConnectionSlot | None:
        slot = self.table.admit(address, lambda: self.closed.append(name))
        if slot is not None and busy:
            self.table.mark_busy(slot)
        return slot


def test_at_the_limit_a_new_connection_displaces_the_one_that_has_waited_longest():
    book = Book(3, 3)
    first, *_ = [book.admit(name) for name in "abc"]
    book.table.mark_busy(first)
    book.table.mark_idle(first)  # it waits again: now it is the one that has waited least
    book.admit("d")
    book.admit("e")
    book.admit("f")
    assert book.closed == ["b", "c", "a"]
    assert (book.table.held, book.table.displaced, book.table.refused) == (3, 3, 0)


def test_busy_connections_are_not_displaced_and_the_reserve_is_beyond_the_limit():
    book = Book(2, 2)
    for name in "ab":
        book.admit(name, busy=True)
    reserve = [book.admit(f"r{i}") for i in range(RESERVE)]
    assert all(slot is not None and slot.reserved for slot in reserve)
    assert book.admit("one more").reserved and book.closed == ["r0"]  # it waited for a request, the longest of all
    for slot in reserve:
        if "r0" not in book.closed or slot is not reserve[0]:
            book.table.mark_busy(slot)
    book.admit("last waits")
    assert book.admit("takes its place", busy=True).reserved
    assert book.admit("no slot at all") is None
    assert (book.table.refused, book.table.held) == (1, 2)


def test_one_address_takes_from_itself_before_it_takes_from_others():
    book = Book(6, 4)
    for i in range(4):
        book.admit(f"flood {i}", "10.0.0.9")
    book.admit("honest", "10.0.0.1")
    book.admit("flood 4", "10.0.0.9")  # at its own limit
    assert book.closed == ["flood 0"]
    book.admit("other", "10.0.0.2")
    book.admit("newcomer", "10.0.0.3")  # at the limit of all: the address with most connections gives way
    assert book.closed == ["flood 0", "flood 1"]


def test_a_host_is_not_counted_with_a_stranger_of_its_network():
    """Ranks and agents meet in one network, whose hosts may all have addresses of one /64 network."""
    book = Book(4, 4)
    book.admit("host", "fd00::1")
    for i in range(8):
        book.admit(f"stranger {i}", "fd00::2")
    assert book.closed == [f"stranger {i}" for i in range(5)]


def test_a_slot_is_given_back_once():
    book = Book(2, 2)
    slot, other = book.admit("a"), book.admit("b")
    for _ in range(3):
        book.table.remove(slot)
    assert book.table.held == 1
    book.table.remove(other)
    assert book.table.held == 0
    assert book.admit("c") and book.admit("d") and not book.closed


def test_a_slot_that_made_way_before_its_connection_was_made_is_given_back_once():
    """Else an address with one slot had two at a time."""
    book = Book(1, 1)
    slot = book.admit("a")
    assert book.admit("b") and book.closed == ["a"]
    slot.close = lambda: None  # by the connection, which is made all the same
    book.table.remove(slot)
    assert book.table.held == 1


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_counts_as_one_address(address, group):
    assert group_of(address) == group


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_clients_whole_network_counts_as_one_address():
    counted: list[str] = []

    class Full(ConnectionTable):
        def admit(self, address: str, close: Callable[[], None]) -> None:
            counted.append(address)

    async def connect() -> None:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            listener.setblocking(False)
            acceptor = Acceptor(listener, Full(ConnectionLimits(1, 1)), lambda slot: None, deadlines=Deadlines())
            acceptor.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            assert await reader.read() == b""  # it was closed, so it was counted
            writer.close()
            await acceptor.stop()

    asyncio.run(connect())
    assert counted == ["::/64"]


def test_progress_is_judged_by_bytes_and_not_by_single_ones():
    progress = TransferProgress(10.0, 100)
    assert not progress.is_stalled(0, 0.0)
    assert not progress.is_stalled(99, 10.0)
    assert progress.is_stalled(99, 10.1)
    assert not progress.is_stalled(100, 10.2)
    assert not progress.is_stalled(150, 20.2)
    progress.reset()
    assert not progress.is_stalled(150, 100.0)


# A real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with moved_clock() as clock:
        yield clock


@pytest.fixture(scope="module")
def strict(tokenizer, clock) -> Iterator[Running]:
    config = replace(CONFIG, max_connections=24, max_connections_per_address=20)
    engine = fake_engine(tokenizer, replying([5]), info={"max_model_len": 100_000})
    with running_server(tokenizer, engine, config, deadlines=SHORT) as running:
        yield running


@pytest.fixture
def attacked(strict, clock) -> Iterator[Running]:
    """A server without connections."""
    yield strict
    while held(strict):
        clock.move(1.0)


def held(running: Running) -> int:
    return running.call(lambda: running.server.service.table.held)


def connections(running: Running) -> list[HttpConnection]:
    """On the server's event loop."""
    return list(running.server.service.acceptors[0]._open)


@contextmanager
def connected(running: Running, *pieces: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=LIMIT_S) as client:
        for piece in pieces:
            client.sendall(piece)
        yield client


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection; a reset is an end as well."""
    found = b""
    with suppress(ConnectionResetError):
        while data := client.recv(1 << 16):
            found += data
    return found


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1 << 16))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"G"],
        [POST],
        [POST + b"Content-Length: 500000\r\n\r\n"],
        [POST + b"Content-Length: 500000\r\n\r\n{"],
        [POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"],
        [b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /ver"],
        [b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET /ver"],
    ],
    ids=["nothing", "one byte", "half a header", "no body", "half a body", "half a chunked body", "half a pipelined",
         "half a second header"],
)  # fmt: skip
def test_what_does_not_go_on_is_closed(attacked, clock, pieces):
    with connected(attacked, *pieces) as client:
        while is_open(client):
            clock.move(0.1)


@pytest.mark.parametrize(
    ("begin", "drop"), [(POST, b"X: y\r\n"), (POST + b"Content-Length: 500000\r\n\r\n", b" ")], ids=["header", "body"]
)
def test_what_comes_in_drops_is_closed(attacked, clock, begin, drop):
    with connected(attacked, begin) as client, pytest.raises(OSError):
        for _ in range(600):
            client.sendall(drop)
            clock.move(0.05)


def test_a_slow_but_honest_upload_is_answered(attacked, clock):
    """Between two pieces nearly all of the time passes that a piece may take."""
    text = json.dumps({**CHAT, "max_tokens": 1}).encode() + b" " * 100_000
    header = POST + f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()

    def received() -> int:
        return attacked.call(lambda: max((one._received for one in connections(attacked)), default=0))

    with connected(attacked, header) as client:
        for begin in range(0, len(text), SHORT.progress_bytes):
            piece = text[begin : begin + SHORT.progress_bytes]
            client.sendall(piece)
            if len(piece) == SHORT.progress_bytes:  # else the request is whole
                wait_until(lambda wanted=len(header) + begin + len(piece): received() >= wanted)
                clock.move(0.0)
                clock.move(0.9 * SHORT.body_s)
        answer = read_to_end(client)
    assert answer.split(b"\r\n")[0] == b"HTTP/1.1 200 OK", answer


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_not_read_frees_its_connection(attacked, clock, stream):
    body = json.dumps({"prompt": "x", "max_tokens": 1500, "stream": stream, "logprobs": 5}).encode()
    header = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    client = socket.socket()
    for end, option in ((client, socket.SO_RCVBUF), (attacked.server._listeners[0], socket.SO_SNDBUF)):
        end.setsockopt(socket.SOL_SOCKET, option, 4096)  # else the kernel reads megabytes in the client's place
    client.settimeout(LIMIT_S)
    with client:
        client.connect(("127.0.0.1", attacked.server.port))
        client.sendall(header + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: held(attacked) > 0)
        while held(attacked):
            clock.move(0.1)


def test_a_busy_server_answers_health_and_503(attacked):
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(attacked, POST + b"Content-Length: 500000\r\n\r\n" + b" " * 5000))
        wait_until(lambda: held(attacked) == 20 and not attacked.call(lambda: attacked.server.service.table._idle))
        with httpx.Client(base_url=attacked.origin, timeout=LIMIT_S) as client:
            assert client.get("/health").status_code == 200
            refused = client.get("/v1/models")
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "connections" in refused.json()["error"]["message"]


def test_bodies_of_requests_that_were_answered_make_way(attacked):
    """A refusal does not wait for the body; the client that goes on sending it must not hold a place."""
    piece = b"POST /nope HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000000\r\n\r\n" + b" " * 5000
    with ExitStack() as stack, httpx.Client(base_url=attacked.origin, timeout=LIMIT_S) as client:
        for _ in range(20):
            refused = stack.enter_context(connected(attacked, piece))
            assert b" 404 " in refused.recv(1000)
        assert client.get("/v1/models").status_code == 200


def test_strangers_who_do_not_read_make_way(attacked):
    """The page that needs no key, asked for again and again and never read, kept everybody else out."""
    asks = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50
    attacked.server._listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ExitStack() as stack, httpx.Client(base_url=attacked.origin, timeout=LIMIT_S) as client:
        for _ in range(20):
            stack.enter_context(connected(attacked, asks))
        wait_until(lambda: held(attacked) == 20)
        for connection in attacked.call(lambda: connections(attacked)):
            wait_until(lambda connection=connection: connection._n_begun or connection.is_lost)
        assert client.get("/v1/models").status_code == 200


def test_a_body_that_is_malformed_from_its_first_byte_is_refused_once_and_without_a_traceback(attacked, caplog):
    with connected(attacked, POST.replace(b"chat", b"none") + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n") as client:
        assert read_to_end(client).count(b"HTTP/1.1 400") == 1
    attacked.call(lambda: None)
    assert not [record for record in caplog.records if record.exc_info]


def test_of_idle_connections_those_go_first_that_were_answered_longest_ago(attacked):
    def ask(client: socket.socket) -> None:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            piece = client.recv(1000)
            assert piece
            answer += piece

    with ExitStack() as stack:
        clients = []
        for _ in range(20):
            clients.append(stack.enter_context(connected(attacked)))
            ask(clients[-1])
        ask(first := clients[0])
        for _ in range(10):
            stack.enter_context(connected(attacked, b"G"))
        ask(first)


def test_idle_connections_make_way(attacked):
    with ExitStack() as stack, httpx.Client(base_url=attacked.origin, timeout=LIMIT_S) as client:
        for _ in range(60):
            stack.enter_context(connected(attacked))
        assert client.get("/v1/models").status_code == 200
        assert held(attacked) <= 20


def test_accept_errors_back_off_and_are_said_once(attacked, monkeypatch, caplog):
    failures = 0

    async def fail(self, listener):
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(self, listener)

    kind = type(attacked.server._loop)
    accept = kind.sock_accept
    monkeypatch.setattr("phalanx.http.acceptor.LOG_INTERVAL_S", 0.0)
    with caplog.at_level(logging.WARNING, logger="phalanx.http.acceptor"):
        monkeypatch.setattr(kind, "sock_accept", fail)
        with connected(attacked):  # the accept under way when the method was replaced takes this one
            assert httpx.get(f"{attacked.origin}/health", timeout=LIMIT_S).status_code == 200
        wait_until(lambda: "accept() failed" in caplog.text)
    assert failures >= 3
    assert sum("accept() failed" in record.getMessage() for record in caplog.records) <= 2
