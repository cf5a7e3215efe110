"""The plain data of `phalanx doctor`: requests to hosts, facts about hosts, results of checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.cluster.machine import Bridge, Interface, Rdma
from phalanx.config import AGENT_PORT, DEFAULT_PORT, GATEWAY_PORT, HostConfig
from phalanx.dist.topology import Parts

Level = Literal["ok", "warning", "bad"]
MAX_GPUS = 1024  # of a host: more than any has
RUNNING = "running"
"""The check of a host on which something runs that `up` has started."""
MAX_RESULTS = 200  # of a host; there are some twenty checks
LEVELS: tuple[Level, ...] = ("ok", "warning", "bad")


class CheckResult(Struct, frozen=True, kw_only=True):
    """The result of one check of a host, or of several hosts together."""

    check: str  # its name
    level: Level
    seen: str  # the state that the check found
    wanted: str = ""  # the state that it should be
    remedy: str = ""


def good(check: str, seen: str) -> CheckResult:
    """No action is needed."""
    return CheckResult(check=check, level="ok", seen=seen)


def bad(check: str, seen: str, wanted: str, remedy: str) -> CheckResult:
    """A cluster would not start, or not work."""
    return CheckResult(check=check, level="bad", seen=seen, wanted=wanted, remedy=remedy)


def warning(check: str, seen: str, wanted: str, remedy: str) -> CheckResult:
    """A cluster works, but not as well as it could, or not for long."""
    return CheckResult(check=check, level="warning", seen=seen, wanted=wanted, remedy=remedy)


class ExamineRequest(Struct, frozen=True, kw_only=True):
    """The role of a host in a cluster, for which it is to be examined."""

    host: HostConfig
    rank: int
    peers: tuple[HostConfig, ...] = ()  # the other hosts
    backend: str = "auto"
    model: str | None = None
    staged: bool = False  # the ranks form several stages
    api_host: str = "127.0.0.1"
    api_port: int = DEFAULT_PORT
    agent_port: int = AGENT_PORT
    guard_gb: float | None = None
    gateway: str | None = None  # address that a gateway on this host will bind; None: there is none
    gateway_port: int = GATEWAY_PORT
    has_rank: bool = True  # else there is only the gateway
    running: bool = False  # a running cluster's processes and ports are not faults


class ModelFacts(Struct, frozen=True, kw_only=True):
    """A model's files on a host."""

    path: str
    bytes: int  # of weights
    digest: str  # of names, sizes, config and index: equal on hosts with the same model


class HostFacts(Struct, frozen=True, kw_only=True):
    """The facts about a host that are compared between hosts."""

    host: str
    system: str
    clock: float  # seconds since the epoch
    versions: dict[str, str]  # python, phalanx, mlx, mlx-lm; "" if not installed
    interfaces: list[Interface] = []
    bridge: Bridge | None = None
    rdma: Rdma = Rdma(enabled=None)
    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS)] = 0  # of NVIDIA, that MLX can use
    model: ModelFacts | None = None
    # Where ranks form stages and none runs:
    room: int | None = None  # bytes for weights; None: not known
    parts: Parts | None = None  # of the model, if it can be cut; the first host's
    uncut: str = ""  # why it cannot


class Examination(Struct, frozen=True, kw_only=True):
    """A host's answer to an `ExamineRequest`."""

    facts: HostFacts
    results: Annotated[list[CheckResult], Meta(max_length=MAX_RESULTS)]


def worst(results: Iterable[CheckResult]) -> Level:
    """The worst level among results; "ok" without any."""
    return LEVELS[max((LEVELS.index(result.level) for result in results), default=0)]
