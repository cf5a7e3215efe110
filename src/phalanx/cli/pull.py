"""`phalanx pull`: have a model on this machine."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from phalanx.catalog.pull_progress import PullProgress
from phalanx.cli.setting_flags import flag
from phalanx.cli.terminal import PullView
from phalanx.config import EngineConfig
from phalanx.errors import ExitCode, PhalanxError, exit_code_of
from phalanx.model.loading.resolve import resolve

AsJson = Annotated[bool, typer.Option("--json", help="For programs: a JSON object a line, as Ollama's API has them.")]


def command(
    model: Annotated[str, flag(EngineConfig, "model")],
    revision: Annotated[str | None, flag(EngineConfig, "revision")] = None,
    as_json: AsJson = False,
) -> int:
    """Download a model unless it is here already, then print where it is. One that was interrupted goes on."""
    if not as_json:
        with PullView() as view:
            path = resolve(model, revision=revision, report=view)
        print(path)
        return ExitCode.OK
    try:
        resolve(model, revision=revision, report=write_json)
    except PhalanxError as error:
        return json_error(error)
    write_json(PullProgress("success"))
    return ExitCode.OK


def write_json(progress: PullProgress) -> None:
    """Print a line for programs."""
    print(msgspec.json.encode(progress).decode(), flush=True)


def json_error(error: PhalanxError) -> int:
    """Print an error for programs. Returns the exit code."""
    print(msgspec.json.encode({"error": str(error)}).decode(), flush=True)
    return exit_code_of(error)
