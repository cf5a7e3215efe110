"""What an examination of hosts is made of: questions, facts, results. Plain data; does not look at anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from phalanx.cluster.machine import Bridge, Interface, Rdma
from phalanx.config import AGENT_PORT, DEFAULT_PORT, HostConfig

Level = Literal["ok", "warning", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "bad")


class CheckResult(Struct, frozen=True, kw_only=True):
    """One thing that was looked at on a host, or between hosts."""

    check: str
    level: Level
    seen: str
    wanted: str = ""
    remedy: str = ""


class Wanted(Struct, frozen=True, kw_only=True):
    """What a host is examined for."""

    host: HostConfig
    rank: int
    peers: tuple[HostConfig, ...] = ()  # the other hosts
    backend: str = "auto"
    model: str | None = None
    api_host: str = "127.0.0.1"
    api_port: int = DEFAULT_PORT
    agent_port: int = AGENT_PORT
    guard_gb: float | None = None
    running: bool = False  # a cluster may be running: its processes and ports are no fault


class ModelFacts(Struct, frozen=True, kw_only=True):
    """A model's files on a host."""

    path: str
    bytes: int  # of weights
    digest: str  # of names, sizes, config and index: equal where the model is


class Facts(Struct, frozen=True, kw_only=True):
    """What is compared between hosts."""

    host: str
    system: str
    clock: float  # seconds since the epoch
    versions: dict[str, str]  # python, phalanx, mlx, mlx-lm; "" is not installed
    interfaces: list[Interface] = []
    bridge: Bridge | None = None
    rdma: Rdma = Rdma(enabled=None)
    model: ModelFacts | None = None


class Examination(Struct, frozen=True, kw_only=True):
    """A host's answer."""

    facts: Facts
    results: list[CheckResult]


def worst(results: Iterable[CheckResult]) -> Level:
    """The level of the gravest result."""
    return LEVELS[max((LEVELS.index(result.level) for result in results), default=0)]
