"""`phalanx ps`: the servers of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.list import print_columns, size_of
from phalanx.cli.terminal import show_json
from phalanx.cluster.local_servers import local_servers
from phalanx.errors import ExitCode


def command(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> int:
    """List the servers that this user runs on this machine: model, address, ranks, memory."""
    found = local_servers()
    if as_json:
        show_json(found)
        return ExitCode.OK
    rows = [["PID", "MODEL", "ADDRESS", "RANKS", "MEMORY"]]
    rows += [
        [str(one.pid), one.models[0] if one.models else "-", " ".join(one.addresses) or "-", str(one.ranks or "-"),
         size_of(one.bytes)]
        for one in found
    ]  # fmt: skip
    print_columns(rows)
    return ExitCode.OK
