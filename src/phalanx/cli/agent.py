"""`phalanx agent`: starts ranks on this host for a server on another one."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.setting_flags import whole
from phalanx.config import AGENT_PORT, CREDENTIALS_FILE
from phalanx.log_limits import CountingHandler
from phalanx.open_files import raise_limit
from phalanx.supervision.awake import stay_awake
from phalanx.supervision.rank_agent import Agent
from phalanx.tls.host_credentials import read_credentials


def command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(**whole(1, 65535), help="Port to listen on.")] = AGENT_PORT,
    directory: Annotated[Path, typer.Option(help="For files of ranks.")] = Path("phalanx-agent"),
    credentials: Annotated[
        Path, typer.Option(metavar="FILE", help="This host's key and all certificates; `phalanx up` writes it.")
    ] = Path(CREDENTIALS_FILE),
) -> int:
    """Wait for the server on the first host, and run this host's rank for it."""
    known = read_credentials(credentials)
    raise_limit()
    logging.basicConfig(
        handlers=[CountingHandler(sys.stderr)],
        level=logging.INFO,
        format="%(asctime)s agent: %(message)s",
        datefmt="%H:%M:%S",
    )
    stay_awake()
    return asyncio.run(Agent(known, credentials.absolute(), directory.absolute()).serve(host, port))
