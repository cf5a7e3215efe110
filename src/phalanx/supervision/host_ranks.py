"""Starts the processes of a group on several hosts: rank 0 on this host, rank i through the agent of host i.

With MPI one `mpirun` on this host starts all ranks of a stage and uses the agents in place of ssh. Every start gets new
ports and a new nonce, as on one machine (`rank_launcher.py`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from phalanx.config import (
    COORDINATOR_PORT,
    CREDENTIALS_FILE,
    NONCE_BITS,
    RUN_PHALANX,
    Backend,
    ClusterConfig,
    EngineConfig,
    GroupConfig,
)
from phalanx.dist.collective_backend import ChosenBackend, environment_of, file_variables, mpirun_on_hosts
from phalanx.dist.ports import free_ports
from phalanx.dist.topology import Topology
from phalanx.environment import KERNELS_VARIABLE
from phalanx.errors import ConfigError, HostUnreachable, PhalanxError
from phalanx.rank_variables import read_variable
from phalanx.supervision.agent_protocol import FileVariable, RunDaemon, RunRank
from phalanx.supervision.programs import daemon_arguments
from phalanx.supervision.rank_launcher import Child, RankProcesses, pid_file, spawn
from phalanx.supervision.remote import ReachedAgent, reach
from phalanx.tls.host_credentials import Credentials, read_credentials


class KnownCluster(NamedTuple):
    """The hosts of a group and the credentials of this one, with the files that both were read from."""

    config: ClusterConfig
    file: Path
    credentials: Credentials
    credentials_file: Path


def read_cluster(file: Path) -> KnownCluster:
    """The hosts of a group, and this host's credentials, which lie beside the file.

    Raises:
        ConfigError: a file is not of the form that `phalanx up` writes, the cluster has fewer than two hosts, or the
            credentials are those of another cluster or of another host than the first.
    """
    cluster = read_hosts(file)
    credentials_file = file.absolute().with_name(CREDENTIALS_FILE)
    credentials = read_credentials(credentials_file)
    if credentials.place != 0 or len(credentials.certificates) != len(cluster.hosts):
        raise ConfigError(
            f"{credentials_file} is of host {credentials.place} of {len(credentials.certificates)}; "
            f"the server's is of host 0 of {len(cluster.hosts)}.",
            remedy="`phalanx up` writes both; for units, `phalanx credentials` does.",
        )
    return KnownCluster(cluster, file.absolute(), credentials, credentials_file)


def read_hosts(file: Path) -> ClusterConfig:
    """The hosts of a group.

    Raises:
        ConfigError: the file is not of the form that `phalanx up` writes, names fewer than two hosts, or sets a
            variable that ranks may not be given.
    """
    try:
        cluster = msgspec.json.decode(file.read_bytes(), type=ClusterConfig)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read as a cluster's hosts: {getattr(error, 'strerror', None) or error}.",
            remedy="`phalanx up` writes such a file; for units, docs/clusters.md (Start at boot) shows one.",
        ) from error
    if len(cluster.hosts) < 2:
        raise ConfigError(f"{file} names {len(cluster.hosts)} host; a cluster has two at least.")
    for entry in cluster.envs:
        read_variable(entry, f"{file}: envs")
    hosts = tuple(replace(host, ips=host.ips or (host.address,)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def load_cluster(file: Path | None, ranks: int) -> KnownCluster | None:
    """The hosts of `ranks` ranks; None without a file.

    Raises:
        ConfigError: as `read_cluster`; or the number of ranks is another.
    """
    if file is None:
        return None
    known = read_cluster(file)
    if len(known.config.hosts) != ranks:
        raise ConfigError(
            f"{ranks} ranks (--tp, --pp), but --cluster {file} names {len(known.config.hosts)} hosts.",
            remedy="`phalanx up` gives both; every host runs one rank.",
        )
    return known


async def start_on_hosts(
    config: EngineConfig, choice: ChosenBackend | None, socket_path: Path, known: KnownCluster
) -> RankProcesses:
    """Start all ranks of a group.

    Args:
        socket_path: on which the server process waits for rank 0.

    Raises:
        HostUnreachable: an agent does not answer; names the host.
        ConfigError: the first address is not this host's.
        OSError: a process of this host cannot be started.
    """
    hosts, port = known.config.hosts, known.config.agent_port
    results = await asyncio.gather(
        *(reach(host, port, known.credentials, place=place) for place, host in enumerate(hosts) if place),
        return_exceptions=True,
    )
    reached = [result for result in results if isinstance(result, ReachedAgent)]
    try:
        if problems := [result for result in results if isinstance(result, BaseException)]:
            raise problems[0] if len(problems) == 1 else _combined(problems)
        return await _start(config, choice, socket_path, known, reached)
    except (PhalanxError, OSError, asyncio.CancelledError):
        for agent in reached:
            agent.close()
        raise


def _combined(problems: Sequence[BaseException]) -> BaseException:
    """One error for several unreachable hosts; another kind of error comes first."""
    unreachable = [problem for problem in problems if isinstance(problem, HostUnreachable)]
    if len(unreachable) < len(problems):
        return next(problem for problem in problems if not isinstance(problem, HostUnreachable))
    return HostUnreachable(" ".join(problem.message for problem in unreachable), remedy=unreachable[0].remedy)


async def _start(
    config: EngineConfig,
    choice: ChosenBackend | None,
    socket_path: Path,
    known: KnownCluster,
    reached: Sequence[ReachedAgent],
) -> RankProcesses:
    topology, cluster = Topology(config.widths), known.config
    first, backend = cluster.hosts[0], None if choice is None else choice.backend
    try:
        control, own_port = free_ports(2, first.address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{first.address} is not an address of this host ({first.name}): {error.strerror or error}.",
            remedy="The first host of the hostfile runs the server; correct its address.",
        ) from error
    group = GroupConfig(
        size=topology.size,
        widths=topology.widths,
        backend=backend,
        nonce=secrets.randbits(NONCE_BITS),
        control=f"{first.address}:{control}",
        addresses=await _ring_addresses(cluster, reached, own_port) if backend == "ring" else (),
        link_addresses=tuple(host.ips[0] for host in cluster.hosts),
        hosts=tuple(host.name for host in cluster.hosts),
    )
    variables = dict(entry.partition("=")[::2] for entry in cluster.envs)
    variables |= {} if config.cpu_kernels else {KERNELS_VARIABLE: "0"}
    sockets = [str(socket_path), *(f"{agent.directory}/engine.sock" for agent in reached)]
    credentials = [str(known.credentials_file), *(agent.credentials for agent in reached)]
    commands = [
        _Rank(rank, [*_rank_arguments(config, group, socket), "--credentials", file, "--rank", str(rank)])
        for rank, (socket, file) in enumerate(zip(sockets, credentials, strict=True))
    ]
    processes: dict[str, Child] = {}
    for stage in range(topology.n_stages):
        ranks = [commands[rank] for rank in topology.ranks(stage)]
        if backend == "mpi" and len(ranks) > 1:
            name = "mpirun" if topology.n_stages == 1 else f"mpirun of stage {stage}"
            processes[name] = await _start_mpirun(config, known, reached, ranks, variables, socket_path.parent)
        else:
            rendezvous = await _rendezvous_of(backend, cluster, group, ranks, reached, own_port)
            processes |= await _start_each(ranks, rendezvous, reached, variables, socket_path.with_suffix(f".{stage}"))
    return RankProcesses(processes, [pid_file(socket_path, 0)])


class _Rank(NamedTuple):
    """A rank that is to be started, on the host of the same number."""

    rank: int
    arguments: list[str]
    """Of `phalanx rank`."""


async def _start_mpirun(
    config: EngineConfig,
    known: KnownCluster,
    reached: Sequence[ReachedAgent],
    ranks: Sequence[_Rank],
    variables: dict[str, str],
    directory: Path,
) -> Child:
    """Start the ranks of a stage by one mpirun on this host."""
    pythons = [sys.executable, *(agent.python for agent in reached)]
    for rank, _ in ranks:
        if rank > 0:
            reached[rank - 1].close()  # mpirun opens its own connections, by `phalanx reach`
    variables = {**variables, **environment_of("mpi", None, None)}
    commands = [[pythons[rank], *RUN_PHALANX, "rank", *arguments] for rank, arguments in ranks]
    launcher = shlex.join([sys.executable, *RUN_PHALANX, "reach", str(known.file)])
    hosts = [known.config.hosts[rank].name for rank, _ in ranks]
    command = mpirun_on_hosts(hosts, config.collective, commands, variables, launcher)
    return await spawn(command, {**variables, **file_variables(directory)})


class _Rendezvous(NamedTuple):
    """The variables and files by which the ranks of a stage find each other."""

    variables: list[dict[str, str]]
    """Environment of each rank."""
    files: dict[FileVariable, str]
    """Environment variable -> text of the file that it shall name."""


async def _rendezvous_of(
    backend: Backend | None,
    cluster: ClusterConfig,
    group: GroupConfig,
    ranks: Sequence[_Rank],
    reached: Sequence[ReachedAgent],
    own_port: int,
) -> _Rendezvous:
    """The variables and files that MLX's backend reads: ranks, and the address of the stage's first host.

    Args:
        own_port: a free port of this host.
    """
    numbers = [rank for rank, _ in ranks]
    hosts = [cluster.hosts[rank] for rank in numbers]
    first, size = hosts[0].address, len(hosts)
    if backend is None or size == 1:
        return _Rendezvous([{}], {})
    if backend == "ring":
        ports = [group.addresses[rank].rpartition(":")[2] for rank in numbers]
        lists = [[f"{ip}:{port}" for ip in host.ips] for host, port in zip(hosts, ports, strict=True)]
        return _Rendezvous(
            [environment_of(backend, tp_rank, None) for tp_rank in range(size)], {"MLX_HOSTFILE": json.dumps(lists)}
        )
    if backend in ("jaccl", "jaccl-ring"):
        ring = {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
        variables = [
            {"MLX_RANK": str(tp_rank), "MLX_JACCL_COORDINATOR": f"{first}:{COORDINATOR_PORT}", **ring}
            for tp_rank in range(size)
        ]
        devices = [[host.rdma[other] for other in numbers] for host in hosts]
        return _Rendezvous(variables, {"MLX_IBV_DEVICES": json.dumps(devices)})
    port = own_port if numbers[0] == 0 else (await reached[numbers[0] - 1].free_ports(first, 1))[0]
    meeting = f"{first}:{port}"
    return _Rendezvous([environment_of(backend, rank, None, size=size, meeting=meeting) for rank in range(size)], {})


async def _start_each(
    ranks: Sequence[_Rank],
    rendezvous: _Rendezvous,
    reached: Sequence[ReachedAgent],
    variables: dict[str, str],
    files: Path,
) -> dict[str, Child]:
    """Start the ranks of a stage: rank 0 here, others by the agents of their hosts.

    Args:
        files: path of this host's files, without the ending.
    """
    processes: dict[str, Child] = {}
    for (rank, arguments), own in zip(ranks, rendezvous.variables, strict=True):
        if rank == 0:
            local: dict[str, str] = {}
            local |= {name: _write(files.with_suffix(f".{name}.json"), text) for name, text in rendezvous.files.items()}
            command = [sys.executable, *RUN_PHALANX, "rank", *arguments]
            processes["rank 0"] = await spawn(command, {**variables, **own, **local, **file_variables(files.parent)})
        else:
            run = RunRank(arguments, {**variables, **own}, rendezvous.files)
            processes[f"rank {rank}"] = await reached[rank - 1].run(run)
    return processes


def _write(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


def _rank_arguments(config: EngineConfig, group: GroupConfig, socket: str) -> list[str]:
    """The arguments of `phalanx rank` that are the same on all hosts, and the socket's path."""
    base = [config.model, "--socket", socket, "--config", msgspec.json.encode(config).decode()]
    return [*base, "--group", msgspec.json.encode(group).decode()]


