"""`phalanx rank`: one engine process. Does not know what an engine does."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from phalanx.cli.options import whole
from phalanx.config import EngineConfig
from phalanx.engine.boot import run_rank
from phalanx.errors import ConfigError


def command(
    model: Annotated[str, typer.Argument(help="The model; here so that `ps` shows it. Must equal the config's.")],
    config: Annotated[str, typer.Option("--config", help="EngineConfig as JSON.")],
    socket: Annotated[str, typer.Option("--socket", help="Unix socket of the server process.")],
    rank: Annotated[int, typer.Option("--rank", **whole(0), help="This process's number in its group.")] = 0,
) -> int:
    """Compute as one rank, behind the server process that started it."""
    try:
        parsed = msgspec.json.decode(config, type=EngineConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config cannot be read: {error}.", remedy="It is EngineConfig as JSON.") from error
    if parsed.model != model:
        raise ConfigError(f"MODEL is {model!r}, but --config says {parsed.model!r}.", remedy="Give the same model.")
    return run_rank(parsed, socket, rank)
