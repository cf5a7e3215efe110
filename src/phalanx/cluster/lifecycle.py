"""Starts, stops and observes a cluster from any machine that can reach its hosts by ssh.

A supervisor on the group's first host runs the server, one on every other host runs an agent, and one on the gateway's
host the gateway. The cluster then runs without this machine. `host_verbs.py` is the hosts' side.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.deployment import Deployment, new_keys, placed
from phalanx.cluster.host_status import GatewayStatus, HostReport, HostStatus
from phalanx.cluster.host_verbs import LogLines, LogRequest, Part, StartedHere, StopRequest
from phalanx.cluster.plans import new_credentials
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.ssh import Remote, on_all
from phalanx.cluster.supervisor import GATEWAY, KILL_HOLD_S, Spec, Stopped, SupervisorStarted
from phalanx.errors import ClusterError, ConfigError, StartFailed
from phalanx.faults import recognise

LOGS_OF_A_HOST = 2  # of a server or an agent, and of a gateway
SSH_MARGIN_S = 60.0  # in addition to a verb's own time limit


class Goal(Struct, frozen=True, kw_only=True):
    """The state in which a cluster, or its started part, is healthy. Hosts are named as for ssh."""

    hosts: tuple[str, ...]  # where something was started
    servers: tuple[str, ...]  # those whose server must be healthy
    gateway: str | None = None  # the host of a gateway that must use these replicas, if it can be asked
    replicas: tuple[str, ...] = ()


def goal_of(deployment: Deployment) -> Goal:
    """All servers are healthy, and the gateway uses all of them."""
    hosts = tuple(host.ssh for host in deployment.hosts)
    if (layout := deployment.layout) is None:
        return Goal(hosts=hosts, servers=hosts[:1])
    return Goal(hosts=hosts, servers=layout.servers, gateway=layout.gateway, replicas=tuple(layout.replicas))


async def start_all(deployment: Deployment) -> None:
    """Start the supervisors on all hosts in parallel (the server waits for its agents): all of them, or none.

    Raises:
        ClusterError: a host could not start its supervisor; the others were stopped again.
    """
    remotes = {remote.name: remote for remote in deployment.remotes()}
    await _start([(remotes[name], spec) for name, spec in placed(deployment, new_keys(len(deployment.groups)))])


async def _start(todo: Sequence[tuple[Remote, Spec]]) -> None:
    tasks = [
        asyncio.create_task(remote.call("start", spec, SupervisorStarted, timeout_s=SSH_MARGIN_S + KILL_HOLD_S))
        for remote, spec in todo
    ]
    try:
        await asyncio.wait(tasks)
        for task in tasks:
            task.result()
    except (ClusterError, asyncio.CancelledError):
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        started = [
            remote.call("stop", StopRequest(only=_part_of(spec)), Stopped)
            for (remote, spec), answer in zip(todo, answers, strict=True)
            if isinstance(answer, SupervisorStarted)
        ]
        await asyncio.gather(*started, return_exceptions=True)
        raise


class Cluster:
    """The statuses of all hosts, kept up to date through one ssh connection to each."""

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.statuses: dict[str, HostStatus | None] = {remote.name: None for remote in remotes}
        self.problems: dict[str, str] = {}
        self.gateway: GatewayStatus | None = None
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
                async for report in remote.listen("watch", {}, HostReport):
                    self.statuses[remote.name] = report.status
                    self.gateway = report.gateway or self.gateway
                    self.problems.pop(remote.name, None)
            except ClusterError as error:
                self.problems[remote.name] = str(error)
            await asyncio.sleep(1.0)


async def wait_healthy(goal: Goal, cluster: Cluster, show: Callable[[Cluster], None], *, timeout_s: float) -> None:
    """Wait until all servers are healthy, and the gateway uses them.

    Raises:
        StartFailed: a host failed to start; has the first cause, the host and the remedy.
        ClusterError: a server was not healthy within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    started: dict[tuple[str, str], int] = {}  # host and role -> process that was started first
    while True:
        show(cluster)
        for name, status in _looked_at(goal, cluster):
            if (cause := final_cause(name, status)) is not None:
                raise cause
            if status.child is not None and started.setdefault((name, status.role), status.child) != status.child:
                raise _caused(name, f"its {status.role} crashed while it started", status)
        late = [host for host in goal.servers if not _is_healthy(cluster.statuses[host])]
        if not late and _gateway_uses(goal, cluster):
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Not healthy after {timeout_s:g} s: {_why_late(late, cluster)}",
                remedy="It goes on starting: `phalanx status` shows how far it is. Give a larger --timeout.",
            )
        await asyncio.sleep(0.2)


