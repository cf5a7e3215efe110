"""Agents over loopback: who is let in, what runs, how it ends, what is seen when the agent is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from phalanx.config import ClusterConfig, HostConfig
from phalanx.dist import ports
from phalanx.dist.ports import free_ports
from phalanx.errors import ConfigError, ExitCode, FrameError, HostUnreachable
from phalanx.supervision import remote
from phalanx.supervision.agent import Agent
from phalanx.supervision.agent_protocol import AgentConnection, Challenge, FromAgent, Proof
from phalanx.supervision.hosts import load_cluster, run_on_agent
from phalanx.supervision.remote import RemoteProcess, reach

SECRET = "a secret"


class Served:
    """An agent in this process, where it listens, and whether it is still there."""

    def __init__(self, port: int, directory: Path) -> None:
        self.host = HostConfig(name="b", address="127.0.0.1", ips=("127.0.0.1",))
        self.port = port
        self.directory = directory


def there(directory: Path) -> bool:
    return directory.exists()


@asynccontextmanager
async def agent(directory: Path) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    task = asyncio.create_task(Agent(SECRET, directory).serve("127.0.0.1", port))
    while not there(directory):
        await asyncio.sleep(0.01)
        assert not task.done()
    try:
        yield Served(port, directory)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)  # as `phalanx down` does
        assert await task == ExitCode.OK


def with_agent(tmp_path: Path, test: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), agent(tmp_path / "agent") as served:
            await test(served)

    asyncio.run(main())
    assert not (tmp_path / "agent").exists(), "the agent leaves its directory behind"


def test_a_process_runs_there(tmp_path):
    async def test(served: Served) -> None:
        there = await reach(served.host, served.port, SECRET)
        assert there.python == sys.executable
        script = "import os; print(os.environ['A'], open(os.environ['B']).read()); raise SystemExit(7)"
        process = await there.run([sys.executable, "-c", script], {"A": "1"}, {"B": "[2]"})
        assert process.stderr is not None
        assert (await process.stderr.read()).decode() == "1 [2]\n"
        assert await process.wait() == process.returncode == 7

    with_agent(tmp_path, test)


def test_a_signal_reaches_it(tmp_path):
    async def test(served: Served) -> None:
        there = await reach(served.host, served.port, SECRET)
        process = await there.run(["sleep", "60"], {})
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM

    with_agent(tmp_path, test)


@pytest.mark.parametrize("ending", ["connection lost", "another server"])
def test_it_ends_with_its_connection(tmp_path, ending):
    async def test(served: Served) -> None:
        there = await reach(served.host, served.port, SECRET)
        process = await there.run(["sleep", "60"], {})
        child = psutil.Process(process.pid)
        if ending == "connection lost":
            process._connection.close()
        else:
            again = await reach(served.host, served.port, SECRET)
            assert await (await again.run(["true"], {})).wait() == 0
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)

    with_agent(tmp_path, test)


def test_it_ends_when_the_server_falls_silent(tmp_path, monkeypatch):
    """A host that lost its power closes no connection."""
    monkeypatch.setattr("phalanx.supervision.agent.SILENT_S", 0.3)

    async def test(served: Served) -> None:
        there = await reach(served.host, served.port, SECRET)
        process = await there.run(["sleep", "60"], {})
        process._tasks[1].cancel()  # its heartbeat
        child = psutil.Process(process.pid)
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)

    with_agent(tmp_path, test)


def test_what_cannot_be_run_is_named(tmp_path):
    async def test(served: Served) -> None:
        there = await reach(served.host, served.port, SECRET)
        with pytest.raises(HostUnreachable, match="b: /nowhere/x cannot be run: No such file"):
            await there.run(["/nowhere/x"], {})

    with_agent(tmp_path, test)


def test_ports_are_of_the_address(tmp_path, monkeypatch):
    async def test(served: Served) -> None:
        there = await reach(served.host, served.port, SECRET)
        found = await there.free_ports("127.0.0.1", 3)
        assert len(set(found)) == 3
        with pytest.raises(HostUnreachable, match=r"192\.0\.2\.1 is not an address of"):
            await there.free_ports("192.0.2.1", 1)
        monkeypatch.setattr(ports, "PORTS", sorted(found))
        with pytest.raises(HostUnreachable, match=r"b: all ports from \d+ to \d+ of 127\.0\.0\.1 are taken: end what"):
            await there.free_ports("127.0.0.1", 4)

    with_agent(tmp_path, test)


def test_a_stranger_is_not_let_in(tmp_path):
    async def test(served: Served) -> None:
        with pytest.raises(HostUnreachable, match=f"agent of b at 127.0.0.1 port {served.port} cannot be used"):
            await reach(served.host, served.port, "a guess")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        connection = AgentConnection(reader, writer, FromAgent)
        await connection.expect(Challenge)
        connection.send(Proof(b"", b""))
        with pytest.raises(FrameError):
            await connection.expect(Proof)

    with_agent(tmp_path, test)


def test_an_agent_that_does_not_know_the_secret_is_not_trusted(tmp_path):
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = AgentConnection(reader, writer, Proof)
        connection.send(Challenge(bytes(32)))
        await connection.expect(Proof)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        host = HostConfig(name="b", address="127.0.0.1", ips=("127.0.0.1",))
        with pytest.raises(HostUnreachable, match="closed the connection"):
            await reach(host, port, SECRET)
        server.close()

    asyncio.run(main())


def test_nobody_there():
    host = HostConfig(name="b", address="127.0.0.1", ips=("127.0.0.1",))
    (port,) = free_ports(1)
    with pytest.raises(HostUnreachable, match=r"Connect call failed|Connection refused"):
        asyncio.run(reach(host, port, SECRET))


def test_a_silent_agent_is_lost(tmp_path, monkeypatch):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = AgentConnection(reader, writer, FromAgent)
        await asyncio.sleep(30)
        connection.close()

    async def main() -> None:
        from_agent = await asyncio.start_server(silent, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*from_agent.sockets[0].getsockname())
        process = RemoteProcess(
            HostConfig(name="b", address="x", ips=()), AgentConnection(reader, writer, FromAgent), 1
        )
        assert await process.wait() == ExitCode.PEER_LOST
        assert process.stderr is not None
        assert b"b is lost: its agent has been silent for 0.2 s" in await process.stderr.read()
        from_agent.close()

    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    asyncio.run(main())


def test_mpirun_reaches_hosts_by_name(tmp_path, capfd):
    async def test(served: Served) -> None:
        cluster = ClusterConfig(hosts=(served.host, served.host), agent_port=served.port)
        assert await run_on_agent(cluster, SECRET, "b", ["echo", "$((1+2));", "exit", "4"]) == 4
        with pytest.raises(ConfigError, match="c is not a host"):
            await run_on_agent(cluster, SECRET, "c", ["true"])

    with_agent(tmp_path, test)
    assert "3\n" in capfd.readouterr().err


def test_a_cluster_file_must_fit(tmp_path, monkeypatch):
    file = tmp_path / "c.json"
    file.write_text('{"hosts": [{"name": "a", "address": "x", "ips": []}, {"name": "b", "address": "y", "ips": []}]}')
    with pytest.raises(ConfigError, match="PHALANX_CLUSTER_SECRET is not set"):
        load_cluster(file, 2)
    monkeypatch.setenv("PHALANX_CLUSTER_SECRET", "x")
    found = load_cluster(file, 2)
    assert found is not None and [host.name for host in found[0].hosts] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"--tp 3, but .* names 2 hosts"):
        load_cluster(file, 3)
    file.write_text('{"hosts": []}')
    with pytest.raises(ConfigError, match="names 0 host"):
        load_cluster(file, 2)
    assert load_cluster(None, 2) is None
