"""`phalanx reach`: replaces ssh for mpirun: the agents run its command lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from phalanx.supervision.host_ranks import read_cluster, run_on_agent


def command(
    cluster: Annotated[Path, typer.Argument(help="ClusterConfig as JSON; the credentials lie beside it.")],
    host: Annotated[str, typer.Argument(help="A host of it.")],
    words: Annotated[list[str], typer.Argument(help="A command line for its shell.")],
) -> int:
    """Run a command line on a host through its agent, as `ssh HOST WORDS` would."""
    return asyncio.run(run_on_agent(read_cluster(cluster), host, words))