def _looked_at(goal: Goal, cluster: Cluster) -> Iterator[tuple[str, HostStatus]]:
    """Host and status of everything that must not fail: servers and agents, then the gateway."""
    for host in goal.hosts if goal.servers else ():
        if (status := cluster.statuses[host]) is not None:
            yield host, status
    if goal.gateway is not None and cluster.gateway is not None:
        yield goal.gateway, cluster.gateway.process


def _is_healthy(status: HostStatus | None) -> bool:
    return status is not None and status.health is not None and status.health.ok


def _gateway_uses(goal: Goal, cluster: Cluster) -> bool:
    """Whether the gateway uses the replicas. An unreachable gateway counts as one that does."""
    if goal.gateway is None or goal.gateway in cluster.problems:
        return True
    if (gateway := cluster.gateway) is None:
        return False
    if gateway.process.supervisor is None and gateway.process.child is None:  # its host has been off
        return True
    return all(gateway.replicas.get(name) == "ok" for name in goal.replicas)


def _why_late(late: Sequence[str], cluster: Cluster) -> str:
    """The servers' reasons for not being ready, else the gateway's, and the hosts that do not answer this machine."""
    reasons = []
    for host in late:
        server = cluster.statuses[host]
        health = None if server is None or host in cluster.problems else server.health
        reasons += ["no status came"] if health is None and not cluster.problems else []
        reasons += [health.reason] if health is not None and health.reason else []
    if not late:
        health = None if cluster.gateway is None else cluster.gateway.process.health
        reasons += ["no status of the gateway came" if health is None else f"the gateway: {health.reason}"]
    return " ".join([*reasons, *cluster.problems.values()])


def final_cause(name: str, status: HostStatus) -> StartFailed | None:
    """Why a host's start failed for good; None if it may still succeed."""
    if status.health is not None and status.health.phase == "failed":
        return _caused(name, status.health.reason, status)
    if status.ended is not None:
        return _caused(name, f"its {status.role} ended with status {status.ended}: {status.last_line}", status)
    return None


def _caused(name: str, reason: str, status: HostStatus) -> StartFailed:
    fault = recognise(reason)
    cause, remedy = (fault.cause, fault.remedy) if fault is not None else (status.fault, status.remedy)
    return StartFailed(
        f"{name}: {reason}" + (f" ({cause})" if cause else ""),
        remedy=remedy or f"`phalanx logs` shows its log ({status.log} there).",
    )


async def stop_all(
    remotes: Sequence[Remote], *, timeout_s: float, force: bool = False, only: Part | None = None
) -> dict[str, Stopped | ClusterError]:
    """Send SIGTERM on all hosts in parallel, wait, and SIGKILL remaining processes. Returns each host's report.

    Args:
        only: end only this part of what runs on a host.
    """
    request = StopRequest(timeout_s=timeout_s, force=force, only=only)
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


async def statuses(remotes: Sequence[Remote]) -> Mapping[str, HostReport | ClusterError]:
    """The current state of every host."""
    return await on_all(remotes, "status", {}, HostReport)


def layout_in(reports: Iterable[HostReport | ClusterError]) -> ReplicaLayout | None:
    """The replicas of a cluster, as its hosts know them; None if there is no gateway, or nothing was started.

    A host whose processes run counts before one that has only kept its files, perhaps of an earlier cluster.
    """
    found = [report for report in reports if isinstance(report, HostReport) and report.layout is not None]
    found.sort(key=lambda report: report.status.child is None and report.gateway is None)
    return found[0].layout if found else None


async def restart_all(remotes: Sequence[Remote], *, part: str | None, timeout_s: float) -> Goal:
    """Stop the started processes and start them again with the same specifications and new credentials.

    Args:
        part: only this replica, or "gateway"; hosts of the others need not answer.

    Returns:
        When that is healthy again.

    Raises:
        ClusterError: a host does not answer, or nothing was started there.
        ConfigError: there is no such replica, or the remotes are not all of its hosts.
    """
    answers = await on_all(remotes, "spec", {}, StartedHere, whole=True)
    layout = _layout_of(answers)
    goal = goal_of_restart(layout, part, [remote.name for remote in remotes])
    only: Part | None = None if part is None else "gateway" if part == GATEWAY else "group"
    chosen = [remote for remote in remotes if remote.name in goal.hosts]
    found: list[tuple[Remote, Spec]] = []
    for remote in chosen:
        answer = answers[remote.name]
        if isinstance(answer, ClusterError):
            raise answer
        found += [(remote, spec) for spec in answer.specs if only in (None, _part_of(spec))]
    for name, stopped in (await stop_all(chosen, timeout_s=timeout_s, only=only)).items():
        if isinstance(stopped, ClusterError):
            raise stopped
        if stopped.left:
            raise ClusterError(f"{name}: {', '.join(stopped.left)} cannot be ended.", remedy="Reboot that host.")
    await _start(_renewed(found, layout))
    return goal


