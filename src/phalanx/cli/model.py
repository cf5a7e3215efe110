"""`phalanx model pull|push|verify`: brings the same model to every host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from phalanx.cli.clusters import Hosts, Python, chosen
from phalanx.cli.terminal import report
from phalanx.cluster.distribution import lacking, prepare, pull, push
from phalanx.cluster.file_transfer import Manifest
from phalanx.cluster.ssh import Remote
from phalanx.errors import ClusterError, ExitCode
from phalanx.memory import GB
from phalanx.text.printable import as_entry


def command(
    action: Annotated[Literal["pull", "push", "verify"], typer.Argument(help="What to do.")],
    model: Annotated[str, typer.Argument(help="A directory of this machine, or a hub id.")],
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="FILE", help="Hosts, as mlx.launch reads them.")
    ] = None,
    hosts: Hosts = None,
    needed: Annotated[
        bool,
        typer.Option("--needed", help="Only files that serving reads, not the same weights in other formats."),
    ] = False,
    python: Python = "",
) -> int:
    """pull: download on the first host, which copies it to the others through ssh. push: copy from this machine.
    verify: compare checksums.
    """
    remotes = [Remote(host.ssh, python=python) for host in chosen(None, hostfile, hosts).hosts]
    if action == "pull":
        asyncio.run(pull(model, remotes[0], [remote.name for remote in remotes[1:]], print, needed=needed))
        return ExitCode.OK
    wanted = prepare(model, needed=needed)
    if action == "push":
        return _push(model, wanted, remotes)
    return _verify(wanted, remotes)


def _push(model: str, wanted: Manifest, remotes: list[Remote]) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    total = sum(entry.bytes for entry in wanted.files)
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {remote.name: bars.add_task(remote.name, total=total) for remote in remotes}
        try:
            asyncio.run(push(model, wanted, remotes, lambda host, count: bars.advance(tasks[host], count)))
        except* ClusterError as group:
            failures = [error for error in group.exceptions if isinstance(error, ClusterError)]
        else:
            failures = []
    for error in failures:
        report(error)
    if not failures:
        print(f"{len(wanted.files)} files, {total / GB:.2f} GiB, verified on {len(remotes)} hosts")
    return ExitCode.CRASH if failures else ExitCode.OK


def _verify(wanted: Manifest, remotes: list[Remote]) -> int:
    code = ExitCode.OK
    for host, found in asyncio.run(lacking(wanted, remotes)).items():
        if isinstance(found, ClusterError):
            print(as_entry(str(found)))
            code = ExitCode.CRASH
        elif found.missing:
            names = ", ".join(missing.path for missing in found.missing)
            line = f"{host}: {len(found.missing)} of {len(wanted.files)} files are missing or differ: {names}"
            print(as_entry(line))
            code = ExitCode.CRASH
        else:
            print(f"{host}: all {len(wanted.files)} files are the same")
    return code
