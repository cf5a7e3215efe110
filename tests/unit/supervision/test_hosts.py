"""Ranks know their hosts by the names of the cluster's file: machines' own names do not tell them apart."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.channels import meeting

from phalanx.config import ClusterConfig, EngineConfig, GroupConfig, HostConfig
from phalanx.dist.collective_backend import ChosenBackend
from phalanx.engine.link import SingleRank
from phalanx.engine.rendezvous import identity
from phalanx.supervision import host_ranks
from phalanx.supervision.agent_protocol import AgentWelcome, RunRank
from phalanx.supervision.host_ranks import KnownCluster, start_on_hosts
from phalanx.supervision.remote import ReachedAgent
from phalanx.tls.certificates import make_credentials

CLUSTER = ClusterConfig(
    hosts=tuple(HostConfig(name=name, address="127.0.0.1", ips=("127.0.0.1",)) for name in ("studio1", "studio2"))
)


def same_name() -> str:
    return "Mac-Studio.local"


class Agent(ReachedAgent):
    """An agent that runs nothing and keeps what it is asked to run."""

    def __init__(self, host: HostConfig, commands: list[Sequence[str]]) -> None:
        super().__init__(host, None, AgentWelcome("python", "/run/agent", "/run/credentials"))  # type: ignore[arg-type]
        self._commands = commands

    async def free_ports(self, address: str, count: int) -> list[int]:
        return [5000 + i for i in range(count)]

    async def run(self, program: Any) -> Any:
        assert isinstance(program, RunRank)
        self._commands.append(program.arguments)


def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GroupConfig]:
    """What each rank of the cluster is told of its group."""
    commands: list[Sequence[str]] = []

    async def reach(host: HostConfig, *_: Any, **__: Any) -> ReachedAgent:
        return Agent(host, commands)

    async def spawn(command: Sequence[str], variables: dict[str, str]) -> None:
        commands.append(command)

    monkeypatch.setattr(host_ranks, "reach", reach)
    monkeypatch.setattr(host_ranks, "spawn", spawn)
    known = KnownCluster(CLUSTER, tmp_path / "cluster.json", make_credentials(["a", "b"])[0], tmp_path / "credentials")
    config = EngineConfig(model="demo", tensor_parallel_size=2)
    asyncio.run(start_on_hosts(config, ChosenBackend("ring", ""), tmp_path / "engine.sock", known))
    return [msgspec.json.decode(words[words.index("--group") + 1], type=GroupConfig) for words in commands]


def test_two_macs_of_one_name_are_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", same_name)
    told = groups(tmp_path, monkeypatch)
    assert len(told) == 2
    assert [identity(group, rank).host for rank, group in enumerate(told)] == ["studio1", "studio2"]


def test_without_a_clusters_file_the_machines_own_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", same_name)
    assert identity(meeting("/run/control", 2), 1).host == "Mac-Studio.local"
    assert SingleRank().host == "Mac-Studio.local"
