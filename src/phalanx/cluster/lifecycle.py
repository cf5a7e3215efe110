"""Starts, stops and observes a cluster from any machine that can reach its hosts by ssh (L1, L4, L5).

The first host gets a supervisor with the server, every other host one with an agent. After that, this machine is not
needed. Does not know how a host does its part (`host.py`), nor how results are printed (`cli/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import get_args

import msgspec
from msgspec import Struct

from phalanx.cluster.host import HostStatus, LogLines, LogRequest, StopRequest, flag
from phalanx.cluster.hostfile import Hostfile
from phalanx.cluster.ssh import Remote, on_all
from phalanx.cluster.supervisor import KILL_HOLD_S, Spec, Stopped, SupervisorStarted
from phalanx.config import AGENT_PORT, CLUSTER_VARIABLE, DEFAULT_PORT, Backend, ClusterConfig
from phalanx.errors import ClusterError, ConfigError, StartFailed
from phalanx.faults import recognise

CLUSTER_FILE = ".phalanx/run/cluster.json"
LOGS = ".phalanx/logs"
DRAIN_S = "8"  # less than the time after which `down` kills
SSH_MARGIN_S = 60.0  # in addition to a verb's own time limit


class Plan(Struct, frozen=True, kw_only=True):
    """A cluster to start."""

    hostfile: Hostfile
    serve: tuple[str, ...] = ("demo",)  # arguments of `phalanx serve`
    backend: str = "auto"
    envs: tuple[str, ...] = ()
    timeout_s: float = 600.0
    log_dir: str = LOGS
    agent_port: int = AGENT_PORT
    python: str = sys.executable

    def remotes(self) -> list[Remote]:
        return [Remote(host.ssh, python=self.python) for host in self.hostfile.hosts]


OURS = ("--tp", "-tp", "--tensor-parallel-size", "--cluster", "--backend", "--attach")
"""Flags of `serve` that `up` sets itself."""


def check(plan: Plan) -> Plan:
    """Check a plan, and return it.

    Raises:
        ConfigError: names the flag.
    """
    for word in plan.serve:
        if word.partition("=")[0] in OURS:
            raise ConfigError(
                f"{word} after `--`: `up` sets it itself.", remedy="Use --num-ranks and --backend before the `--`."
            )
    port = flag(list(plan.serve), "--port") or str(DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--port {port}: a cluster needs a port that is known before.", remedy="Give 1 to 65535.")
    backend = backend_of(plan)
    if backend not in ("auto", *get_args(Backend)):
        raise ConfigError(f"--backend {backend} is not one.", remedy=f"Known: {', '.join(get_args(Backend))}.")
    if backend in ("jaccl", "jaccl-ring") and not all(host.rdma for host in plan.hostfile.hosts):
        raise ConfigError(
            f"--backend {backend} needs `rdma` for every host in the hostfile.",
            remedy="`phalanx hostfile --hosts ...` finds the devices; or use --backend ring.",
        )
    return plan


def backend_of(plan: Plan) -> str:
    """The backend of the flag, else of the hostfile, else auto."""
    return plan.backend if plan.backend != "auto" else plan.hostfile.backend or "auto"


def model_of(plan: Plan) -> str:
    """The model to serve: the first word after `--`, unless that is a flag; else the demo."""
    return "demo" if not plan.serve or plan.serve[0].startswith("-") else plan.serve[0]


def specs(plan: Plan, secret: str) -> list[Spec]:
    """The specification of each host's supervisor, in rank order."""
    hosts = plan.hostfile.placed()
    variables = dict(entry.partition("=")[::2] for entry in (*plan.hostfile.envs, *plan.envs))
    cluster = ClusterConfig(
        hosts=hosts, agent_port=plan.agent_port, envs=tuple(f"{name}={value}" for name, value in variables.items())
    )
    serve = ["serve", *plan.serve]
    if flag(serve, "--drain-seconds") is None:
        serve += ["--drain-seconds", DRAIN_S]
    files = {}
    if len(hosts) > 1:
        serve += ["--tp", str(len(hosts)), "--backend", backend_of(plan), "--cluster", CLUSTER_FILE]
        files = {"cluster.json": msgspec.json.encode(cluster).decode()}
    exported = {CLUSTER_VARIABLE: secret, **variables}
    specs = [Spec(role="server", command=serve, variables=exported, log=f"{plan.log_dir}/rank-0.log", files=files)]
    for rank, host in enumerate(hosts[1:], 1):
        command = ["agent", "--host", host.address, "--port", str(plan.agent_port), "--directory", ".phalanx/run/agent"]
        specs.append(Spec(role="agent", command=command, variables=exported, log=f"{plan.log_dir}/rank-{rank}.log"))
    return specs


async def start_all(plan: Plan) -> dict[str, SupervisorStarted]:
    """Start the supervisors on all hosts in parallel (the server waits for its agents): all of them, or none.

    Raises:
        ClusterError: a host could not start its supervisor; the others were stopped again.
    """
    return await _start(list(zip(plan.remotes(), specs(plan, secrets.token_hex(32)), strict=True)))


async def _start(todo: Sequence[tuple[Remote, Spec]]) -> dict[str, SupervisorStarted]:
    tasks = {
        remote: asyncio.create_task(remote.call("start", spec, SupervisorStarted, timeout_s=SSH_MARGIN_S + KILL_HOLD_S))
        for remote, spec in todo
    }
    try:
        await asyncio.wait(tasks.values())
        return {remote.name: task.result() for remote, task in tasks.items()}
    except (ClusterError, asyncio.CancelledError):
        for task in tasks.values():
            task.cancel()
        answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
        started = [
            remote for remote, answer in zip(tasks, answers, strict=True) if isinstance(answer, SupervisorStarted)
        ]
        await on_all(started, "stop", StopRequest(), Stopped)
        raise


