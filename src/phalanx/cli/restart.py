"""`phalanx restart`: ends a cluster or a replica, starts it with the flags of the last `up`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from phalanx.cli.clusters import HostfileArgument, HostfileOption, Hosts, Python, chosen
from phalanx.cli.setting_flags import number
from phalanx.cli.terminal import note
from phalanx.cluster.lifecycle import Cluster, restart_all, wait_healthy
from phalanx.cluster.ssh import Remote
from phalanx.errors import ExitCode


def command(
    hostfile: HostfileArgument = None,
    replica: Annotated[
        str | None,
        typer.Argument(metavar="[REPLICA]", help="Only this one, or `gateway`.", show_default="everything"),
    ] = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    timeout: Annotated[float, typer.Option(**number(1.0), help="Seconds to become healthy.")] = 600.0,
    stop_timeout: Annotated[float, typer.Option(**number(0.1), help="Seconds between SIGTERM and SIGKILL.")] = 15.0,
    python: Python = "",
) -> int:
    """Stop all hosts, or those of one replica, and start them again with the flags of the last `up`."""
    if replica is None and (hostfile_option or hosts):
        hostfile, replica = None, None if hostfile is None else str(hostfile)
    file = chosen(hostfile, hostfile_option, hosts)
    remotes = [Remote(host.ssh, python=python) for host in file.hosts]
    return asyncio.run(_restart(remotes, replica, timeout, stop_timeout))


async def _restart(remotes: list[Remote], replica: str | None, timeout_s: float, stop_s: float) -> int:
    begun = time.monotonic()
    goal = await restart_all(remotes, part=replica, timeout_s=stop_s)
    watched = [remote for remote in remotes if remote.name in (*goal.hosts, goal.gateway)]
    async with Cluster(watched).watched() as cluster:
        await wait_healthy(goal, cluster, lambda _: None, timeout_s=timeout_s)
    note(f"healthy again after {time.monotonic() - begun:.0f} s")
    return ExitCode.OK
