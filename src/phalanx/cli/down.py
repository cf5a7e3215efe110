"""`phalanx down`: ends a cluster and reports how much memory that freed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from phalanx.cli.clusters import HostfileArgument, HostfileOption, Hosts, Python, chosen
from phalanx.cli.setting_flags import number
from phalanx.cluster.lifecycle import stop_all
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import KILL_HOLD_S, Stopped
from phalanx.errors import ClusterError, ExitCode
from phalanx.memory import GB


def command(
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    timeout: Annotated[float, typer.Option(**number(0.1), help="Seconds between SIGTERM and SIGKILL.")] = 15.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also end ranks, agents and servers that `up` did not start.")
    ] = False,
    python: Python = "",
) -> int:
    """Stop a cluster: SIGTERM on all hosts at once; SIGKILL only to what is left after the time-out."""
    chosen_hosts = chosen(hostfile, hostfile_option, hosts)
    remotes = [Remote(host.ssh, python=python) for host in chosen_hosts.hosts]
    return report(asyncio.run(stop_all(remotes, timeout_s=timeout, force=force)))


def report(results: Mapping[str, Stopped | ClusterError]) -> int:
    """Print a line or two per host; the exit code is 1 if a process is left or a host does not answer."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    code = ExitCode.OK
    for name, result in results.items():
        if isinstance(result, ClusterError):
            console.print(str(result))
            code = ExitCode.CRASH
            continue
        console.print(f"{name}: {_describe(result)}")
        if result.killed:
            console.print(f"{name}: killed {', '.join(result.killed)}; the next start waits {KILL_HOLD_S:g} s")
        if result.left:
            console.print(f"{name}: still there: {', '.join(result.left)}. Reboot this host.")
            code = ExitCode.CRASH
    return code


def _describe(result: Stopped) -> str:
    if not result.found:
        return "nothing was running"
    before, after = result.before / GB, result.after / GB
    verdict = "given back" if after < before else "nothing given back yet: if it stays so, memory has leaked; reboot"
    return f"ended {', '.join(result.found)}; memory in use {before:.2f} -> {after:.2f} GiB ({verdict})"
