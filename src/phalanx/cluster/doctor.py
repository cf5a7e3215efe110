"""Examines all hosts in parallel and compares them with each other (L2, F5). Changes nothing.

Does not know how a host checks itself (`checks.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from phalanx.cluster.check_results import CheckResult, Examination, ExamineRequest, HostFacts, worst
from phalanx.cluster.hostfile import Host, Hostfile
from phalanx.cluster.ssh import Remote
from phalanx.errors import ClusterError
from phalanx.faults import recognise

CLOCK_S = 5.0
TOGETHER = "between hosts"
"""The key of results about several hosts."""

SAME = ("python", "phalanx", "mlx", "mlx-lm")

__all__ = ["TOGETHER", "compare", "examine", "wanted", "worst"]


def wanted(hostfile: Hostfile, *, backend: str, running: bool, **settings: object) -> list[ExamineRequest]:
    """The request to each host. `settings`: model, api_host, api_port, agent_port, guard_gb."""
    hosts = hostfile.placed()
    return [
        ExamineRequest(
            host=host, rank=rank, peers=hosts[:rank] + hosts[rank + 1 :], backend=backend, running=running,
            **settings,  # type: ignore[arg-type]
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


async def examine(
    hostfile: Hostfile, remotes: Sequence[Remote], requests: Sequence[ExamineRequest]
) -> dict[str, list[CheckResult]]:
    """The results by host, in the hosts' order; last, under `TOGETHER`, those about several hosts."""
    answers = await asyncio.gather(
        *(_examine(remote, request) for remote, request in zip(remotes, requests, strict=True))
    )
    results: dict[str, list[CheckResult]] = {}
    facts: dict[str, HostFacts] = {}
    for host, (answer, skew) in zip(hostfile.hosts, answers, strict=True):
        if isinstance(answer, ClusterError):
            fault = recognise(answer.message)
            name = fault.name if fault is not None else "ssh"
            results[host.ssh] = [
                CheckResult(check=name, level="bad", seen=answer.message, wanted="an answer", remedy=answer.remedy)
            ]
        else:
            results[host.ssh] = [CheckResult(check="ssh", level="ok", seen="answers"), _clock(skew), *answer.results]
            facts[host.ssh] = answer.facts
    results[TOGETHER] = list(compare(facts, hostfile, requests[0].backend))
    return results


async def _examine(remote: Remote, request: ExamineRequest) -> tuple[Examination | ClusterError, float]:
    """A host's answer, and the seconds by which its clock differs from this machine's."""
    before = time.time()
    try:
        answer = await remote.call("check", request, Examination)
    except ClusterError as error:
        return error, 0.0
    after = time.time()
    clock = answer.facts.clock
    return answer, max(0.0, before - clock, clock - after)


def _clock(skew: float) -> CheckResult:
    if skew <= CLOCK_S:
        return CheckResult(check="clock", level="ok", seen="agrees with this machine's")
    return CheckResult(
        check="clock",
        level="warning",
        seen=f"differs by {skew:.0f} s from this machine's",
        wanted=f"within {CLOCK_S:g} s",
        remedy="Turn on automatic time (macOS: System Settings > Date & Time; Linux: `timedatectl set-ntp 1`).",
    )


def compare(facts: Mapping[str, HostFacts], hostfile: Hostfile, backend: str) -> Iterator[CheckResult]:
    """Compare the hosts that answered. Pure."""
    yield from _versions(facts)
    yield from _models(facts)
    if backend.startswith("jaccl"):
        yield from _cables(facts, hostfile.hosts)
    yield from _fast_synch(facts, hostfile, backend)


def _versions(facts: Mapping[str, HostFacts]) -> Iterator[CheckResult]:
    for package in SAME:
        by_version: dict[str, list[str]] = {}
        for host, fact in facts.items():
            by_version.setdefault(fact.versions[package] or "missing", []).append(host)
        if len(by_version) > 1:
            seen = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
            yield CheckResult(
                check=f"version of {package}",
                level="bad",
                seen=seen,
                wanted="the same everywhere",
                remedy=f"Install the same {package} on all hosts.",
            )
        elif by_version:
            yield CheckResult(check=f"version of {package}", level="ok", seen=next(iter(by_version)))


def _models(facts: Mapping[str, HostFacts]) -> Iterator[CheckResult]:
    by_digest: dict[str, list[str]] = {}
    for host, fact in facts.items():
        if fact.model is not None:
            by_digest.setdefault(fact.model.digest, []).append(host)
    if len(by_digest) > 1:
        yield CheckResult(
            check="same model",
            level="bad",
            seen="; ".join(f"{digest[:12]} on {', '.join(hosts)}" for digest, hosts in by_digest.items()),
            wanted="the same files everywhere",
            remedy="Run `phalanx model push` from the host that has the right ones.",
        )


def _cables(facts: Mapping[str, HostFacts], hosts: Sequence[Host]) -> Iterator[CheckResult]:
    """Two hosts can use RDMA only if the ports at both ends of their cable are active (F5)."""
    for i, one in enumerate(hosts):
        for j, other in enumerate(hosts[:i]):
            if one.ssh not in facts or other.ssh not in facts or not one.rdma or not other.rdma:
                continue
            ends = [(other.ssh, other.rdma[i]), (one.ssh, one.rdma[j])]
            if ends[0][1] is None:
                continue  # no cable between these two
            down = [
                f"{device} of {host} is {state}"
                for host, devices in ends
                for device in ((devices,) if isinstance(devices, str) else devices or ())
                if (state := _state(facts[host], device)) != "PORT_ACTIVE"
            ]
            cable = f"cable {other.ssh} - {one.ssh}"
            if down:
                yield CheckResult(
                    check=cable,
                    level="bad",
                    seen=", ".join(down),
                    wanted="PORT_ACTIVE at both ends",
                    remedy=f"Re-seat or replace the Thunderbolt cable between {other.ssh} and {one.ssh}; then "
                    "`phalanx net setup`. `--backend ring` works without it.",
                )
            else:
                yield CheckResult(check=cable, level="ok", seen="active at both ends")


def _state(facts: HostFacts, device: str) -> str:
    return next((port.state for port in facts.rdma.ports if port.device == device), "missing")


def _fast_synch(facts: Mapping[str, HostFacts], hostfile: Hostfile, backend: str) -> Iterator[CheckResult]:
    """Advice on a setting that has advantages and disadvantages; only for jaccl, which it concerns."""
    if not backend.startswith("jaccl"):
        return
    on = any(entry.startswith("MLX_METAL_FAST_SYNCH=1") for entry in hostfile.envs)
    yield CheckResult(
        check="MLX_METAL_FAST_SYNCH",
        level="ok",
        seen="1 in the hostfile's envs: fast; MLX's authors call it buggy (rare deadlocks, which the watchdog ends)"
        if on
        else "not set: safe; some machines are several times slower without it",
        remedy="Leave it out if groups are ended as wedged." if on else 'Try "envs": ["MLX_METAL_FAST_SYNCH=1"].',
    )
