"""Agents over loopback: who is let in, what runs, how it ends, what is seen when the agent is gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
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
from phalanx.supervision.agent_protocol import (
    MAX_UNSENT,
    AgentConnection,
    AgentWelcome,
    FromAgent,
    KeepAlive,
    Output,
    Ports,
    ProcessEnded,
    RunDaemon,
    RunRank,
)
from phalanx.supervision.host_ranks import KnownCluster, load_cluster, run_on_agent
from phalanx.supervision.owned_directory import LOCK, PREFIX
from phalanx.supervision.programs import Program, rank
from phalanx.supervision.rank_agent import READ_BYTES, Agent
from phalanx.supervision.remote import ReachedAgent, RemoteProcess, reach
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import Credentials, write_credentials

FIRST, SECOND = make_credentials(["a", "b"])
STRANGER, _ = make_credentials(["a", "b"])


class Served:
    """An agent in this process, where it listens, and whether it is still there."""

    def __init__(self, port: int, directory: Path) -> None:
        self.host = HostConfig(name="b", address="127.0.0.1", ips=("127.0.0.1",))
        self.port = port
        self.directory = directory

    async def reach(self, credentials: Credentials = FIRST) -> ReachedAgent:
        return await reach(self.host, self.port, credentials, place=1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def agent(directory: Path) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    task = asyncio.create_task(Agent(SECOND, Path("/run/b.json"), directory).serve("127.0.0.1", port))
    while not listens(port):
        await asyncio.sleep(0.01)
        assert not task.done()
    try:
        yield Served(port, directory)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)  # as `phalanx down` does
        assert await task == ExitCode.OK


@pytest.fixture(autouse=True)
def any_command(monkeypatch):
    """What is named as a rank's arguments runs as a command; `test_programs.py` has what really runs."""

    def anything(run: RunRank, directory: Path) -> Program:
        return Program(run.arguments, rank(RunRank([], run.variables, run.files), directory).variables)

    monkeypatch.setattr("phalanx.supervision.rank_agent.rank", anything)


def with_agent(tmp_path: Path, test: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), agent(tmp_path / "agent") as served:
            await test(served)

    asyncio.run(main())
    assert not (tmp_path / "agent").exists(), "the agent leaves its directory behind"


def test_a_process_runs_there(tmp_path):
    async def test(served: Served) -> None:
        there = await served.reach()
        assert (there.python, there.credentials) == (sys.executable, "/run/b.json")
        script = (
            "import os; print(os.environ['NCCL_DEBUG'], open(os.environ['MLX_HOSTFILE']).read()); raise SystemExit(7)"
        )
        process = await there.run(RunRank([sys.executable, "-c", script], {"NCCL_DEBUG": "1"}, {"MLX_HOSTFILE": "[2]"}))
        assert process.stderr is not None
        assert (await process.stderr.read()).decode() == "1 [2]\n"
        assert await process.wait() == process.returncode == 7

    with_agent(tmp_path, test)


def test_a_directory_that_a_cleaner_took_is_made_again(tmp_path):
    """Systems empty their temporary directories, under an agent that may run for weeks."""

    async def test(served: Served) -> None:
        shutil.rmtree(served.directory)
        there = await served.reach()
        process = await there.run(RunRank(["true"], {}, {"MLX_HOSTFILE": "[2]"}))
        assert await process.wait() == 0
        assert {folder.stat().st_mode & 0o777 for folder in (served.directory, Path(there.directory))} == {0o700}

    with_agent(tmp_path, test)


