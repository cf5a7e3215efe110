"""`phalanx install`: brings phalanx to hosts through ssh, or takes the last change back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from phalanx.cli.clusters import chosen
from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cluster.installer import BareHost, Installer
from phalanx.cluster.releases import Releases
from phalanx.cluster.ssh import is_here, on_all
from phalanx.cluster.wheelhouse import WheelSet, backend_script, kernel_pythons, own_wheel
from phalanx.errors import ConfigError, ExitCode, PhalanxError

Row = tuple[str, str, str] | PhalanxError
"""The cells of a host: Python, release and a remark; or why it failed."""
HostNames = Annotated[
    str | None, typer.Argument(metavar="[HOSTS]", help="Names for ssh, A,B,.., or a hostfile.", show_default=False)
]
HostfileOption = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="Hosts, as mlx.launch reads them.")
]


def command(
    hosts: HostNames = None,
    hostfile: HostfileOption = None,
    wheels: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that `make wheels` wrote; the wheels of others are kept in it.")
    ] = Path("dist"),
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Also where another version is in use.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Switch back to the version before.")] = False,
) -> int:
    """Install this phalanx on hosts, below ~/.phalanx. They need sshd and Python 3.11 or newer, and no network."""
    if upgrade and rollback:
        raise ConfigError("--upgrade and --rollback exclude each other.", remedy="Leave one out.")
    names = names_of(hosts, hostfile)
    if rollback:
        switched = asyncio.run(on_all(map(BareHost, names), "rollback", {}, Releases))
        return show({name: _rolled_back(one) for name, one in switched.items()})
    own_wheel(wheels)  # fails before hosts are asked
    return show(asyncio.run(_install(names, wheels, upgrade=upgrade)))


def names_of(hosts: str | None, hostfile: Path | None) -> list[str]:
    """The hosts' names for ssh.

    Raises:
        ConfigError: of `chosen`.
    """
    is_file = hosts is not None and Path(hosts).is_file()
    found = chosen(Path(hosts) if hosts and is_file else None, hostfile, None if is_file else hosts)
    return [host.ssh for host in found.hosts]


async def _install(names: Sequence[str], wheels: Path, *, upgrade: bool) -> dict[str, Row]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task(f"{escape(name)}: looking", total=None) for name in names}

        def phase(name: str, does: str, size: int) -> None:
            bars.update(tasks[name], description=f"{escape(name)}: {does}", total=size or None)
            if not console.is_terminal:
                print(f"{name}: {does}", file=sys.stderr, flush=True)

        installer = Installer(wheels, phase, lambda name, count: bars.advance(tasks[name], count))
        pythons, backend = kernel_pythons(wheels), backend_script(wheels)

        async def one(name: str) -> Row:
            if is_here(name):
                return ("", "", "this machine, which has it")
            try:
                done, was_there = await installer.install(BareHost(name, pythons, backend), upgrade=upgrade)
            except PhalanxError as error:
                return error
            return _installed(done, was_there)

        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


def _installed(done: WheelSet, was_there: bool) -> Row:
    says = "is there" if was_there else "installed"
    return ".".join(map(str, done.host.python)), done.release, f"{says}; {done.lost}" if done.lost else says


def _rolled_back(done: Releases | PhalanxError) -> Row:
    if isinstance(done, PhalanxError):
        return done
    return ("", done.current, f"in use again, instead of {done.previous}" if done.current else "nothing is installed")


def show(found: Mapping[str, Row]) -> int:
    """Print a row for each host. Returns the exit code."""
    table = FittingTable("host", "python", "phalanx", "says", keys=("host",), texts=("says",))
    for name, one in found.items():
        failed = isinstance(one, PhalanxError)
        cells = ("", "", str(one).removeprefix(f"{name}: ")) if isinstance(one, PhalanxError) else one
        *first, says = (escape(cell) for cell in cells)
        table.add_row(escape(name), *first, f"[red]{says}[/]" if failed else says)
    print_table(table)
    return ExitCode.CRASH if any(isinstance(one, PhalanxError) for one in found.values()) else ExitCode.OK
