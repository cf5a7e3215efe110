"""`phalanx stop`: end a server or a gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.catalog.local_models import own_name
from phalanx.cli.setting_flags import number
from phalanx.cluster.local_servers import LocalServer, end, local_servers
from phalanx.errors import ConfigError, ExitCode


def command(
    which: Annotated[
        str | None,
        typer.Argument(metavar="[PID|PORT|MODEL]", help="Of `phalanx ps`, or `gateway`; needed where several run."),
    ] = None,
    timeout: Annotated[float, typer.Option(**number(0.1), help="Seconds for running requests to end.")] = 60.0,
) -> int:
    """End a server or a gateway in order: it takes no new requests, and ends when the running ones have."""
    server = _chosen(which, local_servers())
    if server.supervised:
        raise ConfigError(f"Process {server.pid} was started by `phalanx up`.", remedy="Run `phalanx down`.")
    if not end(server, timeout):
        raise ConfigError(
            f"Process {server.pid} has not ended in {timeout:g} s; requests may still run.",
            remedy="Run the same command again: a second SIGTERM ends it at once.",
        )
    unnamed = f": {', '.join(server.models) or server.kind} at {', '.join(server.addresses)}" if which is None else ""
    print(f"stopped {server.pid}{unnamed}")
    return ExitCode.OK


def _chosen(which: str | None, found: list[LocalServer]) -> LocalServer:
    fitting = [one for one in found if which is None or {which, own_name(which)} & one.names]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        what = "" if which is None else f" that {which!r} names"
        raise ConfigError(
            f"There is no server or gateway of this user on this machine{what}.", remedy="`phalanx ps` lists them."
        )
    pids = ", ".join(str(one.pid) for one in fitting)
    raise ConfigError(f"There are {len(fitting)} such servers: {pids}.", remedy="Give a process id of `phalanx ps`.")
