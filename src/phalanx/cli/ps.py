"""`phalanx ps`: the servers and gateways of this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cli.list import size_of
from phalanx.cli.terminal import show_json
from phalanx.cluster.local_servers import LocalServer, local_servers
from phalanx.errors import ExitCode
from phalanx.text.printable import printable


def command(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> int:
    """List the servers and gateways that this user runs on this machine: model, address, ranks, memory."""
    found = local_servers()
    if as_json:
        show_json(found)
        return ExitCode.OK
    table = FittingTable("PID", "MODEL", "ADDRESS", "RANKS", "MEMORY", keys=("PID", "MODEL"))
    for server in found:
        table.add_row(*map(Text, map(printable, _row(server))))
    print_table(table)
    return ExitCode.OK


def _row(server: LocalServer) -> list[str]:
    model = next(iter(server.models), "gateway" if server.kind == "gateway" else "-")
    if server.served_as:
        model = f"{model} as {', '.join(server.served_as)}"
    return [str(server.pid), model, " ".join(server.addresses) or "-", str(server.ranks or "-"), size_of(server.bytes)]
