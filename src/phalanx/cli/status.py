"""`phalanx status`: shows what runs on every host."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

import typer

from phalanx.cli.clusters import HostfileArgument, HostfileOption, Hosts, Python, chosen, status_table
from phalanx.cli.fitting_table import print_table
from phalanx.cli.terminal import show_json
from phalanx.cluster.host_status import GatewayStatus, HostReport, HostStatus
from phalanx.cluster.lifecycle import layout_in, statuses
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.ssh import Remote
from phalanx.errors import ClusterError, ExitCode


def command(
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    python: Python = "",
) -> int:
    """Show every host's processes, memory and health. Exit code 0: all servers are healthy and every host answers."""
    chosen_hosts = chosen(hostfile, hostfile_option, hosts)
    found = asyncio.run(statuses([Remote(host.ssh, python=python) for host in chosen_hosts.hosts]))
    layout = layout_in(found.values())
    gateway = next((one.gateway for one in found.values() if isinstance(one, HostReport) and one.gateway), None)
    rows = {name: one.status if isinstance(one, HostReport) else one for name, one in found.items()}
    if as_json:
        plain = {name: _plain(row) for name, row in rows.items()}
        value = plain if layout is None else _by_replica(plain, layout, gateway)
        show_json(value)
    else:
        print_table(status_table(rows, layout, gateway))
    first = chosen_hosts.hosts[0].ssh
    servers, used = ((first,), tuple(rows)) if layout is None else (layout.servers, layout.hosts)
    healthy = all(_is_healthy(rows[host]) for host in servers if host in rows)
    if layout is not None and layout.gateway in rows:
        healthy &= gateway is not None and _is_healthy(gateway.process)
    all_answer = all(isinstance(rows[host], HostStatus) for host in used if host in rows)
    return ExitCode.OK if healthy and all_answer else ExitCode.CRASH


def _is_healthy(status: HostStatus | ClusterError) -> bool:
    return isinstance(status, HostStatus) and status.health is not None and status.health.ok


def _plain(row: HostStatus | ClusterError) -> object:
    return row if isinstance(row, HostStatus) else {"error": row.message, "remedy": row.remedy}


def _by_replica(plain: Mapping[str, object], layout: ReplicaLayout, gateway: GatewayStatus | None) -> object:
    """The hosts of each replica, and what the gateway says of the replicas."""
    replicas = {name: {host: plain[host] for host in hosts if host in plain} for name, hosts in layout.replicas.items()}
    return {"replicas": replicas, "gateway": {"host": layout.gateway, "status": gateway}}
