"""`phalanx agent`: starts ranks on this host for a server on another one. Does not know what ranks compute."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.flags import whole
from phalanx.config import AGENT_PORT, CLUSTER_VARIABLE, cluster_secret
from phalanx.errors import ConfigError
from phalanx.supervision.agent import Agent


def command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(**whole(1, 65535), help="Port to listen on.")] = AGENT_PORT,
    directory: Annotated[Path, typer.Option(help="For files of ranks.")] = Path("phalanx-agent"),
) -> int:
    """Wait for the server on the first host, and run this host's rank for it."""
    secret = cluster_secret()
    if secret is None:
        raise ConfigError(f"{CLUSTER_VARIABLE} is not set.", remedy="Agents are started by `phalanx up`.")
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s agent: %(message)s", datefmt="%H:%M:%S"
    )
    return asyncio.run(Agent(secret, directory.absolute()).serve(host, port))
