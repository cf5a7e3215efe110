"""`phalanx chat`: a conversation in the terminal, with a private server of a model or with a running server.

Speaks OpenAI's HTTP API only, so that every server of that API works. Does not know the engine.
"""

from __future__ import annotations

import asyncio
import readline
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from phalanx.bench.http_client import Exchange, RequestFailed, first_model, open_client, stream_chat
from phalanx.cli.flags import flag
from phalanx.cli.private import PrivateServer
from phalanx.cli.terminal import note, report
from phalanx.config import api_key_from_environment
from phalanx.errors import ConfigError, ExitCode
from phalanx.offline.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit (or Ctrl-D) ends"
HISTORY_LINES = 1000


def command(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help="A model as for `serve`, or the address of a server.")
    ] = "demo",
    serve_flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SERVE FLAGS]", help="With MODEL: flags for `phalanx serve`.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, flag(SamplingParams, "max_tokens")] = None,
    temperature: Annotated[float | None, flag(SamplingParams, "temperature", rich_help_panel=None)] = None,
    seed: Annotated[int | None, flag(SamplingParams, "seed", rich_help_panel=None)] = None,
    model: Annotated[str | None, typer.Option("--model", help="With URL: which of the server's models.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With URL. Also PHALANX_API_KEY.")] = None,
) -> int:
    """Talk to a model, or to a running server, in this terminal."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}
    if target.startswith(("http://", "https://")):
        if serve_flags:
            raise ConfigError(f"Flags for `serve` ({' '.join(serve_flags)}) need a MODEL, not a URL.")
        key = api_key or api_key_from_environment()
        return talk(api_base(target), key, model, ChatSession(system, options))
    if model is not None or api_key is not None:
        raise ConfigError("--model and --api-key go with a URL, not with a MODEL.", remedy="Leave them out.")
    server = PrivateServer(target, ["--port", "0", *(serve_flags or [])])
    try:
        server.wait_ready(note)
        options["timing"] = True  # phalanx's own timing holds even where the answer arrives in one burst
        return talk(server.url, api_key_from_environment(), server.model, ChatSession(system, options))
    finally:
        server.stop()


def api_base(url: str) -> str:
    """The address, with /v1 at its end."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class ChatSession:
    """The messages so far and the options of every request."""

    def __init__(self, system: str | None, options: dict[str, Any]) -> None:
        self._system = system
        self._options = options
        self._turns: list[dict[str, str]] = []

    def ask(self, text: str) -> None:
        """Append the user's message."""
        self._turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Append the model's answer, possibly cut short; if it is empty, drop the question instead."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def reset(self, system: str | None = None) -> None:
        """Forget all messages but the system message; `system` replaces that."""
        self._turns.clear()
        self._system = system if system is not None else self._system

    def body(self, model: str) -> dict[str, Any]:
        """The request body for the next answer."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return {"model": model, "messages": [*system, *self._turns], **self._options}


def talk(base_url: str, api_key: str | None, model: str | None, session: ChatSession) -> int:
    """Read a line, show the answer, until the user ends it: Ctrl-C ends an answer, Ctrl-D the conversation."""
    model = model or asyncio.run(_first_model(base_url, api_key))
    console = Console(highlight=False, soft_wrap=True)
    readline.set_history_length(HISTORY_LINES)
    note(f"{model} at {base_url}. {HELP}")
    while (line := _read(console)) is not None:
        if not line.strip():
            continue
        if line.startswith("/"):
            if not _obey(line, session):
                break
            continue
        session.ask(line)
        said: list[str] = []
        try:
            exchange = asyncio.run(_answer(base_url, api_key, session.body(model), _shower(said)))
            print()
            _after(exchange)
        except KeyboardInterrupt:
            print()
            note("(interrupted)")
        except RequestFailed as error:
            print()
            report(error)
        session.answered("".join(said))
    return ExitCode.OK


def _read(console: Console) -> str | None:
    """Read a line; None at the end of input. Ctrl-C only drops the line."""
    while True:
        try:
            return console.input("[bold]> [/]") if sys.stdin.isatty() else input()
        except KeyboardInterrupt:
            print()
            note("(Ctrl-D or /quit ends)")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None


def _obey(line: str, session: ChatSession) -> bool:
    """Run a command of the user; False ends the conversation."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit":
            return False
        case "/reset":
            session.reset()
            note("forgotten")
        case "/system":
            session.reset(rest.strip())
            note("system message set, conversation forgotten" if rest.strip() else "system message removed")
        case _:
            note(HELP)
    return True


def _shower(said: list[str]) -> Callable[[str], None]:
    def show(text: str) -> None:
        said.append(text)
        print(text, end="", flush=True)

    return show


def _after(exchange: Exchange) -> None:
    """Print how many tokens an answer had, its speed, and whether the length limit cut it."""
    facts = [f"{exchange.completion_tokens} tokens"] if exchange.completion_tokens else []
    if exchange.ttft_s is not None:
        facts.append(f"first after {exchange.ttft_s * 1000:.0f} ms")
    if exchange.tokens_per_s is not None:
        facts.append(f"{exchange.tokens_per_s:.1f} tokens/s")
    if exchange.finish_reason == "length":
        facts.append("cut by the length limit")
    note(", ".join(facts))


async def _answer(base_url: str, key: str | None, body: dict[str, Any], show: Callable[[str], None]) -> Exchange:
    async with open_client(base_url, key) as client:
        return await stream_chat(client, body, on_text=show)  # Ctrl-C closes the connection: the server cancels


async def _first_model(base_url: str, key: str | None) -> str:
    async with open_client(base_url, key) as client:
        return await first_model(client)
