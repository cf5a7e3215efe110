"""Sets up, tests and undoes the network between hosts, from the user's machine.

`network.py` makes the plans, `links.py` carries them out on the hosts.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.check_results import Examination, HostFacts
from phalanx.cluster.diagnosis import wanted
from phalanx.cluster.discovery import discover
from phalanx.cluster.host_verbs import GroupTest, StopRequest, TestRequest
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.links import (
    Done,
    LinkSpeed,
    Listening,
    ListenRequest,
    MeasureRequest,
    ReachRequest,
    ReachResult,
    SetupRequest,
)
from phalanx.cluster.network import Cable, Node, Steps, matrix
from phalanx.cluster.plans import Plan, new_credentials, specs
from phalanx.cluster.ssh import Remote, from_all, on_all
from phalanx.cluster.supervisor import Stopped, SupervisorStarted
from phalanx.config import AGENT_PORT
from phalanx.dist.topology import Topology
from phalanx.errors import ClusterError

TEST_S = 300.0  # over JACCL a group starts twice
SLOW = 3  # times slower than the fastest link: a busy host makes it two, Wi-Fi or a wrong port ten


class Pair(Struct, frozen=True, kw_only=True):
    """The measurement of the link from a host to another, or why it failed."""

    one: str
    other: str
    address: str
    stage: int | None = None
    """If it carries activations: the stage that sends them. The next one receives them."""
    measured: LinkSpeed | None = None
    problem: str = ""


async def facts_of(remotes: Sequence[Remote]) -> dict[str, HostFacts]:
    """Ask all hosts for their facts.

    Raises:
        ClusterError: hosts do not answer; names each.
    """
    names = Hostfile(hosts=tuple(Host(ssh=remote.name) for remote in remotes))
    requests = wanted(names, backend="auto", running=True)
    answers = await from_all(
        remote.call("facts", one, Examination) for remote, one in zip(remotes, requests, strict=True)
    )
    return {remote.name: answer.facts for remote, answer in zip(remotes, answers, strict=True)}


async def addressed(hostfile: Hostfile, remotes: Sequence[Remote]) -> Hostfile:
    """The hostfile, with addresses added to hosts that have none.

    Raises:
        ClusterError: a host does not answer.
        ConfigError: the hosts share no network.
    """
    if all(host.ips for host in hostfile.hosts):
        return hostfile
    discovered, _ = discover(await facts_of(remotes))
    hosts = tuple(
        host if host.ips else replace(host, ips=found.ips)
        for host, found in zip(hostfile.hosts, discovered.hosts, strict=True)
    )
    return replace(hostfile, hosts=hosts)


def order(nodes: Sequence[Node]) -> list[str]:
    """The hosts of a set-up, in the order in which they were named: the order of ranks."""
    return list(dict.fromkeys(node.host for node in nodes))


async def set_up(
    remotes: Mapping[str, Remote], plans: Sequence[Steps], joined: Sequence[Cable], *, rdma: bool
) -> dict[str, Done]:
    """Carry out plans on all hosts, then verify that every cable works in both directions.

    Raises:
        ClusterError: a step failed, or a cable does not work; names the host or both.
    """
    names = [steps.host for steps in plans]
    rows = matrix(joined if rdma else (), names)
    done = await asyncio.gather(
        *(remotes[steps.host].call("net-setup", SetupRequest(steps=steps, matrix=rows), Done) for steps in plans)
    )
    await verify(remotes, joined)
    return dict(zip(names, done, strict=True))


async def verify(remotes: Mapping[str, Remote], joined: Sequence[Cable]) -> None:
    """Check that both ends of every cable reach each other.

    Raises:
        ClusterError: names the cable and the direction.
    """
    directions = [direction for cable in joined for direction in ((cable.a, cable.b), (cable.b, cable.a))]
    answers = await asyncio.gather(
        *(
            remotes[a.host].call("reach", ReachRequest(address=b.address, port=AGENT_PORT), ReachResult)
            for a, b in directions
        )
    )
    for (source, target), answer in zip(directions, answers, strict=True):
        if answer.problem:
            raise ClusterError(
                f"{source.host} ({source.interface}) does not reach "
                f"{target.host} ({target.interface}, {target.address}).",
                remedy=f"Is the cable between {source.host} and {target.host} in these two ports? Re-seat it.",
            )


async def undo(remotes: Sequence[Remote]) -> dict[str, Done | ClusterError]:
    """Undo the set-up on every host."""
    return await on_all(remotes, "net-undo", {}, Done)


async def measure_pairs(hostfile: Hostfile, remotes: Sequence[Remote], topology: Topology) -> list[Pair]:
    """Measure latency and bandwidth between every two hosts, one pair at a time: pairs must not share bandwidth.

    Args:
        topology: a link that carries activations is measured in their direction.
    """
    pairs = []
    for first, second in itertools.combinations(range(len(hostfile.hosts)), 2):
        carries = topology.sender(first) == second  # ranks of earlier stages have higher numbers
        one, other = (second, first) if carries else (first, second)
        hosts = hostfile.hosts[one], hostfile.hosts[other]
        pair = Pair(
            one=hosts[0].ssh, other=hosts[1].ssh, address=hosts[1].address,
            stage=topology.place(one).stage if carries else None,
        )  # fmt: skip
        try:
            pairs.append(replace(pair, measured=await _measure(remotes[one], remotes[other], pair.address)))
        except ClusterError as error:
            pairs.append(replace(pair, problem=str(error)))
    return pairs


def slow_links(pairs: Sequence[Pair]) -> list[str]:
    """Warnings about links between stages that are much slower than the fastest one: every token waits for the
    slowest."""
    links = [(pair, pair.measured.gbit_per_s) for pair in pairs if pair.stage is not None and pair.measured is not None]
    fastest = max((speed for _, speed in links), default=0.0)
    return [
        f"{pair.one} to {pair.other} is slow: {speed:.2f} Gbit/s from stage {pair.stage} to the next, the fastest such "
        f"link has {fastest:.2f}. Look at its cable, its port of the switch, and what else uses it."
        for pair, speed in links
        if speed * SLOW < fastest
    ]


async def _measure(one_remote: Remote, other_remote: Remote, address: str) -> LinkSpeed:
    token = secrets.token_hex(16)
    answers = other_remote.listen("listen", ListenRequest(address=address, token=token), Listening)
    try:
        listening = await anext(answers)
        probe = MeasureRequest(address=address, port=listening.port, token=token)
        return await one_remote.call("measure", probe, LinkSpeed)
    finally:
        await answers.aclose()


async def test_group(plan: Plan, timeout_s: float = TEST_S) -> GroupTest:
    """Test all-reduces over all ranks with a small model. Leaves nothing running.

    Raises:
        ClusterError: a host cannot start its agent, or the test failed; says why.
    """
    first, *others = plan.remotes()
    server, *agents = specs(plan, new_credentials([host.ssh for host in plan.hostfile.hosts]))
    started: list[Remote] = []
    try:
        for remote, spec in zip(others, agents, strict=True):
            await remote.call("start", spec, SupervisorStarted)
            started.append(remote)
        return await first.call("group-test", TestRequest(spec=server), GroupTest, timeout_s=timeout_s)
    finally:
        if started:
            await asyncio.shield(on_all(started, "stop", StopRequest(), Stopped))
