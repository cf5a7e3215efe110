"""`phalanx restart`: ends a cluster, starts it with the flags of the last `up`. Does not know how hosts are reached."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from phalanx.cli.clusters import PYTHON, HostfileArgument, HostfileOption, Hosts, Python, chosen
from phalanx.cli.flags import number
from phalanx.cli.terminal import note
from phalanx.cluster.hostfile import Hostfile
from phalanx.cluster.lifecycle import Cluster, Plan, restart_all, wait_healthy
from phalanx.errors import ExitCode


def command(
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    timeout: Annotated[float, typer.Option(**number(1.0), help="Seconds to become healthy.")] = 600.0,
    stop_timeout: Annotated[float, typer.Option(**number(0.1), help="Seconds between SIGTERM and SIGKILL.")] = 15.0,
    python: Python = PYTHON,
) -> int:
    """Stop all hosts and start them again with the flags of the last `up`."""
    return asyncio.run(_restart(chosen(hostfile, hostfile_option, hosts), timeout, stop_timeout, python))


async def _restart(hostfile: Hostfile, timeout_s: float, stop_s: float, python: str) -> int:
    plan = Plan(hostfile=hostfile, timeout_s=timeout_s, python=python)
    begun = time.monotonic()
    await restart_all(plan.remotes(), timeout_s=stop_s)
    async with Cluster(plan.remotes()).watched() as cluster:
        await wait_healthy(plan, cluster, lambda _: None)
    note(f"healthy again after {time.monotonic() - begun:.0f} s")
    return ExitCode.OK
