"""Starts the processes of a group on several hosts: rank 0 on this host, rank i through the agent of host i.

With MPI one `mpirun` on this host starts all ranks and uses the agents in place of ssh. Every start gets new ports, a
new nonce and a new secret, as on one machine (`launch.py`). Does not know why a group ended or whether it starts again.
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

import msgspec

from phalanx.config import (
    CLUSTER_VARIABLE,
    COORDINATOR_PORT,
    KERNELS_VARIABLE,
    SECRET_VARIABLE,
    ClusterConfig,
    EngineConfig,
    GroupConfig,
    cluster_secret,
)
from phalanx.dist.backend import ChosenBackend, environment_of, mpirun_on_hosts
from phalanx.dist.ports import free_ports
from phalanx.errors import ConfigError, HostUnreachable, PhalanxError
from phalanx.supervision.launch import NONCE_BITS, Child, RankProcesses, pid_file, spawn
from phalanx.supervision.remote import ReachedAgent, reach


def read_cluster(file: Path) -> ClusterConfig:
    """The hosts of a group.

    Raises:
        ConfigError: the file is not of the form that `phalanx up` writes, or names fewer than two hosts.
    """
    try:
        cluster = msgspec.json.decode(file.read_bytes(), type=ClusterConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--cluster {file} cannot be read: {error}.", remedy="`phalanx up` writes it.") from error
    if len(cluster.hosts) < 2:
        raise ConfigError(f"--cluster {file} names {len(cluster.hosts)} host; a cluster has two at least.")
    return cluster


def load_cluster(file: Path | None, ranks: int) -> tuple[ClusterConfig, str] | None:
    """The hosts of `ranks` ranks, and the secret of their agents; None without a file.

    Raises:
        ConfigError: the file, the secret or the number of ranks is wrong.
    """
    if file is None:
        return None
    cluster, secret = read_cluster(file), cluster_secret()
    if secret is None:
        raise ConfigError(f"--cluster {file}: {CLUSTER_VARIABLE} is not set.", remedy="Start it with `phalanx up`.")
    if len(cluster.hosts) != ranks:
        raise ConfigError(
            f"--tp {ranks}, but --cluster {file} names {len(cluster.hosts)} hosts.",
            remedy="`phalanx up` gives both; every host runs one rank.",
        )
    return cluster, secret


async def start_on_hosts(
    config: EngineConfig, choice: ChosenBackend, socket_path: Path, cluster: ClusterConfig, secret: str
) -> RankProcesses:
    """Start all ranks of a group.

    Args:
        socket_path: on which the server process waits for rank 0.
        secret: of the agents.

    Raises:
        HostUnreachable: an agent does not answer; names the host.
        ConfigError: the first address is not this host's.
        OSError: a process of this host cannot be started.
    """
    results = await asyncio.gather(
        *(reach(host, cluster.agent_port, secret) for host in cluster.hosts[1:]), return_exceptions=True
    )
    reached = [result for result in results if isinstance(result, ReachedAgent)]
    try:
        if problems := [result for result in results if isinstance(result, BaseException)]:
            raise problems[0] if len(problems) == 1 else _combined(problems)
        return await _start(config, choice, socket_path, cluster, reached, secret)
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
    choice: ChosenBackend,
    socket_path: Path,
    cluster: ClusterConfig,
    reached: Sequence[ReachedAgent],
    secret: str,
) -> RankProcesses:
    first, size, backend = cluster.hosts[0], len(cluster.hosts), choice.backend
    try:
        control, rendezvous, own_ring = free_ports(3, first.address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{first.address} is not an address of this host ({first.name}): {error.strerror or error}.",
            remedy="The first host of the hostfile runs the server; correct its address.",
        ) from error
    group = GroupConfig(
        size=size,
        backend=backend,
        nonce=secrets.randbits(NONCE_BITS),
        control=f"{first.address}:{control}",
        addresses=await _ring_addresses(cluster, reached, own_ring) if backend == "ring" else (),
    )
    variables = dict(entry.partition("=")[::2] for entry in cluster.envs)
    variables |= {} if config.cpu_kernels else {KERNELS_VARIABLE: "0"}
    variables[SECRET_VARIABLE] = secrets.token_hex(32)
    sockets = [str(socket_path), *(f"{agent.directory}/engine.sock" for agent in reached)]
    pythons = [sys.executable, *(agent.python for agent in reached)]
    commands = [
        [python, *_rank_arguments(config, group, socket), "--rank", str(rank)]
        for rank, (python, socket) in enumerate(zip(pythons, sockets, strict=True))
    ]
    pid_files = [pid_file(socket_path, 0)]
    if backend == "mpi":
        for agent in reached:
            agent.close()  # mpirun opens its own connections, by `phalanx reach`
        variables |= environment_of("mpi", None, None)
        launcher = shlex.join([sys.executable, "-m", "phalanx", "reach", str(_cluster_file(cluster, socket_path))])
        command = mpirun_on_hosts(
            [host.name for host in cluster.hosts], config.collective, commands, variables, launcher
        )
        own = {**variables, CLUSTER_VARIABLE: secret}
        return RankProcesses({"mpirun": await spawn(command, own)}, pid_files)
    files = _backend_files(choice, cluster, group)
    local_files = {}
    for name, text in files.items():
        file = socket_path.with_suffix(f".{name}.json")
        file.write_text(text)
        local_files[name] = str(file)
    processes: dict[str, Child] = {}
    for rank, command in enumerate(commands):
        own = {**variables, **_backend_variables(choice, cluster, rank, rendezvous)}
        if rank == 0:
            processes["rank 0"] = await spawn(command, {**own, **local_files})
        else:
            processes[f"rank {rank}"] = await reached[rank - 1].run(command, own, files)
    return RankProcesses(processes, pid_files)


def _rank_arguments(config: EngineConfig, group: GroupConfig, socket: str) -> list[str]:
    """The arguments of a rank's Python, without `--rank`."""
    base = ["-m", "phalanx", "rank", config.model, "--socket", socket]
    base += ["--config", msgspec.json.encode(config).decode()]
    return [*base, "--group", msgspec.json.encode(group).decode()]


