"""Attacks on a real agent, from machines that reach its port, or that stand between it and the server.

The cluster has three hosts; the agent is that of the last. An attack has succeeded if the agent starts anything for the
attacker, if the server takes the attacker for a host, or if the server cannot use its agent meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from phalanx.config import HostConfig
from phalanx.dist.ports import free_ports
from phalanx.errors import ExitCode, HostUnreachable
from phalanx.supervision.agent_protocol import AgentConnection, FromAgent, RunRank
from phalanx.supervision.remote import ReachedAgent, reach
from phalanx.supervision.tls_listener import MAX_CANDIDATES
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import Credentials, connecting, write_credentials

FIRST, SECOND, THIRD = make_credentials(["a", "b", "c"])
OTHER_FIRST, _, OTHER_THIRD = make_credentials(["a", "b", "c"])
KNOWING = Credentials(key=OTHER_FIRST.key, place=0, certificates=(OTHER_FIRST.certificates[0], *FIRST.certificates[1:]))
"""Of another cluster, but knows the certificates of this one."""
LOOPBACK = "127.0.0.1"
STRANGER = "127.0.0.2"
FLOOD = 1000
PATIENT = """
from phalanx.cli.main import run
from phalanx.supervision import rank_agent, tls_listener
rank_agent.HEARTBEAT_TIMEOUT_S = tls_listener.HANDSHAKE_S = 120.0
run()
"""  # `phalanx`, but for limits that a busy machine may miss


class Victim:
    """An agent in a process of its own."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.log = folder / "log"
        self.directory = folder / "agent"
        credentials = folder / "credentials.json"
        write_credentials(credentials, THIRD)
        command = [sys.executable, "-c", PATIENT, "agent", "--host", LOOPBACK, "--port", str(self.port)]
        command += ["--directory", str(self.directory), "--credentials", str(credentials)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def runs(self) -> int:
        """How many processes it has started."""
        return self.said().count("ended with status") + len(psutil.Process(self.process.pid).children())


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """One agent for all attacks: each must leave it usable."""
    made = Victim(tmp_path_factory.mktemp("victim"))
    try:
        while "listening" not in made.said():
            assert made.process.poll() is None, made.said()
            time.sleep(0.05)
        yield made
        assert asyncio.run(answers(made))
    finally:
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(120) == 0
    assert not made.directory.exists()


async def server(victim: Victim, port: int | None = None, *, place: int = 2) -> ReachedAgent:
    """The server connects to what it takes for a host's agent."""
    host = HostConfig(name="abc"[place], address=LOOPBACK, ips=(LOOPBACK,))
    return await reach(host, port or victim.port, FIRST, place=place)


async def answers(victim: Victim) -> bool:
    """Whether the server can use its agent."""
    agent = await server(victim)
    found = await agent.free_ports(LOOPBACK, 1)
    agent.close()
    return len(found) == 1


class Proxy:
    """Stands between server and agent; keeps what the server sends, and changes bytes when it is told to."""

    def __init__(self) -> None:
        self.port = 0
        self.sent = b""  # by the server
        self.flip = ""  # "up" or "down": the next piece in this direction has a bit flipped
        self.cut = ""  # the next piece in this direction is halved, and the connection ends

    @asynccontextmanager
    async def to(self, victim: Victim) -> AsyncIterator[Proxy]:
        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up = await asyncio.open_connection(LOOPBACK, victim.port)
            await asyncio.gather(self._pump(reader, up[1], "up"), self._pump(up[0], writer, "down"))

        listener = await asyncio.start_server(join, LOOPBACK, 0)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            listener.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                if way == "up":
                    self.sent += piece
                if self.flip == way:
                    piece, self.flip = piece[:-1] + bytes([piece[-1] ^ 1]), ""
                if self.cut == way:
                    writer.write(piece[: len(piece) // 2])
                    break
                writer.write(piece)
        writer.close()


def attack(victim: Victim, play: Callable[[Proxy], Awaitable[None]], *, runs: int = 0) -> None:
    """Play an attack through a proxy in front of the agent; the agent is of use afterwards.

    Args:
        runs: processes that the server itself starts in the play; the attacker starts none.
    """

    async def main() -> None:
        async with asyncio.timeout(240), Proxy().to(victim) as proxy:
            before = victim.runs()
            await play(proxy)
            assert await answers(victim)
            assert victim.runs() == before + runs, victim.said()

    asyncio.run(main())


def test_a_relay_to_another_host_is_found_out(victim: Victim) -> None:
    """Who stands at host b's address passes everything on to the agent of host c."""

    async def play(proxy: Proxy) -> None:
        assert await (await server(victim, proxy.port)).free_ports(LOOPBACK, 1)  # where c is meant, it is c
        with pytest.raises(HostUnreachable, match=r"agent of b .* its certificate is not that of the host"):
            await server(victim, proxy.port, place=1)

    attack(victim, play)


def test_a_recorded_connection_cannot_be_played_again(victim: Victim) -> None:
    async def play(proxy: Proxy) -> None:
        process = await (await server(victim, proxy.port)).run(RunRank(["--help"]))
        assert await process.wait() == 0
        for sent in (proxy.sent, proxy.sent[: len(proxy.sent) // 2]):
            reader, writer = await asyncio.open_connection(LOOPBACK, victim.port)
            writer.write(sent)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

    attack(victim, play, runs=1)


def test_a_reflected_server_is_not_its_own_agent(victim: Victim) -> None:
    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.close()

    async def play(proxy: Proxy) -> None:
        mirror = await asyncio.start_server(reflect, LOOPBACK, 0)
        with pytest.raises(HostUnreachable, match="cannot be used: TLS: "):
            await server(victim, mirror.sockets[0].getsockname()[1])
        mirror.close()

    attack(victim, play)


@pytest.mark.parametrize(
    ("way", "said"),
    [("down", "Its bytes were changed on the way (TLS: "), ("up", "The other end closed the connection")],
)
def test_a_flipped_bit_ends_the_connection(victim: Victim, way: str, said: str) -> None:
    async def play(proxy: Proxy) -> None:
        agent = await server(victim, proxy.port)
        proxy.flip = way
        with pytest.raises(HostUnreachable) as found:
            await agent.free_ports(LOOPBACK, 1)
        assert said in found.value.message and "agent of c" in found.value.message
        while way == "up" and "ended: Its bytes were changed on the way (TLS: " not in victim.said():
            await asyncio.sleep(0.01)

    attack(victim, play)


@pytest.mark.parametrize("way", ["up", "down"])
def test_half_a_message_is_none(victim: Victim, way: str) -> None:
    async def play(proxy: Proxy) -> None:
        agent = await server(victim, proxy.port)
        proxy.cut = way
        with pytest.raises(HostUnreachable, match=r"c: its agent closed|agent of c .* closed the connection"):
            await agent.run(RunRank(["--help"])) if way == "up" else await agent.free_ports(LOOPBACK, 1)

    attack(victim, play)


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(OTHER_FIRST, id="the first host of another cluster"),
        pytest.param(KNOWING, id="one that knows this cluster's certificates"),
        pytest.param(SECOND, id="another host of this cluster"),
        pytest.param(THIRD, id="the agent's own host"),
        pytest.param(None, id="without a certificate"),
    ],
)
def test_only_the_first_host_gives_orders(victim: Victim, stranger: Credentials | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an attacker does not mind whom it attacks
    if stranger is not None:
        context = connecting(stranger, peer=2)
        context.verify_mode = ssl.CERT_NONE

    async def play(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, victim.port, ssl=context, server_hostname="")
        connection = AgentConnection(reader, writer, FromAgent)
        connection.send(RunRank(["--help"]))
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)

    attack(victim, play)


def test_a_server_that_is_refused_is_told_so(victim: Victim) -> None:
    async def play(proxy: Proxy) -> None:
        host = HostConfig(name="c", address=LOOPBACK, ips=(LOOPBACK,))
        with pytest.raises(HostUnreachable, match=r"agent of c .* it refuses this server") as refused:
            await reach(host, victim.port, KNOWING, place=2)
        assert "`phalanx restart` gives all hosts new keys" in refused.value.remedy

    attack(victim, play)


def test_a_host_with_another_key_is_not_trusted(tmp_path: Path) -> None:
    """An impostor at the host's address, with the certificates of this cluster and a key of its own."""

    async def main() -> None:
        own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (tmp_path / "pem").write_text(OTHER_THIRD.certificates[2] + OTHER_THIRD.key)
        own.load_cert_chain(tmp_path / "pem")
        impostor = await asyncio.start_server(lambda reader, writer: None, LOOPBACK, 0, ssl=own)
        host = HostConfig(name="c", address=LOOPBACK, ips=(LOOPBACK,))
        with pytest.raises(HostUnreachable, match="not that of the host which is meant"):
            await reach(host, impostor.sockets[0].getsockname()[1], FIRST, place=2)
        impostor.close()

    asyncio.run(main())


def test_older_versions_of_tls_are_refused(victim: Victim) -> None:
    context = connecting(FIRST, peer=2)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2

    async def play(proxy: Proxy) -> None:
        with pytest.raises(OSError):
            await asyncio.open_connection(LOOPBACK, victim.port, ssl=context, server_hostname="")

    attack(victim, play)


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\1\2\0\0\0\x81\xa4", b"\x16\3\1\xff\xff" + bytes(70000), b""],
    ids=["http", "frames", "a record without end", "nothing"],
)
def test_plain_text_is_refused(victim: Victim, words: bytes) -> None:
    async def play(proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection(LOOPBACK, victim.port)
        writer.write(words)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < 100  # an alert
        writer.close()

    attack(victim, play)


def test_what_even_the_first_host_may_not_order(victim: Victim) -> None:
    async def play(proxy: Proxy) -> None:
        with pytest.raises(HostUnreachable, match=r"c: phalanx rank cannot be run: .* LD_PRELOAD may not be"):
            await (await server(victim)).run(RunRank([], {"LD_PRELOAD": "/tmp/x.so"}))
        agent = await server(victim)
        with pytest.raises(HostUnreachable, match="closed the connection"):
            await agent.run(RunRank([], {}, {"../../x": "text"}))  # type: ignore[dict-item]

    attack(victim, play)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for the attack's sockets in this process."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(limit, 2 * FLOOD), most), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


@pytest.mark.usefixtures("many_files")
@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of this machine on Linux only")
def test_idle_connections_do_not_keep_the_server_out(victim: Victim) -> None:
    """A stranger opens many, and goes on opening more while the server connects."""
    before = victim.log.stat().st_size

    async def idle(opened: list[socket.socket]) -> None:
        connection = socket.socket()
        connection.bind((STRANGER, 0))
        connection.setblocking(False)
        opened.append(connection)
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_connect(connection, (LOOPBACK, victim.port))

    async def go_on(opened: list[socket.socket]) -> None:
        while True:
            await idle(opened)
            opened.pop(0).close()

    async def play(proxy: Proxy) -> None:
        opened: list[socket.socket] = []
        for _ in range(FLOOD):
            await idle(opened)
        more = asyncio.create_task(go_on(opened))
        for _ in range(5):
            assert await answers(victim)
        held = psutil.Process(victim.process.pid).net_connections()
        assert sum(one.status == psutil.CONN_ESTABLISHED for one in held) <= MAX_CANDIDATES + 5
        more.cancel()
        for connection in opened:
            connection.close()

    attack(victim, play)
    assert victim.log.stat().st_size - before < 2000


def test_the_directory_of_a_user_keeps_its_files(tmp_path: Path) -> None:
    """`--directory` names one that is in use."""
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "thesis.txt").write_text("mine")
    (tmp_path / "agent" / "MLX_HOSTFILE.json").write_text("mine too")
    made = Victim(tmp_path)
    while "listening" not in made.said():
        assert made.process.poll() is None, made.said()
        time.sleep(0.05)
    os.kill(made.process.pid, signal.SIGTERM)
    assert made.process.wait(120) == ExitCode.OK
    assert sorted(file.name for file in made.directory.iterdir()) == ["MLX_HOSTFILE.json", "thesis.txt"]
    assert (made.directory / "thesis.txt").read_text() == "mine"
