"""`phalanx host VERB`: what a cluster command runs on a host through ssh."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cluster.host_verbs import run_verb


def command(verb: Annotated[str, typer.Argument(help="start, stop, status, watch, ...")]) -> int:
    """Run one command of the cluster commands on this host: a JSON object on stdin, one on stdout."""
    return run_verb(verb)