def test_a_directory_of_others_takes_no_agent(tmp_path):
    """They could put their own directory, with code in it, into the place of the agent's."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with socket.socket() as taken:  # so that an agent that took it could not listen
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match=r"--directory .*/shared: it is another user's, or others may rename"):
            asyncio.run(Agent(SECOND, Path("/run/b.json"), shared).serve(*taken.getsockname()))
    assert not [*shared.iterdir()]


def test_nor_one_that_others_made_anew_after_a_cleaner(tmp_path):
    async def test(served: Served) -> None:
        shutil.rmtree(served.directory)
        served.directory.mkdir()
        served.directory.chmod(0o777)
        with pytest.raises(HostUnreachable):
            await served.reach()
        assert not [*served.directory.iterdir()]
        served.directory.chmod(0o700)
        assert (await served.reach()).directory.startswith(str(served.directory))

    with_agent(tmp_path, test)


def test_a_killed_agents_directory_goes_with_the_next_agent(tmp_path):
    killed = tmp_path / "agent" / f"{PREFIX}killed"
    killed.mkdir(parents=True, mode=0o700)
    (killed / LOCK).touch()
    (killed / "MLX_HOSTFILE.json").touch()

    async def main() -> None:
        async with agent(tmp_path / "agent"):
            assert not killed.exists()

    asyncio.run(main())
    assert not [*(tmp_path / "agent").iterdir()]


def test_a_signal_reaches_it(tmp_path):
    async def test(served: Served) -> None:
        there = await served.reach()
        process = await there.run(RunRank(["sleep", "60"]))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM

    with_agent(tmp_path, test)


@pytest.mark.parametrize("ending", ["connection lost", "another server"])
def test_it_ends_with_its_connection(tmp_path, ending):
    async def test(served: Served) -> None:
        there = await served.reach()
        process = await there.run(RunRank(["sleep", "60"]))
        child = psutil.Process(process.pid)
        if ending == "connection lost":
            process._connection.close()
        else:
            again = await served.reach()
            assert await (await again.run(RunRank(["true"]))).wait() == 0
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)

    with_agent(tmp_path, test)


def test_it_ends_when_the_server_falls_silent(tmp_path, monkeypatch):
    """A host that lost its power closes no connection."""

    async def test(served: Served) -> None:
        there = await served.reach()
        process = await there.run(RunRank(["sleep", "60"]))
        monkeypatch.setattr("phalanx.supervision.rank_agent.HEARTBEAT_TIMEOUT_S", 0.3)
        process._tasks[1].cancel()  # its heartbeat
        process._connection.send(KeepAlive())  # from this one on
        child = psutil.Process(process.pid)
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)

    with_agent(tmp_path, test)


def test_what_cannot_be_run_is_named(tmp_path):
    async def test(served: Served) -> None:
        there = await served.reach()
        with pytest.raises(HostUnreachable, match=r"b: phalanx rank cannot be run: .*No such file"):
            await there.run(RunRank(["/nowhere/x"]))

    with_agent(tmp_path, test)


def test_ports_are_of_the_address(tmp_path, monkeypatch):
    async def test(served: Served) -> None:
        there = await served.reach()
        found = await there.free_ports("127.0.0.1", 3)
        assert len(set(found)) == 3
        with pytest.raises(HostUnreachable, match=r"192\.0\.2\.1 is not an address of"):
            await there.free_ports("192.0.2.1", 1)
        monkeypatch.setattr(ports, "PORTS", sorted(found))
        with pytest.raises(
            HostUnreachable, match=r"b: all ports from \d+ to \d+ of 127\.0\.0\.1 are taken: end programs"
        ):
            await there.free_ports("127.0.0.1", 4)

    with_agent(tmp_path, test)


def test_a_stranger_is_not_let_in(tmp_path):
    async def test(served: Served) -> None:
        with pytest.raises(HostUnreachable, match=f"agent of b at 127.0.0.1 port {served.port} cannot be used"):
            await served.reach(STRANGER)

    with_agent(tmp_path, test)


def test_nobody_there():
    host = HostConfig(name="b", address="127.0.0.1", ips=("127.0.0.1",))
    (port,) = free_ports(1)
    with pytest.raises(HostUnreachable, match=r"Connect call failed|Connection refused"):
        asyncio.run(reach(host, port, FIRST, place=1))


def test_a_silent_agent_is_lost(tmp_path, monkeypatch):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = AgentConnection(reader, writer, FromAgent)
        await asyncio.sleep(600)
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

    monkeypatch.setattr(remote, "HEARTBEAT_TIMEOUT_S", 0.2)
    asyncio.run(main())


HOST = HostConfig(name="b", address="x", ips=("x",))


def from_agent(
    messages: Callable[[AgentConnection], Awaitable[None]], test: Callable[[AgentConnection], Awaitable[None]]
):
    """What a server makes of an agent whose host somebody else has taken over."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await messages(AgentConnection(reader, writer, FromAgent))

    async def main() -> None:
        listener = await asyncio.start_server(send, "127.0.0.1", 0)
        async with asyncio.timeout(120), listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            await test(AgentConnection(reader, writer, FromAgent))
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("numbers", [[], [1], [0, 1], [1, 65536], [7, 7], [1, 2, 3]], ids=str)
def test_ports_that_were_not_asked_for_are_refused(numbers):
    async def lie(connection: AgentConnection) -> None:
        connection.send(Ports(numbers))

    async def test(connection: AgentConnection) -> None:
        there = ReachedAgent(HOST, connection, AgentWelcome("/python", "/directory", "/credentials"))
        with pytest.raises(HostUnreachable, match="b"):
            await there.free_ports("x", 2)

    from_agent(lie, test)