class Cluster:
    """The statuses of all hosts, kept up to date through one ssh connection to each."""

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.statuses: dict[str, HostStatus | None] = {remote.name: None for remote in remotes}
        self.problems: dict[str, str] = {}
        self._remotes = list(remotes)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Cluster]:
        """A context in which the statuses are kept up to date."""
        tasks = [asyncio.create_task(self._follow(remote)) for remote in self._remotes]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, remote: Remote) -> None:
        while True:
            try:
                async for status in remote.listen("watch", {}, HostStatus):
                    self.statuses[remote.name] = status
                    self.problems.pop(remote.name, None)
            except ClusterError as error:
                self.problems[remote.name] = str(error)
            await asyncio.sleep(1.0)


async def wait_healthy(plan: Plan, cluster: Cluster, show: Callable[[Cluster], None]) -> None:
    """Wait until the server is healthy.

    Raises:
        StartFailed: a host failed to start; has the first cause, the host and the remedy.
        ClusterError: the server was not healthy within the plan's timeout.
    """
    deadline = time.monotonic() + plan.timeout_s
    first = plan.hostfile.hosts[0].ssh
    started: dict[str, int] = {}  # host -> process that was started first
    while True:
        show(cluster)
        for name, status in cluster.statuses.items():
            if status is None:
                continue
            if (cause := final_cause(name, status)) is not None:
                raise cause
            if status.child is not None and started.setdefault(name, status.child) != status.child:
                raise _caused(name, f"its {status.role} crashed while it started", status)
        server = cluster.statuses[first]
        if server is not None and server.health is not None and server.health.ok:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Not healthy after {plan.timeout_s:g} s: {_why_late(first, cluster)}",
                remedy="It goes on starting: `phalanx status` shows how far it is. Give a larger --timeout.",
            )
        await asyncio.sleep(0.2)


def _why_late(first: str, cluster: Cluster) -> str:
    """The server's reason for not being ready, and the hosts that do not answer this machine."""
    server = cluster.statuses[first]
    health = None if server is None or first in cluster.problems else server.health
    reasons = ["no status came"] if health is None and not cluster.problems else []
    reasons += [health.reason] if health is not None and health.reason else []
    return " ".join([*reasons, *cluster.problems.values()])


def final_cause(name: str, status: HostStatus) -> StartFailed | None:
    """Why a host's start failed for good; None if it may still succeed."""
    if status.health is not None and status.health.phase == "failed":
        return _caused(name, status.health.reason, status)
    if status.ended is not None:
        return _caused(name, f"its {status.role} ended with status {status.ended}: {status.last_line}", status)
    return None


def _caused(name: str, said: str, status: HostStatus) -> StartFailed:
    fault = recognise(said)
    cause, remedy = (fault.cause, fault.remedy) if fault is not None else (status.fault, status.remedy)
    return StartFailed(
        f"{name}: {said}" + (f" ({cause})" if cause else ""), remedy=remedy or f"See {status.log} there."
    )


async def stop_all(remotes: Sequence[Remote], *, timeout_s: float, force: bool) -> dict[str, Stopped | ClusterError]:
    """Send SIGTERM on all hosts in parallel, wait, and SIGKILL remaining processes. Returns each host's report."""
    request = StopRequest(timeout_s=timeout_s, force=force)
    answers = await asyncio.gather(
        *(remote.call("stop", request, Stopped, timeout_s=timeout_s + SSH_MARGIN_S) for remote in remotes),
        return_exceptions=True,
    )
    result: dict[str, Stopped | ClusterError] = {}
    for remote, answer in zip(remotes, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, ClusterError):
            raise answer
        result[remote.name] = answer
    return result


async def statuses(remotes: Sequence[Remote]) -> Mapping[str, HostStatus | ClusterError]:
    """The current status of every host."""
    return await on_all(remotes, "status", {}, HostStatus)


async def restart_all(remotes: Sequence[Remote], *, timeout_s: float) -> None:
    """Stop all hosts and start them again with the same specifications.

    Raises:
        ClusterError: a host does not answer, or nothing was started there.
    """
    answers = await on_all(remotes, "spec", {}, Spec)
    specs: list[Spec] = []
    for answer in answers.values():
        if isinstance(answer, ClusterError):
            raise answer
        specs.append(answer)
    for name, stopped in (await stop_all(remotes, timeout_s=timeout_s, force=False)).items():
        if isinstance(stopped, ClusterError):
            raise stopped
        if stopped.left:
            raise ClusterError(f"{name}: {', '.join(stopped.left)} cannot be ended.", remedy="Reboot that host.")
    await _start(list(zip(remotes, specs, strict=True)))


async def read_logs(
    remotes: Sequence[Remote], lines: int, follow: bool, show: Callable[[str, str], None]
) -> list[ClusterError]:
    """Read the logs of hosts and call `show(host, line)` for each line. With `follow`, runs until cancelled.

    Returns:
        The errors of hosts whose logs could not be read.
    """
    answers = await asyncio.gather(
        *(_read_log(remote, lines, follow, show) for remote in remotes), return_exceptions=True
    )
    problems = [one for one in answers if isinstance(one, BaseException)]
    for problem in problems:
        if not isinstance(problem, ClusterError):
            raise problem
    return [problem for problem in problems if isinstance(problem, ClusterError)]


async def _read_log(remote: Remote, lines: int, follow: bool, show: Callable[[str, str], None]) -> None:
    async for piece in remote.listen("logs", LogRequest(lines=lines, follow=follow), LogLines):
        for line in piece.lines:
            show(remote.name, line)
        if piece.over:
            return