async def _ring_addresses(cluster: ClusterConfig, reached: Sequence[ReachedAgent], own: int) -> tuple[str, ...]:
    """`ip:port` of every rank, on the first of its host's addresses; `own` is rank 0's port."""
    ports = await asyncio.gather(*(agent.free_ports(agent.host.ips[0], 1) for agent in reached))
    return tuple(
        f"{host.ips[0]}:{port}" for host, port in zip(cluster.hosts, [own, *(p[0] for p in ports)], strict=True)
    )


def _backend_files(choice: ChosenBackend, cluster: ClusterConfig, group: GroupConfig) -> dict[str, str]:
    """Environment variable -> text of the file that it shall name, for MLX's backend."""
    if choice.backend == "ring":
        ports = [address.rpartition(":")[2] for address in group.addresses]
        return {
            "MLX_HOSTFILE": json.dumps(
                [[f"{ip}:{port}" for ip in host.ips] for host, port in zip(cluster.hosts, ports, strict=True)]
            )
        }
    if choice.backend in ("jaccl", "jaccl-ring"):
        return {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in cluster.hosts])}
    return {}


def _backend_variables(choice: ChosenBackend, cluster: ClusterConfig, rank: int, rendezvous: int) -> dict[str, str]:
    """Environment variables from which MLX's backend reads the rank and the first host's address."""
    first = cluster.hosts[0].address
    if choice.backend in ("jaccl", "jaccl-ring"):
        ring = {"MLX_JACCL_RING": "1"} if choice.backend == "jaccl-ring" else {}
        return {"MLX_RANK": str(rank), "MLX_JACCL_COORDINATOR": f"{first}:{COORDINATOR_PORT}", **ring}
    return environment_of(choice.backend, rank, None, size=len(cluster.hosts), meeting=f"{first}:{rendezvous}")


def _cluster_file(cluster: ClusterConfig, socket_path: Path) -> Path:
    """Write the cluster beside the socket, for `phalanx reach`."""
    file = socket_path.with_name("cluster.json")
    file.write_bytes(msgspec.json.encode(cluster))
    return file


async def run_on_agent(cluster: ClusterConfig, secret: str, name: str, words: Sequence[str]) -> int:
    """Run a shell command line on a host and copy its output to stderr, as `mpirun` expects of ssh.

    Args:
        name: of the host, or its address.
        words: joined by spaces, one command line for a shell, as with ssh.

    Returns:
        The command's exit status.

    Raises:
        ConfigError: the cluster has no such host.
        HostUnreachable: the agent does not answer, or cannot run the command; names the host.
    """
    host = next((host for host in cluster.hosts if name in (host.name, host.address)), None)
    if host is None:
        raise ConfigError(f"{name} is not a host of this cluster.")
    agent = await reach(host, cluster.agent_port, secret)
    process = await agent.run(["/bin/sh", "-c", " ".join(words)], {})
    assert process.stderr is not None
    while piece := await process.stderr.read(1 << 16):
        os.write(2, piece)
    return await process.wait()