@pytest.mark.parametrize("status", [-65, 256, 1 << 40])
def test_a_status_that_no_process_has_is_a_lost_host(status):
    async def lie(connection: AgentConnection) -> None:
        connection.send(ProcessEnded(status))

    async def test(connection: AgentConnection) -> None:
        assert await RemoteProcess(HOST, connection, 1).wait() == ExitCode.PEER_LOST

    from_agent(lie, test)


@pytest.mark.parametrize("path", ["", ":", "--prefix", "python", "/a\nb", "/a\n", "/a\0b"], ids=repr)
def test_a_path_that_could_be_an_option_of_mpirun_is_refused(path):
    async def lie(connection: AgentConnection) -> None:
        connection.send(AgentWelcome("/python", "/directory", path))

    async def test(connection: AgentConnection) -> None:
        with pytest.raises(FrameError, match="credentials"):
            await connection.expect(AgentWelcome)

    from_agent(lie, test)


def test_output_that_nobody_reads_takes_no_memory():
    pieces = 200

    async def flood(connection: AgentConnection) -> None:
        for _ in range(pieces):
            connection.send(Output(bytes(READ_BYTES)))
        connection.send(ProcessEnded(3))

    async def test(connection: AgentConnection) -> None:
        process = RemoteProcess(HOST, connection, 1)
        assert await process.wait() == 3
        assert process.stderr is not None
        assert 0 < len(await process.stderr.read()) < pieces * READ_BYTES / 10

    from_agent(flood, test)


def test_output_that_the_network_does_not_take_takes_no_memory():
    async def flood(connection: AgentConnection) -> None:
        for _ in range(200):
            connection.offer(Output(bytes(READ_BYTES)))  # the loop does not run meanwhile, so that little is sent
        assert connection._writer.transport.get_write_buffer_size() < MAX_UNSENT + 2 * READ_BYTES
        connection.send(ProcessEnded(3))

    async def test(connection: AgentConnection) -> None:
        assert await RemoteProcess(HOST, connection, 1).wait() == 3

    from_agent(flood, test)


def test_mpirun_reaches_hosts_by_name(tmp_path, capfd, monkeypatch):
    def echo(run: RunDaemon, directory: Path) -> Program:
        return Program(["sh", "-c", 'echo "$@"; exit 4', "prted", *run.arguments], {})

    monkeypatch.setattr("phalanx.supervision.rank_agent.daemon", echo)

    async def test(served: Served) -> None:
        first = HostConfig(name="a", address="127.0.0.2", ips=())
        config = ClusterConfig(hosts=(first, served.host), agent_port=served.port)
        cluster = KnownCluster(config, Path("cluster.json"), FIRST, Path("credentials.json"))
        assert await run_on_agent(cluster, "b", ["X=1;export X;/o/bin/prted", "--one", '"two words"']) == 4
        with pytest.raises(ConfigError, match="c is not a host"):
            await run_on_agent(cluster, "c", ["prted"])
        with pytest.raises(ConfigError, match="mpirun asks for 'touch x' instead of prted"):
            await run_on_agent(cluster, "b", ["prted;", "touch", "x"])

    with_agent(tmp_path, test)
    assert "--one two words\n" in capfd.readouterr().err


def test_a_cluster_file_must_fit(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"hosts": [{"name": "a", "address": "x", "ips": []}, {"name": "b", "address": "y", "ips": []}]}')
    credentials = tmp_path / "credentials.json"
    with pytest.raises(ConfigError, match=r"credentials\.json holds no credentials"):
        load_cluster(file, 2)
    write_credentials(credentials, SECOND)
    with pytest.raises(ConfigError, match=r"credentials\.json is of host 1 of 2; the server's is of host 0 of 2"):
        load_cluster(file, 2)
    credentials.unlink()
    write_credentials(credentials, FIRST)
    found = load_cluster(file, 2)
    assert found is not None and [host.name for host in found.config.hosts] == ["a", "b"]
    assert found.credentials == FIRST and found.credentials_file == credentials
    with pytest.raises(ConfigError, match=r"3 ranks .*, but .* names 2 hosts"):
        load_cluster(file, 3)
    file.write_text(file.read_text()[:-1] + ', "envs": ["LD_PRELOAD=/x"]}')
    with pytest.raises(ConfigError, match=r"c\.json: envs: LD_PRELOAD may not be set"):
        load_cluster(file, 2)
    file.write_text('{"hosts": []}')
    with pytest.raises(ConfigError, match="names 0 host"):
        load_cluster(file, 2)
    assert load_cluster(None, 2) is None
