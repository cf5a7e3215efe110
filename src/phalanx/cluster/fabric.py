"""Sets up, tests and undoes the network between hosts, from the machine where the user sits (F4, F6).

Plans come from `network.py`, hosts carry them out (`links.py`). Does not know how anything is shown.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.check_results import Examination, Facts
from phalanx.cluster.discovery import discover
from phalanx.cluster.doctor import wanted
from phalanx.cluster.host import GroupTest, StopRequest, TestRequest
from phalanx.cluster.hostfile import Host, Hostfile
from phalanx.cluster.lifecycle import Plan, specs
from phalanx.cluster.links import Done, Listening, Measured, Probe, Reach, Reached, Setup
from phalanx.cluster.network import Cable, Node, Steps, matrix
from phalanx.cluster.ssh import Remote, on_all
from phalanx.cluster.supervisor import Started, Stopped
from phalanx.config import AGENT_PORT
from phalanx.errors import ClusterError

TEST_S = 180.0


class Pair(Struct, frozen=True, kw_only=True):
    """A link as measured, or why it was not."""

    one: str
    other: str
    address: str
    measured: Measured | None = None
    problem: str = ""


async def facts_of(remotes: Sequence[Remote]) -> dict[str, Facts]:
    """What the hosts say about themselves.

    Raises:
        ClusterError: a host does not answer.
    """
    names = Hostfile(hosts=tuple(Host(ssh=remote.name) for remote in remotes))
    asked = wanted(names, backend="auto", running=True)
    found = await asyncio.gather(
        *(remote.call("facts", one, Examination) for remote, one in zip(remotes, asked, strict=True))
    )
    return {remote.name: one.facts for remote, one in zip(remotes, found, strict=True)}


async def addressed(hostfile: Hostfile, remotes: Sequence[Remote]) -> Hostfile:
    """The same hosts, with addresses for those whose entry has none.

    Raises:
        ClusterError: a host does not answer.
        ConfigError: the hosts share no network.
    """
    if all(host.ips for host in hostfile.hosts):
        return hostfile
    found, _ = discover(await facts_of(remotes))
    hosts = tuple(
        host if host.ips else replace(host, ips=known.ips)
        for host, known in zip(hostfile.hosts, found.hosts, strict=True)
    )
    return replace(hostfile, hosts=hosts)


def order(nodes: Sequence[Node]) -> list[str]:
    """The hosts of a set-up, in the order in which they were named: that of ranks."""
    return list(dict.fromkeys(node.host for node in nodes))


async def set_up(
    remotes: Mapping[str, Remote], plans: Sequence[Steps], joined: Sequence[Cable], *, rdma: bool
) -> dict[str, Done]:
    """Carry out plans on all hosts, then look whether every cable works both ways.

    Raises:
        ClusterError: a step failed, or a cable does not work; names the host or both.
    """
    names = [steps.host for steps in plans]
    rows = matrix(joined if rdma else (), names)
    done = await asyncio.gather(
        *(remotes[steps.host].call("net-setup", Setup(steps=steps, matrix=rows), Done) for steps in plans)
    )
    await verify(remotes, joined)
    return dict(zip(names, done, strict=True))


async def verify(remotes: Mapping[str, Remote], joined: Sequence[Cable]) -> None:
    """Whether both ends of every cable reach each other.

    Raises:
        ClusterError: names the cable and the direction.
    """
    ways = [way for cable in joined for way in ((cable.a, cable.b), (cable.b, cable.a))]
    found = await asyncio.gather(
        *(remotes[a.host].call("reach", Reach(address=b.address, port=AGENT_PORT), Reached) for a, b in ways)
    )
    for (here, there), one in zip(ways, found, strict=True):
        if one.problem:
            raise ClusterError(
                f"{here.host} ({here.interface}) does not reach {there.host} ({there.interface}, {there.address}).",
                remedy=f"Is the cable between {here.host} and {there.host} in these two ports? Re-seat it.",
            )


async def undo(remotes: Sequence[Remote]) -> dict[str, Done | ClusterError]:
    """Take back the last set-up on every host."""
    return await on_all(remotes, "net-undo", {}, Done)


async def measure_pairs(hostfile: Hostfile, remotes: Sequence[Remote]) -> list[Pair]:
    """Latency and bandwidth between every two hosts, one pair at a time so that they do not disturb each other."""
    pairs = []
    for (one, here), (other, there) in itertools.combinations(zip(hostfile.hosts, remotes, strict=True), 2):
        try:
            pairs.append(await _measure(one, here, other, there))
        except ClusterError as error:
            pairs.append(Pair(one=one.ssh, other=other.ssh, address=other.address, problem=str(error)))
    return pairs


async def _measure(one: Host, here: Remote, other: Host, there: Remote) -> Pair:
    answers = there.listen("listen", {}, Listening)
    try:
        listening = await anext(answers)
        probe = Probe(address=other.address, port=listening.port)
        measured = await here.call("measure", probe, Measured)
    finally:
        await answers.aclose()
    return Pair(one=one.ssh, other=other.ssh, address=other.address, measured=measured)


async def test_group(plan: Plan) -> GroupTest:
    """Sums over all ranks, on real ranks of a small model (F4). Nothing is left running.

    Raises:
        ClusterError: a host cannot start its part, or the test failed: with the reason.
    """
    first, *others = plan.remotes()
    server, *agents = specs(plan, secrets.token_hex(32))
    begun: list[Remote] = []
    try:
        for remote, spec in zip(others, agents, strict=True):
            await remote.call("start", spec, Started)
            begun.append(remote)
        return await first.call("group-test", TestRequest(spec=server), GroupTest, timeout_s=TEST_S)
    finally:
        if begun:
            await asyncio.shield(on_all(begun, "stop", StopRequest(), Stopped))
