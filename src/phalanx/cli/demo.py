"""`phalanx demo`: serves the bundled model on two ranks, streams one answer and shows its speed.

Uses the other commands and the HTTP API only.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.bench.http_client import RequestFailed, TimedExchange, open_client, stream_chat
from phalanx.cli.private import PrivateServer, free_port
from phalanx.cli.setting_flags import flag
from phalanx.cli.terminal import note, show
from phalanx.config import DEFAULT_PORT
from phalanx.environment import api_key_from_environment
from phalanx.errors import ExitCode, PhalanxError
from phalanx.server.settings.server_settings import ServerConfig

PROMPT = "What is phalanx?"
MAX_TOKENS = 120  # enough to show a speed
RANKS = 2  # the fewest that show a group; more would share the processors of one machine
REPORT_S = 3.0  # how long to wait for the ranks' figures; they report once a second
WARM_UP = "Hello!"


class DemoFailed(PhalanxError):
    """The demo's server ended with an error."""


def command(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")] = PROMPT,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running.")] = False,
    port: Annotated[int, flag(ServerConfig, "port", help="Port, if it is free.", rich_help_panel=None)] = DEFAULT_PORT,
) -> int:
    """Serve the bundled model and stream one answer, with its speed."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]$ phalanx serve demo --tp {RANKS}[/]")
    server = PrivateServer("demo", ["--tp", str(RANKS), "--port", str(free_port(port))], keep=keep)
    done = False
    try:
        server.wait_ready(note)
        console.print(f"serving at {server.url}\n")
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "timing": True,  # from the server: a busy terminal gets a short answer in one burst
        }
        exchange = asyncio.run(_ask(console, server.url, body))
        _show_speed(console, exchange)
        _show_ranks(console, server.url)
        _show_curl(console, server.url, body, keep)
        done = True
    finally:
        if not (keep and done):
            code = server.stop()
    if keep:
        console.print(f"\nThe server stays (log: {escape(str(server.log))}). Stop it with: [bold]kill {server.pid}[/]")
    elif code != ExitCode.OK:
        raise DemoFailed(f"The server ended with status {code}.", remedy=f"See {server.log}.")
    else:
        console.print("\nThe server has ended in order. `phalanx demo --keep` leaves it running.")
    return ExitCode.OK


async def _ask(console: Console, url: str, body: dict[str, Any]) -> TimedExchange:
    async with open_client(url, api_key_from_environment()) as client:
        await stream_chat(client, {**body, "messages": [{"role": "user", "content": WARM_UP}], "max_tokens": 4})
        console.print(f"[bold cyan]you  [/] {escape(body['messages'][0]['content'])}")
        console.print("[bold green]model[/] ", end="")
        exchange = await stream_chat(client, body, on_text=show)
        print("\n")
    if not exchange.text.strip() or exchange.finish_reason is None:
        raise RequestFailed(f"The answer is empty (finish_reason {exchange.finish_reason}).")
    return exchange


def _show_speed(console: Console, exchange: TimedExchange) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    assert exchange.ttft_s is not None
    table.add_row("time to first token", f"{exchange.ttft_s * 1000:.0f} ms")
    if exchange.tokens_per_s is not None:
        table.add_row("decoding", f"{exchange.tokens_per_s:.1f} tokens/s")
    table.add_row("tokens", f"{exchange.prompt_tokens} in the prompt, {exchange.completion_tokens} in the answer")
    table.add_row("ended by", str(exchange.finish_reason))
    console.print(table)


def _show_ranks(console: Console, url: str) -> None:
    """Print each rank's steps and checked sums; waits until the ranks have reported them."""
    deadline = time.monotonic() + REPORT_S
    key = {"x-api-key": api_key_from_environment() or ""}
    ranks: list[dict[str, Any]] = []
    while not (ranks and ranks[0]["steps"]) and time.monotonic() < deadline:
        time.sleep(0.2)
        ranks = httpx.get(url.removesuffix("/v1") + "/health", headers=key).json().get("ranks", [])
    for rank in ranks:
        console.print(
            f"rank {rank['rank']} ({rank['host']}, pid {rank['pid']}): {rank['steps']} steps, "
            f"{rank['steps'] - rank['mismatches']} match, {rank['mismatches']} mismatch; "
            f"{rank['reductions_checked']} sums checked"
        )


def _show_curl(console: Console, url: str, body: dict[str, Any], running: bool) -> None:
    asked = json.dumps({"model": body["model"], "messages": body["messages"], "stream": True})
    console.print("\nTry it yourself:" if running else "\nTry it yourself, with `phalanx serve` in another terminal:")
    key = "" if api_key_from_environment() is None else "-H 'Authorization: Bearer KEY' "
    console.print(
        f"  curl -N {url}/chat/completions {key}-H 'Content-Type: application/json' -d {escape(shlex.quote(asked))}"
    )
