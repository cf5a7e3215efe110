"""`phalanx rank`: one rank of an engine. Does not know what an engine does."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from phalanx.cli.options import whole
from phalanx.config import EngineConfig, GroupConfig, environment
from phalanx.dist.backend import foreign_launcher
from phalanx.engine.boot import run_rank
from phalanx.errors import ConfigError


def command(
    model: Annotated[str, typer.Argument(help="The model; here so that `ps` shows it. Must equal the config's.")],
    config: Annotated[str, typer.Option("--config", help="EngineConfig as JSON.")],
    socket: Annotated[str, typer.Option("--socket", help="Unix socket of the server process.")],
    group: Annotated[str | None, typer.Option("--group", help="GroupConfig as JSON; alone without.")] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", **whole(0), help="Number in the group.", show_default="the launcher's"),
    ] = None,
) -> int:
    """Compute as one rank, behind the server process that started it."""
    try:
        parsed = msgspec.json.decode(config, type=EngineConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config cannot be read: {error}.", remedy="It is EngineConfig as JSON.") from error
    try:
        members = None if group is None else msgspec.json.decode(group, type=GroupConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--group cannot be read: {error}.", remedy="It is GroupConfig as JSON.") from error
    if parsed.model != model:
        raise ConfigError(f"MODEL is {model!r}, but --config says {parsed.model!r}.", remedy="Give the same model.")
    if rank is None:
        found = foreign_launcher(environment())
        rank = 0 if found is None else found.rank
    if members is not None and rank >= members.size:
        raise ConfigError(f"--rank {rank} is not one of the group's {members.size} ranks.")
    return run_rank(parsed, members, socket, rank)
