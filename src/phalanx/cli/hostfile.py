"""`phalanx hostfile`: writes a hostfile and explains each choice, or checks one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.clusters import Python, chosen
from phalanx.cli.terminal import note
from phalanx.cluster.discovery import discover
from phalanx.cluster.hostfile_parser import from_names, render
from phalanx.cluster.network_setup import facts_of
from phalanx.cluster.ssh import Remote
from phalanx.errors import ConfigError, ExitCode


def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[A,B,..]", help="Names for ssh, the server's first.")
    ] = None,
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Only check this file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it.", show_default="stdout")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file without asking.")] = False,
    python: Python = "",
) -> int:
    """Ask hosts for their addresses and RDMA devices, and write a hostfile that mlx.launch reads as well."""
    names = _one_argument(words or [])
    if (names is None) == (check is None):
        raise ConfigError(
            "Give host names, or --check FILE.", remedy="For example `phalanx hostfile a,b -o hosts.json`."
        )
    if check is not None:
        found = chosen(check, None, None)
        print(f"{check}: {len(found.hosts)} hosts: {', '.join(host.ssh for host in found.hosts)}")
        return ExitCode.OK
    assert names is not None
    if names.endswith(".json") or Path(names).is_file():
        raise ConfigError(
            f"{names} is a file, and here stand the names of hosts.",
            remedy=f"`phalanx hostfile --check {names}` checks it, `phalanx hostfile A,B -o {names}` writes it.",
        )
    if output is not None:
        _check_output(output, force=force)
    remotes = [Remote(host.ssh, python=python) for host in from_names(names).hosts]
    hostfile, reasons = discover(asyncio.run(facts_of(remotes)))
    for reason in reasons:
        note(reason)
    text = render(hostfile)
    if output is None:
        sys.stdout.write(text)
    else:
        try:
            output.write_text(text)
        except OSError as error:
            raise ConfigError(
                f"--output {output} cannot be written: {error.strerror}.", remedy="Name a file that can be written."
            ) from error
    return ExitCode.OK


def _one_argument(words: list[str]) -> str | None:
    """The hosts' names, which are one argument as in the flags of other commands.

    Raises:
        ConfigError: there are several arguments.
    """
    if len(words) > 1:
        raise ConfigError(
            f"The hosts are one argument, with commas and without blanks, but here are {len(words)}.",
            remedy=f"`phalanx hostfile {','.join(word.strip(',') for word in words)}` asks these hosts, "
            "`phalanx hostfile --check FILE` checks a hostfile.",
        )
    return words[0] if words else None


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse what cannot be written, before hosts are asked, and ask before a file is written over.

    Raises:
        ConfigError: says what is in the way.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}.", remedy="Make it first.")
    if not output.exists() or force:
        return
    if sys.stdin.isatty() and output.is_file() and typer.confirm(f"{output} exists. Write over it?", err=True):
        return
    raise ConfigError(f"--output {output} exists.", remedy="Name another file, or add --force to write over it.")
