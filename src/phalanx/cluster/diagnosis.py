"""Examines all hosts in parallel and compares them with each other. Changes nothing.

`checks.py` has the checks that each host runs on itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from phalanx import __version__
from phalanx.cluster.argument_flags import flag_value
from phalanx.cluster.check_results import CheckResult, Examination, ExamineRequest, HostFacts, bad, worst
from phalanx.cluster.deployment import Deployment
from phalanx.cluster.host_status import serve_address
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.plans import backend_of, model_of
from phalanx.cluster.shape import Shape, shape_of
from phalanx.cluster.ssh import Remote
from phalanx.config import GATEWAY_PORT
from phalanx.dist.topology import Room, Topology, split_layers
from phalanx.errors import ClusterError, ConfigError, MemoryShortage
from phalanx.faults import recognise
from phalanx.memory import GB

CLOCK_S = 5.0  # by which clocks may differ: logs of hosts can still be read side by side
MAX_LAYERS = 300  # twice those of the deepest models; the time to share them out grows with their cube
TOGETHER = "between hosts"
"""The key of results about several hosts."""

SAME = ("python", "phalanx", "mlx", "mlx-lm")

__all__ = ["TOGETHER", "compare", "examine", "wanted", "wanted_of", "worst"]


def wanted(hostfile: Hostfile, *, backend: str, running: bool, **settings: object) -> list[ExamineRequest]:
    """The request to each host. `settings`: model, staged, api_host, api_port, agent_port, guard_gb."""
    hosts = hostfile.placed()
    return [
        ExamineRequest(
            host=host, rank=rank, peers=hosts[:rank] + hosts[rank + 1 :], backend=backend, running=running,
            **settings,  # type: ignore[arg-type]
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def wanted_of(deployment: Deployment) -> list[ExamineRequest]:
    """The check request for each host of the group to start, in the order of its hosts."""
    found = [
        request
        for plan in deployment.groups
        for request in wanted(
            plan.hostfile, backend=backend_of(plan), running=False, model=model_of(plan), agent_port=plan.agent_port,
            staged=shape_of(plan.serve).stages > 1,
            api_host=flag_value(plan.serve, "--host") or serve_address(plan.serve)[0],
            api_port=serve_address(plan.serve)[1],
        )
    ]  # fmt: skip
    if (gateway := deployment.gateway) is None:
        return found
    bound = flag_value(gateway.flags, "--host") or "127.0.0.1"
    port = serve_address(gateway.flags, GATEWAY_PORT)[1]
    if gateway.host.ssh not in [request.host.name for request in found]:
        (alone,) = Hostfile(hosts=(gateway.host,)).placed()
        found.append(ExamineRequest(host=alone, rank=0, has_rank=False, agent_port=found[0].agent_port))
    servers = [request.host for request in found if request.rank == 0 and request.has_rank]
    return [
        replace(
            request, gateway=bound, gateway_port=port,
            peers=tuple(dict.fromkeys([*request.peers, *(host for host in servers if host != request.host)])),
        )
        if request.host.name == gateway.host.ssh
        else request
        for request in found
    ]  # fmt: skip


async def examine(
    groups: Sequence[Hostfile], remotes: Sequence[Remote], requests: Sequence[ExamineRequest], shape: Shape
) -> dict[str, list[CheckResult]]:
    """The results by host, in the hosts' order; last, under `TOGETHER`, those about several hosts.

    Args:
        groups: the hosts whose ranks work together; one host more may have no rank.
        shape: of each group.
    """
    answers = await asyncio.gather(
        *(_examine(remote, request) for remote, request in zip(remotes, requests, strict=True))
    )
    results: dict[str, list[CheckResult]] = {}
    facts: dict[str, HostFacts] = {}
    for remote, request, (answer, skew) in zip(remotes, requests, answers, strict=True):
        if isinstance(answer, ClusterError):
            fault = recognise(answer.message)
            name = fault.name if fault is not None else "ssh"
            results[remote.name] = [
                CheckResult(check=name, level="bad", seen=answer.message, wanted="an answer", remedy=answer.remedy)
            ]
        else:
            results[remote.name] = [CheckResult(check="ssh", level="ok", seen="answers"), _clock(skew), *answer.results]
            if request.has_rank:
                facts[remote.name] = answer.facts
    results[TOGETHER] = list(compare(facts, groups, requests[0].backend, shape))
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


def compare(
    facts: Mapping[str, HostFacts], groups: Sequence[Hostfile], backend: str, shape: Shape
) -> Iterator[CheckResult]:
    """Compare the hosts that answered, and the ends of cables inside each group."""
    yield from same_versions({host: fact.versions for host, fact in facts.items()})
    yield from _models(facts)
    if backend.startswith("jaccl"):
        for group in groups:
            yield from _cables(facts, group.hosts)
    yield from _fast_synch(facts, groups[0], backend)
    for group in groups if shape.stages > 1 else ():
        yield from _stages(facts, [host.ssh for host in group.hosts], shape)


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> Iterator[CheckResult]:
    """Compare the versions of each host, by package; phalanx's with this machine's, too."""
    for package in SAME:
        by_version = {__version__: ["this machine"]} if package == "phalanx" and versions else {}
        for host, own in versions.items():
            by_version.setdefault(own.get(package) or "missing", []).append(host)
        if len(by_version) > 1:
            seen = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
            yield CheckResult(
                check=f"version of {package}",
                level="bad",
                seen=seen,
                wanted="the same everywhere",
                remedy=f"Install the same {package} on all hosts"
                + (" (`phalanx install --upgrade HOSTS`)." if package != "python" else "."),
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


def _stages(facts: Mapping[str, HostFacts], hosts: Sequence[str], shape: Shape) -> Iterator[CheckResult]:
    """Whether the layers can be shared out among the stages, as a start would do it, with the memory of today."""
    rooms = [Room(host, facts[host].room or 0) for host in hosts if host in facts and facts[host].room is not None]
    if len(rooms) < len(hosts):
        return  # a host does not answer, or lacks the model, or serves already
    first = facts[hosts[0]]
    if (parts := first.parts) is None:
        yield bad("stages", first.uncut, "a model that can be cut", "docs/models.md says which; else use --tp alone.")
        return
    if len(parts.layers) > MAX_LAYERS:
        yield bad(
            "stages", f"{hosts[0]} says that the model has {len(parts.layers)} layers", f"{MAX_LAYERS} at most",
            "Look at the model's config.json on that host.",
        )  # fmt: skip
        return
    topology = Topology(shape.widths_of(len(hosts)))
    try:
        split = split_layers(topology, parts, rooms, shape.split)
    except (ConfigError, MemoryShortage) as error:
        yield bad("stages", error.message, "all layers, each where it has room", error.remedy)
        return
    for stage, layers in enumerate(split):
        ranks = topology.ranks(stage)
        needed = sum(part.bytes_of(len(ranks)) for part in parts.between(layers.start, layers.stop))
        least = min(rooms[rank].bytes for rank in ranks)
        where = ", ".join(hosts[rank] for rank in ranks)
        seen = f"layers {layers.start} to {layers.stop - 1} on {where}: {needed / GB:.2f} GiB of {least / GB:.1f} GiB"
        yield CheckResult(check=f"stage {stage}", level="ok", seen=seen)


def _cables(facts: Mapping[str, HostFacts], hosts: Sequence[Host]) -> Iterator[CheckResult]:
    """Two hosts can use RDMA only if the ports at both ends of their cable are active."""
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
        remedy="`phalanx net test` measures both ways and says which to write into the hostfile."
        + (" Leave it out if steps time out." if on else ""),
    )
