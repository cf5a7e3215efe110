"""`phalanx logs`: shows the logs of all hosts as one, and explains known faults."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from phalanx.cli.clusters import HostfileArgument, HostfileOption, Hosts, Python, chosen
from phalanx.cli.setting_flags import whole
from phalanx.cluster.host_verbs import LogRequest
from phalanx.cluster.lifecycle import read_logs, remotes_of
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import GATEWAY
from phalanx.errors import ConfigError, ExitCode
from phalanx.faults import recognise
from phalanx.text.printable import printable


def command(
    hostfile: HostfileArgument = None,
    part: Annotated[
        str | None,
        typer.Argument(metavar="[REPLICA]", help="Only of this one, or of the `gateway`.", show_default="everything"),
    ] = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    rank: Annotated[
        int | None,
        typer.Option(**whole(0), help="Of this rank's host alone; with --replica, of its rank.", show_default="all"),
    ] = None,
    replica: Annotated[str | None, typer.Option(help="Of this replica's hosts alone.", show_default="all")] = None,
    lines: Annotated[int, typer.Option("--lines", "--tail", "-n", **whole(0), help="Of each log, at first.")] = 50,
    python: Python = "",
) -> int:
    """Show what servers, agents, ranks and the gateway have logged since the last `up`, also after their end."""
    if part is None and hostfile is not None and (hostfile_option or hosts):
        hostfile, part = None, str(hostfile)
    of_gateway = part == GATEWAY
    if part is not None and not of_gateway:
        if replica is not None:
            raise ConfigError(f"--replica {replica}, but {part!r} is named as well.", remedy="Leave one of them out.")
        replica = part
    if of_gateway and not (replica is None and rank is None):
        raise ConfigError("The gateway is of no replica and has no rank.", remedy="Leave --replica and --rank out.")
    file = chosen(hostfile, hostfile_option, hosts)
    remotes = [Remote(host.ssh, python=python) for host in file.hosts]
    if replica is not None:
        remotes = asyncio.run(remotes_of(remotes, replica))
    if rank is not None and rank >= len(remotes):
        raise ConfigError(f"--rank {rank}, but there are {len(remotes)} hosts.")
    chosen_remotes = remotes if rank is None else [remotes[rank]]
    request = LogRequest(lines=lines, follow=follow, gateway=replica is None and rank is None, group=not of_gateway)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_show(chosen_remotes, request))
    return ExitCode.OK


async def _show(remotes: list[Remote], request: LogRequest) -> int:
    console = Console(soft_wrap=True, highlight=False)
    seen: set[tuple[str, str]] = set()
    shown = False

    def show(host: str, line: str) -> None:
        nonlocal shown
        shown = True
        fault = recognise(line)
        colour = "red" if fault is not None else "dim"
        console.print(f"[{colour}]{escape(host)}[/] {escape(printable(line))}")
        if fault is not None and (host, fault.name) not in seen:
            seen.add((host, fault.name))
            console.print(f"[yellow]  {fault.name}: {escape(fault.cause)} {escape(fault.remedy)}[/]")

    problems = await read_logs(remotes, request, show)
    if not (shown or problems or request.group):
        raise ConfigError("No host has the log of a gateway.", remedy="`phalanx up --replicas N` starts one.")
    for problem in problems:
        console.print(f"[red]{escape(str(problem))}[/]")
    return ExitCode.CRASH if problems else ExitCode.OK
