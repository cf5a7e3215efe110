"""`phalanx rm`: delete models."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.catalog.local_models import directory_of, downloaded_folder, remove
from phalanx.catalog.pull_progress import PullProgress
from phalanx.cli.list import size_of
from phalanx.cli.pull import AsJson, json_error, write_json
from phalanx.cli.terminal import report
from phalanx.cluster.local_servers import local_servers
from phalanx.errors import ExitCode, ModelError, PhalanxError, exit_code_of


def command(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names of `phalanx list`, or hub ids.")],
    as_json: AsJson = False,
) -> int:
    """Delete models that were downloaded, but for those that a server of this user has loaded."""
    codes = [_remove(model, as_json=as_json) for model in dict.fromkeys(models)]
    return next((code for code in codes if code != ExitCode.OK), ExitCode.OK)


def _remove(model: str, *, as_json: bool) -> int:
    """Delete one model, and say so or why not. Returns the exit code."""
    try:
        _check_unused(model)
        freed = remove(model)
    except PhalanxError as error:
        if as_json:
            return json_error(error)
        report(error)
        return exit_code_of(error)
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
