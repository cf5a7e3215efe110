"""`phalanx rm`: delete a model."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.catalog.local_models import directory_of, downloaded_folder, remove
from phalanx.catalog.pull_progress import PullProgress
from phalanx.cli.list import size_of
from phalanx.cli.pull import AsJson, json_error, write_json
from phalanx.cluster.local_servers import local_servers
from phalanx.errors import ExitCode, ModelError, PhalanxError


def command(
    model: Annotated[str, typer.Argument(help="A name of `phalanx list`, or a hub id.")], as_json: AsJson = False
) -> int:
    """Delete a model that was downloaded, unless a server of this user has it loaded."""
    try:
        _check_unused(model)
        freed = remove(model)
    except PhalanxError as error:
        if not as_json:
            raise
        return json_error(error)
    if as_json:
        write_json(PullProgress("success"))
    else:
        print(f"deleted {model}: {size_of(freed)}")
    return ExitCode.OK


def _check_unused(model: str) -> None:
    downloaded_folder(model)  # raises for what `remove` would refuse
    path = directory_of(model)
    for server in local_servers():
        if path is not None and path in [directory_of(name) for name in server.models]:
            raise ModelError(f"{model} is served by process {server.pid}.", remedy=f"Run `phalanx stop {server.pid}`.")
