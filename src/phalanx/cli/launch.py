"""`phalanx launch`: starts a coding agent with the settings for a server (`launchers.py`)."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from phalanx.bench.http_client import ListedModel, listed_models, open_client
from phalanx.cli.chat import api_base
from phalanx.cli.launchers import AGENTS, MIN_CONTEXT, Launch, Target
from phalanx.cli.setting_flags import key_file, keys_of
from phalanx.cli.terminal import note
from phalanx.environment import API_KEY_VARIABLE, environment
from phalanx.errors import ConfigError, ExitCode
from phalanx.private_files import write_private


def command(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=f"One of {', '.join(AGENTS)}.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- WORDS]", help="More arguments for the agent.")
    ] = None,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Which of the server's models.", show_default="the first")] = None,
    api_key: Annotated[str | None, typer.Option(help="Also PHALANX_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, key_file("--api-key")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the command; start nothing.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the settings to this new file, and say how to use it; start nothing."),
    ] = None,
) -> int:
    """Start a coding agent (Claude Code, Codex, opencode, aider, Copilot, Qwen Code, pi) that works with a server of
    phalanx."""
    if agent not in AGENTS:
        raise ConfigError(f"There is no agent {agent!r}.", remedy=f"Known are {', '.join(AGENTS)}.")
    base = api_base(url)
    keys = keys_of("--api-key", api_key, api_key_file, API_KEY_VARIABLE, several=True)
    key = next(iter(keys), None)
    served = _served(base, key, model)
    launch = AGENTS[agent](Target(url=base.removesuffix("/v1"), key=key, model=served.id, context=served.max_model_len))
    if served.max_model_len is not None and served.max_model_len < MIN_CONTEXT:
        note(f"{served.id} reads {served.max_model_len} tokens; the agent's own instructions may take all of them.")
    if served.tool_call_parser is None:
        note(f"{served.id} cannot call tools: the agent can read and change nothing. Serve a model that has tools.")
    if write is not None:
        return _write(launch, write)
    if show:
        print(_shell_line(launch, words or []))
        return ExitCode.OK
    return _start(launch, words or [])


def _served(base: str, key: str | None, model: str | None) -> ListedModel:
    """The model that is to be used, as the server lists it."""

    async def ask() -> list[ListedModel]:
        async with open_client(base, key) as client:
            return await listed_models(client)

    known = {listed.id: listed for listed in asyncio.run(ask())}
    name = model or next(iter(known))
    if name not in known:
        raise ConfigError(f"{base} has no model {name!r}.", remedy=f"It has {', '.join(known)}.")
    return known[name]


def _write(launch: Launch, file: Path) -> int:
    try:
        write_private(file, launch.settings.encode())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}.",
            remedy="Name a file that does not exist yet, in a directory that does.",
        ) from error
    note(f"{file} written. Use it with: {launch.use.format(file=shlex.quote(str(file.absolute())))}")
    return ExitCode.OK


def _shell_line(launch: Launch, words: list[str]) -> str:
    """The command for a POSIX shell."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return " ".join([*variables, shlex.join([*launch.words, *words])])


def _start(launch: Launch, words: list[str]) -> int:
    """Become the agent."""
    program = shutil.which(launch.words[0])
    if program is None:
        raise ConfigError(f"{launch.words[0]} is not installed.", remedy=f"Install it: {launch.install}")
    os.execve(program, [*launch.words, *words], {**environment(), **launch.environment})