def _layout_of(answers: Mapping[str, StartedHere | ClusterError]) -> ReplicaLayout | None:
    return next((one.layout for one in answers.values() if isinstance(one, StartedHere) and one.layout), None)


def _part_of(spec: Spec) -> Part:
    return "gateway" if spec.role == GATEWAY else "group"


def goal_of_restart(layout: ReplicaLayout | None, part: str | None, names: Sequence[str]) -> Goal:
    """The parts to stop and start, and the parts that must be healthy in the end.

    Args:
        part: a replica, or "gateway"; None: everything.
        names: of the hosts that may be used.

    Raises:
        ConfigError: there is no such part, or hosts are missing.
    """
    if layout is None:
        if part is not None:
            raise ConfigError(f"There is no replica {part!r}.", remedy="`phalanx up --replicas N` starts several.")
        return Goal(hosts=tuple(names), servers=tuple(names[:1]))
    if part is None:
        hosts, servers, replicas = layout.hosts, layout.servers, tuple(layout.replicas)
    elif part == GATEWAY:
        hosts, servers, replicas = (layout.gateway,), (), ()
    else:
        hosts, replicas = layout.hosts_of(part), (part,)
        servers = hosts[:1]
    if missing := [host for host in hosts if host not in names]:
        raise ConfigError(
            f"{', '.join(missing)} must be named as well.", remedy=f"The cluster has {', '.join(layout.hosts)}."
        )
    gateway = layout.gateway if layout.gateway in names else None
    return Goal(hosts=hosts, servers=servers, gateway=gateway, replicas=replicas)


def _renewed(found: Sequence[tuple[Remote, Spec]], layout: ReplicaLayout | None) -> list[tuple[Remote, Spec]]:
    """The specifications with new credentials, which each group of hosts shares."""
    groups = [[remote.name for remote, _ in found]] if layout is None else list(layout.replicas.values())
    known = {name: credentials for names in groups for name, credentials in zip_longest(names, new_credentials(names))}
    for remote, spec in found:
        if spec.role != GATEWAY and remote.name not in known:
            raise ClusterError(
                f"{remote.name} says that it runs the {spec.role} of a replica, but no replica has it.",
                remedy="`phalanx down`, then `phalanx up`.",
            )
    return [
        (remote, spec if spec.role == GATEWAY else replace(spec, credentials=known[remote.name]))
        for remote, spec in found
    ]


async def remotes_of(remotes: Sequence[Remote], replica: str) -> list[Remote]:
    """Those of one replica's hosts, in rank order.

    Raises:
        ConfigError: there is no such replica, or one of its hosts was not named.
    """
    answers = await on_all(remotes, "spec", {}, StartedHere, whole=True)
    goal = goal_of_restart(_layout_of(answers), replica, [remote.name for remote in remotes])
    by_name = {remote.name: remote for remote in remotes}
    return [by_name[host] for host in goal.hosts]


async def read_logs(
    remotes: Sequence[Remote], request: LogRequest, show: Callable[[str, str], None]
) -> list[ClusterError]:
    """Read the logs of hosts and call `show(host, line)` for each line. With `follow`, runs until cancelled.

    Returns:
        The errors of hosts whose logs could not be read.
    """
    answers = await asyncio.gather(*(_read_log(remote, request, show) for remote in remotes), return_exceptions=True)
    problems = [one for one in answers if isinstance(one, BaseException)]
    for problem in problems:
        if not isinstance(problem, ClusterError):
            raise problem
    return [problem for problem in problems if isinstance(problem, ClusterError)]


async def _read_log(remote: Remote, request: LogRequest, show: Callable[[str, str], None]) -> None:
    left = LOGS_OF_A_HOST * request.lines
    async with contextlib.aclosing(remote.listen("logs", request, LogLines)) as pieces:
        async for piece in pieces:
            left -= len(piece.lines)
            if left < 0 and not request.follow:
                raise ClusterError(f"{remote.name} sends more than the {request.lines} lines that it was asked for.")
            for line in piece.lines:
                show(f"{remote.name} {piece.of}" if piece.of else remote.name, line)
            if piece.over:
                return
