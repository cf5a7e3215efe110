"""The server over TLS, and phalanx's own clients, which accept exactly its certificate."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from support.clock import LIMIT_S, Clock, moved_clock, wait_until
from support.serving import CHAT, CONFIG, Running, fake_engine, running_server

from phalanx.bench.http_client import RequestFailed, first_model, open_client, stream_chat
from phalanx.cluster.host_status import ServerHealth, api_key, health
from phalanx.cluster.probe import ask_health
from phalanx.cluster.supervisor import Spec
from phalanx.errors import ConfigError
from phalanx.http.connection_table import Deadlines
from phalanx.http.listening import base_url, own_address
from phalanx.server.start import serve
from phalanx.supervision.fake_engine import FakeEngine, replying
from phalanx.text.tokenizer import Tokenizer
from phalanx.tls.certificates import make_certificate

HEADER_S = 120.0


def certificate_files(folder: Path, name: str) -> tuple[Path, Path]:
    made = make_certificate(name)
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    certificate.write_text(made.certificate)
    key.write_text(made.key)
    return certificate, key


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return certificate_files(tmp_path_factory.mktemp("tls"), "server")


def over_tls(tokenizer: Tokenizer, files: tuple[Path, Path], deadlines: Deadlines) -> AbstractContextManager[Running]:
    certificate, key = map(str, files)
    config = replace(CONFIG, ssl_certfile=certificate, ssl_keyfile=key, api_key=("one", "two"))
    return running_server(tokenizer, fake_engine(tokenizer, replying([5, 5, 0])), config, deadlines=deadlines)


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with moved_clock() as clock:
        yield clock


@pytest.fixture(scope="module")
def running(tokenizer, files, clock) -> Iterator[Running]:
    with over_tls(tokenizer, files, Deadlines(header_s=HEADER_S)) as running:
        yield running


def test_the_address_says_https(running):
    assert running.base_url.startswith("https://127.0.0.1:")
    assert base_url("::", 1, tls=True) == f"https://{own_address()}:1/v1"


def test_streams(running, files):
    async def main():
        async with open_client(running.base_url, "one", files[0]) as client:
            assert await first_model(client) == "tiny"
            return await stream_chat(client, CHAT)

    exchange = asyncio.run(main())
    assert (exchange.completion_tokens, exchange.finish_reason) == (3, "stop")


def test_another_certificate_and_none_are_refused(running, tmp_path):
    other, _ = certificate_files(tmp_path, "server")

    async def ask(certificate):
        async with open_client(running.base_url, "one", certificate) as client:
            await first_model(client)

    for certificate in (other, None):
        with pytest.raises(RequestFailed, match="certificate verify failed"):
            asyncio.run(ask(certificate))
    assert ask_health("127.0.0.1", running.server.port, certificate=other) == {}
    with pytest.raises(ConfigError, match="not a certificate"):
        open_client(running.base_url, None, Path(__file__))


def test_status_asks_with_certificate_and_key(running, files):
    words = ["serve", "demo", "--host", "0.0.0.0", "--port", str(running.server.port), "--ssl-certfile", str(files[0])]

    def spec(*more: str, **variables: str) -> Spec:
        return Spec(role="server", command=[*words, *more], variables=variables, log="log")

    server = psutil.Process()
    for asked in (spec(PHALANX_API_KEY="one two"), spec()):
        said = health(asked, server)
        assert (said.ok, said.phase) == (True, "ok")
    running.call(lambda: running.engine.crash("rank 1 was ended by SIGKILL"))
    assert health(spec(PHALANX_API_KEY="one two"), server).reason == "rank 1 was ended by SIGKILL"
    assert health(spec(), server) == ServerHealth(ok=False, phase="unavailable")
    running.call(running.engine.recover)
    assert ask_health("127.0.0.1", running.server.port, certificate=files[0]) == {"status": "ok"}
    assert "restarts" in ask_health("127.0.0.1", running.server.port, key="two", certificate=files[0])


def test_what_took_the_servers_port_gets_no_key():
    """Of another user, for instance, while the server is down or about to start."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.create_server(("127.0.0.1", 0)) as thief:
        thief.settimeout(0.0)
        port = str(thief.getsockname()[1])
        asked = Spec(
            role="server", command=["serve", "--port", port], variables={"PHALANX_API_KEY": "secret"}, log="log"
        )
        for server in (None, psutil.Process(other.pid)):
            assert health(asked, server).phase == "starting"
            with pytest.raises(BlockingIOError):
                thief.accept()
    other.communicate()


def test_the_key_of_a_supervised_server(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst\nsecond\n")

    def spec(*more: str, **variables: str) -> Spec:
        return Spec(role="server", command=["serve", *more], variables=variables, log="log")

    assert api_key(spec("--api-key-file", str(file))) == "first"
    assert api_key(spec("--api-key-file", str(file), PHALANX_API_KEY="variable")) == "first"
    assert api_key(spec(PHALANX_API_KEY="variable more")) == "variable"
    assert api_key(spec()) is None


def test_a_handshake_that_does_not_go_on_is_closed(tokenizer, files):
    """Before the handshake there is no protocol yet that could count the connection."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    with over_tls(tokenizer, files, Deadlines(header_s=0.5)) as strict:
        for piece in (b"", hello):
            with socket.create_connection(("127.0.0.1", strict.server.port), timeout=LIMIT_S) as client:
                client.sendall(piece)
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""
        wait_until(lambda: strict.call(lambda: strict.server.service.table.held) == 0)


@contextmanager
def connected(running: Running, certificate: Path) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=LIMIT_S) as raw:
        with context.wrap_socket(raw) as client:
            wait_until(lambda: running.call(lambda: running.server.service.acceptors[0]._open))
            yield client


def test_a_tls_connection_without_a_request_is_closed(running, files, clock):
    with connected(running, files[0]) as client:
        clock.move(HEADER_S + 1.0)
        with suppress(OSError):
            assert client.recv(1) == b""


def test_after_a_tls_connection_that_was_closed_twice_others_are_still_judged(running, files, clock):
    """asyncio's transport then knows no more what is unsent; the error ended the acceptor's looks for good."""

    def close() -> None:
        for connection in running.server.service.acceptors[0]._open:
            connection.transport.close()
            connection.transport.close()

    with connected(running, files[0]):
        running.call(close)
        clock.move(0.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda certificate, key, other: {"ssl_keyfile": key}, "--ssl-keyfile without"),
        (lambda certificate, key, other: {"ssl_certfile": certificate}, "--ssl-certfile"),
        (lambda certificate, key, other: {"ssl_certfile": certificate, "ssl_keyfile": other}, "--ssl-keyfile"),
        (lambda certificate, key, other: {"ssl_certfile": "absent.pem"}, "absent.pem"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(files, tmp_path, given, named):
    _, other = certificate_files(tmp_path, "other")
    config = replace(CONFIG, **given(str(files[0]), str(files[1]), str(other)))
    with pytest.raises(ConfigError, match=named):
        serve(config, FakeEngine(), lambda: None)
