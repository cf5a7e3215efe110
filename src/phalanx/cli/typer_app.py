"""The typer application: parses a command line, prints help and usage errors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Annotated

import typer

from phalanx import __version__
from phalanx.cli.command_line import Command
from phalanx.cli.exits import exit_code
from phalanx.cli.terminal import is_dumb


def build(asked: str | None, commands: Mapping[str, str], hidden: Collection[str]) -> typer.Typer:
    """The application; only the command that was asked for is imported, the others are their help line."""
    app = typer.Typer(
        name="phalanx", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None if is_dumb() else "rich",  # its boxes are 80 wide on a dumb terminal
    )  # fmt: skip
    app.callback(invoke_without_command=True)(_root)
    for name, summary in commands.items():
        function = importlib.import_module(f"phalanx.cli.{name}").command if name == asked else _not_asked
        untouched = {"ignore_unknown_options": True, "allow_interspersed_args": False} if name == "reach" else {}
        declare = app.command(name, cls=Command, short_help=summary, hidden=name in hidden, context_settings=untouched)
        declare(_ending(function))
    app.command("version", cls=Command, short_help="Print the version.")(_ending(_version))
    return app


def _ending(function: Callable[..., int]) -> Callable[..., None]:
    """A command for typer, which ends with the exit code that `function` returns or its error means."""

    @functools.wraps(function)
    def command(*args: object, **kwargs: object) -> None:
        raise typer.Exit(exit_code(lambda: function(*args, **kwargs)))

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
