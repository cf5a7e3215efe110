"""`phalanx status`: shows what runs on every host. Does not know how hosts are reached."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from phalanx.cli.clusters import PYTHON, HostfileArgument, HostfileOption, Hosts, Python, chosen, status_table
from phalanx.cluster.host import HostStatus
from phalanx.cluster.lifecycle import statuses
from phalanx.cluster.ssh import Remote
from phalanx.errors import ExitCode


def command(
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    python: Python = PYTHON,
) -> int:
    """Show every host's processes, memory and health. Exit code 0: the server is healthy and every host answers."""
    chosen_hosts = chosen(hostfile, hostfile_option, hosts)
    found = asyncio.run(statuses([Remote(host.ssh, python=python) for host in chosen_hosts.hosts]))
    if as_json:
        plain = {
            name: status if isinstance(status, HostStatus) else {"error": status.message, "remedy": status.remedy}
            for name, status in found.items()
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n")
    else:
        Console().print(status_table(found))
    first = found[chosen_hosts.hosts[0].ssh]
    healthy = isinstance(first, HostStatus) and first.health is not None and first.health.ok
    all_answer = all(isinstance(status, HostStatus) for status in found.values())
    return ExitCode.OK if healthy and all_answer else ExitCode.CRASH
