"""`phalanx`: finds the command, runs it, and turns errors into one line and an exit code.

A command's module is imported only when that command runs, so that `phalanx --help` is fast and works on machines
without MLX. Does not know what the commands do.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from phalanx import __version__
from phalanx.cli.terminal import report
from phalanx.errors import PhalanxError, exit_code_of

COMMANDS = {
    "serve": "Load a model and serve it over an OpenAI-compatible HTTP API.",
    "generate": "Write one answer to a prompt, then end.",
    "chat": "Talk to a model, or to a running server, in this terminal.",
    "demo": "Serve the bundled model and stream one answer, with its speed.",
    "selftest": "Test a group of ranks: sums, speed, equal tokens, memory.",
    "up": "Start a cluster: ranks on several hosts, a server on the first.",
    "down": "Stop a cluster.",
    "restart": "Stop a cluster and start it again as it was.",
    "status": "What runs on every host of a cluster.",
    "logs": "The logs of a cluster's hosts.",
    "doctor": "Look at every host and every link; say what is wrong and what to do.",
    "hostfile": "Write a hostfile from host names, or check one.",
    "net": "Set up, test or undo the network between hosts.",
    "model": "Bring a model to the hosts of a cluster.",
    "agent": "Runs ranks on this host for a server on another. Started by `up`, not by hand.",
    "fetch": "Download a model on this machine.",
    "host": "What a host does for whoever manages the cluster. Runs through ssh.",
    "reach": "What ssh is for mpirun.",
    "rank": "One engine process. Started by `serve`, not by hand.",
}
"""Command -> its line in `phalanx --help`. The code of each is the function `command` in the file of its name."""

HIDDEN = frozenset({"agent", "fetch", "host", "rank", "reach"})
PASSES_ON = frozenset({"up"})
"""Commands that hand everything after `--` to another program, as values of their hidden option `--word`."""
INTERRUPTED = 130  # as shells report SIGINT


def run() -> None:
    """The `phalanx` executable."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. typer prints usage errors (2), `report` prints phalanx's own."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        build(asked)(_passed_on(asked, arguments), prog_name="phalanx")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _passed_on(asked: str | None, arguments: Sequence[str]) -> list[str]:
    """The words for typer: those after `--` become values of `--word`, even where they look like options."""
    words = list(arguments)
    if asked not in PASSES_ON or "--" not in words:
        return words
    at = words.index("--")
    return [*words[:at], *(f"--word={word}" for word in words[at + 1 :])]


def build(asked: str | None) -> typer.Typer:
    """The typer application. Imports only the command that was asked for; the others have their line of help."""
    app = typer.Typer(
        name="phalanx", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback(invoke_without_command=True)(_root)
    for name, summary in COMMANDS.items():
        function = importlib.import_module(f"phalanx.cli.{name}").command if name == asked else _not_asked
        untouched = {"ignore_unknown_options": True, "allow_interspersed_args": False} if name == "reach" else {}
        app.command(name, short_help=summary, hidden=name in HIDDEN, context_settings=untouched)(_ending(function))
    app.command("version", short_help="Print the version.")(_ending(_version))
    return app


def _ending(function: Callable[..., int]) -> Callable[..., None]:
    """A command whose result becomes the exit code and whose errors are reported."""

    @functools.wraps(function)
    def command(*args: object, **kwargs: object) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except PhalanxError as error:
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                raise
            report(error)
            code = exit_code_of(error)
        raise typer.Exit(code)

    return command


def _root(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    """One large language model, served from several machines that you own."""
    if version:
        raise typer.Exit(_version())


def _version() -> int:
    """Print the version."""
    print(f"phalanx {__version__}")
    return 0


def _not_asked() -> int:
    raise AssertionError("a command that was not asked for ran")