async def _ring_addresses(cluster: ClusterConfig, reached: Sequence[ReachedAgent], own: int) -> tuple[str, ...]:
    """`ip:port` of every rank, on the first of its host's addresses; `own` is rank 0's port."""
    ports = await asyncio.gather(*(agent.free_ports(agent.host.ips[0], 1) for agent in reached))
    return tuple(
        f"{host.ips[0]}:{port}" for host, port in zip(cluster.hosts, [own, *(p[0] for p in ports)], strict=True)
    )


async def run_on_agent(known: KnownCluster, name: str, words: Sequence[str]) -> int:
    """Run Open MPI's daemon on a host and copy its output to stderr, as `mpirun` expects of ssh.

    Args:
        name: of the host, or its address.
        words: joined by spaces, one command line for a shell, as with ssh. No shell runs it (`programs.py`).

    Returns:
        The command's exit status.

    Raises:
        ConfigError: the cluster has no such host, or the command line is of another program.
        HostUnreachable: the agent does not answer, or cannot run the command; names the host.
    """
    hosts = enumerate(known.config.hosts)
    place, host = next((found for found in hosts if name in (found[1].name, found[1].address)), (0, None))
    if host is None:
        raise ConfigError(f"{name} is not a host of this cluster.")
    arguments = daemon_arguments(" ".join(words))
    agent = await reach(host, known.config.agent_port, known.credentials, place=place)
    process = await agent.run(RunDaemon(arguments))
    assert process.stderr is not None
    while piece := await process.stderr.read(1 << 16):
        os.write(2, piece)
    return await process.wait()
