"""`phalanx credentials`: makes every host's key for a cluster that units start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import ConfigError, ExitCode
from phalanx.supervision.host_ranks import read_hosts
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import write_credentials


def command(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.json", help="Hosts, as `serve --cluster` reads them.")],
    directory: Annotated[Path, typer.Option(help="Where to write one file per host.")] = Path(),
) -> int:
    """Make a key and a certificate for every host of a cluster that `phalanx up` does not start."""
    hosts = read_hosts(cluster).hosts
    for host, credentials in zip(hosts, make_credentials([host.name for host in hosts]), strict=True):
        file = directory / f"credentials-{credentials.place}.json"
        try:
            write_credentials(file, credentials)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written: {error.strerror}.",
                remedy="Give --directory a directory without files of an earlier run: all hosts need those of one run.",
            ) from error
        print(f"{host.name}: {file}")
    return ExitCode.OK
