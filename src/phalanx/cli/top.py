"""`phalanx top`: what a server or a gateway does, live, from the stream that its page reads as well."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live

from phalanx.bench.http_client import RequestFailed, open_client, unreachable
from phalanx.cli.chat import api_base
from phalanx.cli.setting_flags import key_file, keys_of
from phalanx.cli.terminal import is_dumb
from phalanx.cli.top_view import TopView
from phalanx.environment import API_KEY_VARIABLE
from phalanx.errors import ConfigError, ExitCode

SILENCE_S = 25.0  # the server says at least every ten seconds that the stream goes on
EVENT_BYTES = 8 << 20  # of one event; a thousand requests have some 400 KB
WRONG_KEY = (401, 403)
BUSY = (429, 503)
RETRY_S = 1.0  # until a server that went away is asked again


class ServerGone(ConfigError):
    """The server cannot be reached, or the connection broke."""


def command(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="The server's or the gateway's address.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="The admin key shows all requests. Also PHALANX_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, key_file("--api-key")] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The server's certificate, if no authority signed it."),
    ] = None,
) -> int:
    """Show hosts, replicas and requests of a server or a gateway, live; into a pipe, once. Ctrl-C ends it."""
    key = next(iter(keys_of("--api-key", api_key, api_key_file, API_KEY_VARIABLE, several=True)), None)
    return asyncio.run(_show(api_base(url), key, ssl_certfile))


async def _show(base: str, key: str | None, certificate: Path | None) -> int:
    is_live = sys.stdout.isatty() and not is_dumb()
    size = shutil.get_terminal_size()
    console = Console(width=None if is_live else size.columns)
    if not is_live:
        async with aclosing(_overviews(base, key, certificate)) as overviews:
            async for parts in overviews:
                console.print(_drawn(base, TopView(parts, None), console))
                return ExitCode.OK
        raise ConfigError(f"{base} has ended the stream.", remedy="It is shutting down: try again.")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        await _follow(live, base, key, certificate)
    return ExitCode.OK


async def _follow(live: Live, base: str, key: str | None, certificate: Path | None) -> None:
    """Show a server until Ctrl-C; one that goes away after it answered is shown as gone until it is back.

    Raises:
        ConfigError: the server is not phalanx, or refuses the key.
        RequestFailed: it never answered.
    """
    parts: dict[str, Any] | None = None
    while True:
        try:
            async with aclosing(_overviews(base, key, certificate)) as overviews:
                async for parts in overviews:
                    live.update(_drawn(base, TopView(parts, live.console.height), live.console), refresh=True)
        except (ServerGone, RequestFailed):
            if parts is None:
                raise
        if parts is None:
            raise ConfigError(f"{base} has ended the stream.", remedy="It is shutting down: try again.")
        gone = TopView(parts, live.console.height, "no connection, trying again")
        live.update(_drawn(base, gone, live.console), refresh=True)
        await asyncio.sleep(RETRY_S)


def _drawn(base: str, view: TopView, console: Console) -> Group:
    """The view's lines.

    Raises:
        ConfigError: the server's parts are not those of phalanx.
    """
    try:
        return Group(*view.lines(console, console.width))
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
        raise _no_phalanx(base, error) from error


async def _overviews(base: str, key: str | None, certificate: Path | None) -> AsyncGenerator[dict[str, Any]]:
    """The parts after each event.

    Raises:
        ConfigError: the server does not answer, refuses the key, or is not phalanx.
    """
    timeout = httpx.Timeout(SILENCE_S)
    try:
        async with open_client(base, key, certificate) as client:
            async with client.stream("GET", "/overview/events", timeout=timeout) as answer:
                if answer.status_code in WRONG_KEY:
                    raise ConfigError(
                        f"{base} refuses the key.", remedy="Give one of its API keys, or its admin key, as --api-key."
                    )
                if answer.status_code in BUSY:
                    raise ServerGone(
                        f"{base} answers {answer.status_code}: too many viewers, or it is shutting down.",
                        remedy="Try again.",
                    )
                if answer.status_code != 200:
                    raise ConfigError(
                        f"{base} answers {answer.status_code} to /overview/events.",
                        remedy="Give the address of a server or a gateway of phalanx 0.3 or newer.",
                    )
                async for parts in _parts(answer):
                    yield parts
    except httpx.ConnectError as error:
        raise unreachable(client, error) from error
    except httpx.TransportError as error:
        raise _no_phalanx(base, error, ServerGone) from error
    except (httpx.HTTPError, msgspec.DecodeError, TypeError, AttributeError, LookupError) as error:
        raise _no_phalanx(base, error) from error


def _no_phalanx(base: str, error: Exception, kind: type[ConfigError] = ConfigError) -> ConfigError:
    return kind(
        f"{base} does not answer as phalanx does: {str(error) or type(error).__name__}.",
        remedy="Give the address that `phalanx serve` or `phalanx gateway` printed.",
    )


async def _parts(answer: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    parts: dict[str, Any] = {}
    rest = b""
    async for piece in answer.aiter_bytes():
        rest += piece
        *events, rest = rest.split(b"\n\n")
        if len(rest) > EVENT_BYTES:
            raise TypeError(f"an event of more than {EVENT_BYTES >> 20} MiB")
        for event in events:
            lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
            if b"data" not in lines:
                continue
            said = msgspec.json.decode(lines[b"data"], type=dict[str, Any])
            if lines.get(b"event") == b"snapshot":
                parts = said
            else:
                parts = {name: part for name, part in parts.items() if name not in said["drop"]} | said["set"]
            yield parts
