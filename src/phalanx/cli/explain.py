"""`phalanx explain`: why a request took as long as it did."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from phalanx.bench.http_client import open_client, unreachable
from phalanx.cli.chat import api_base
from phalanx.cli.setting_flags import key_file, keys_of
from phalanx.cli.terminal import show_json
from phalanx.environment import API_KEY_VARIABLE
from phalanx.errors import ConfigError, ExitCode
from phalanx.text.printable import printable
from phalanx.text.word_wrap import fitted

TIMEOUT_S = 10.0


def command(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="Of an answer (chatcmpl-...), or its header x-request-id (req_...).")
    ],
    url: Annotated[str, typer.Option(help="The server's or the gateway's address.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="The request's own, or the admin key. Also PHALANX_API_KEY.")
    ] = None,
    api_key_file: Annotated[Path | None, key_file("--api-key")] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The server's certificate, if no authority signed it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> int:
    """Tell the life of a request: what it waited for, what of its prompt was cached and why the rest was not, chunks,
    steps, drafts, moves and checks. Servers remember the last 1,000."""
    key = next(iter(keys_of("--api-key", api_key, api_key_file, API_KEY_VARIABLE, several=True)), None)
    life = asyncio.run(_ask(id, api_base(url), key, ssl_certfile))
    if as_json:
        show_json(life)
        return ExitCode.OK
    head = f"{life.get('id')} ({life.get('model')}): {life.get('state')}, {life.get('seconds', {}).get('total')} s"
    for line in [head, *life.get("story", [])]:
        print(fitted(printable(str(line)), sys.stdout))
    return ExitCode.OK


async def _ask(id: str, base: str, key: str | None, certificate: Path | None) -> dict[str, Any]:
    async with open_client(base, key, certificate) as client:
        try:
            answer = await client.get(f"/requests/{quote(id, safe='')}", timeout=TIMEOUT_S)
            body = answer.json()
        except httpx.ConnectError as error:
            raise unreachable(client, error) from error
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(
                f"{base} does not answer as phalanx does: {str(error) or type(error).__name__}.",
                remedy="Give the address that `phalanx serve` printed as --url.",
            ) from error
    if answer.status_code != 200 or not isinstance(body, dict):
        failure = body.get("error") if isinstance(body, dict) else None
        said = failure.get("message") if isinstance(failure, dict) else None
        raise ConfigError(f"{base}: {said or f'status {answer.status_code}'}", remedy=_remedy(answer.status_code))
    return body


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "Give the key that the request had, or the server's admin key, as --api-key."
    return ""
