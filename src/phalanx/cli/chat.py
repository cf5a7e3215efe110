"""`phalanx chat`: a conversation in the terminal, with a private server of a model or with a running server.

Speaks OpenAI's HTTP API only, so that every server of that API works.
"""

from __future__ import annotations

import asyncio
import io
import re
import readline
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from phalanx.bench.http_client import RequestFailed, TimedExchange, first_model, open_client, stream_chat
from phalanx.cli.private import PrivateServer
from phalanx.cli.setting_flags import flag, key_file, keys_of
from phalanx.cli.terminal import note, report, show, show_dim
from phalanx.environment import API_KEY_VARIABLE, api_key_from_environment
from phalanx.errors import ConfigError, ExitCode, exit_code_of
from phalanx.offline.sampling_params import SamplingParams
from phalanx.text.word_wrap import WordWrap

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit (or Ctrl-D) ends"
HISTORY_LINES = 1000  # that the up key reaches
BARE_ADDRESS = re.compile(r"[^/\s]+:\d+(/v1)?/?")
"""An address without a scheme; in a hub id, a colon comes after a slash."""


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
    api_key_file: Annotated[Path | None, key_file("--api-key")] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="With an https URL: the server's certificate, if no authority signed it."
        ),
    ] = None,
) -> int:
    """Talk to a model, or to a running server, in this terminal."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}
    if target.startswith(("http://", "https://")):
        if serve_flags:
            raise ConfigError(f"Flags for `serve` ({' '.join(serve_flags)}) need a MODEL, not a URL.")
        key = next(iter(keys_of("--api-key", api_key, api_key_file, API_KEY_VARIABLE, several=True)), None)
        return talk(ServerAddress(api_base(target), key, ssl_certfile), model, ChatSession(system, options))
    if BARE_ADDRESS.fullmatch(target) and not Path(target).exists():
        raise ConfigError(f"{target} is an address without a scheme.", remedy=f"Give http://{target} or https://.")
    if any(given is not None for given in (model, api_key, api_key_file, ssl_certfile)):
        raise ConfigError(
            "--model, --api-key, --api-key-file and --ssl-certfile go with a URL, not with a MODEL.",
            remedy="Leave them out.",
        )
    server = PrivateServer(target, ["--port", "0", *(serve_flags or [])])
    try:
        server.wait_ready(note)
        options["timing"] = True  # phalanx's own timing holds even where the answer arrives in one burst
        ours = ServerAddress(server.url, api_key_from_environment(), server.certificate)
        return talk(ours, server.model, ChatSession(system, options))
    finally:
        server.stop()


class ServerAddress(NamedTuple):
    """A server to talk to."""

    url: str  # ends in /v1
    key: str | None
    certificate: Path | None  # the only one that is accepted; None: the usual authorities decide

    def open(self) -> httpx.AsyncClient:
        """A client of this server."""
        return open_client(*self)


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


def talk(server: ServerAddress, model: str | None, session: ChatSession) -> int:
    """Read a line, show the answer, until the user ends it: Ctrl-C ends an answer, Ctrl-D the conversation.

    With input from a pipe, the exit code is that of the last failed request.
    """
    code: int = ExitCode.OK
    model = model or asyncio.run(_first_model(server))
    readline.set_history_length(HISTORY_LINES)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # an error would lose all lines that were read together
    note(f"{model} at {server.url}. {HELP}")
    while (line := _read()) is not None:
        if not line.strip():
            continue
        if line.startswith("/"):
            if not _obey(line, session):
                break
            continue
        session.ask(line)
        parts: list[str] = []
        view = View(parts)
        try:
            try:
                exchange = asyncio.run(_answer(server, session.body(model), view))
            finally:
                view.end()
                print(flush=True)  # `_after` writes to stderr
            _after(exchange)
        except KeyboardInterrupt:
            note("(interrupted)")
        except RequestFailed as error:
            report(error)
            code = exit_code_of(error)
        session.answered("".join(parts))
    return ExitCode.OK if sys.stdin.isatty() else code


def _read() -> str | None:
    """Read a line; None at the end of input. Ctrl-C only drops the line."""
    while True:
        try:
            return _decoded(input("> " if sys.stdin.isatty() else ""))  # readline has to know what stands before a line
        except KeyboardInterrupt:
            print()
            note("(Ctrl-D or /quit ends)")
        except UnicodeError:
            note("(not sent: this line is not UTF-8)")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None


def _decoded(line: str) -> str:
    """The line as it was typed. A terminal may send UTF-8 whatever the locale says; Python keeps it as surrogates.

    Raises:
        UnicodeError: it is neither.
    """
    try:
        line.encode()
    except UnicodeEncodeError:
        return line.encode(sys.stdin.encoding, "surrogateescape").decode()
    return line


def _obey(line: str, session: ChatSession) -> bool:
    """Run a command of the user; False ends the conversation."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit" | "/bye":  # the last is Ollama's
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


class View:
    """Shows an answer while it comes: the text, and dimmed what surrounds it, reasoning and calls of tools.

    Args:
        parts: gets the parts of the text.
    """

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts
        self._aside = False  # the last thing shown was not the text
        self._wrap = WordWrap(sys.stdout)

    def text(self, text: str) -> None:
        """Show a further part of the text."""
        if self._aside:
            self._show(self._wrap.add("\n\n"))
        self._aside = False
        self._parts.append(text)
        self._show(self._wrap.add(text))

    def end(self) -> None:
        """Show the last word, which was held back."""
        self._show(self._wrap.end())

    def reasoning(self, text: str) -> None:
        """Show a further part of the reasoning."""
        self._show_aside(text, new_line=not self._aside and bool(self._parts))

    def call(self, name: str, arguments: str) -> None:
        """Show a further part of a call, which has a name if it is the first one."""
        self._show_aside(f"{name} {arguments}" if name else arguments, new_line=bool(name) and not self._nothing_yet)

    @property
    def _nothing_yet(self) -> bool:
        return not self._parts and not self._aside

    def _show_aside(self, text: str, *, new_line: bool) -> None:
        if new_line:
            self._show(self._wrap.add("\n"))
        self._aside = True
        self._show(self._wrap.add(text))

    def _show(self, text: str) -> None:
        if text:
            (show_dim if self._aside else show)(text)


def _after(exchange: TimedExchange) -> None:
    """Print how many tokens an answer had, its speed, and whether the length limit cut it."""
    facts = [f"{exchange.completion_tokens} tokens"] if exchange.completion_tokens else []
    if exchange.ttft_s is not None:
        facts.append(f"first after {exchange.ttft_s * 1000:.0f} ms")
    if exchange.tokens_per_s is not None:
        facts.append(f"{exchange.tokens_per_s:.1f} tokens/s")
    if exchange.finish_reason == "length":
        facts.append("cut by the length limit")
    note(", ".join(facts))


async def _answer(server: ServerAddress, body: dict[str, Any], view: View) -> TimedExchange:
    async with server.open() as client:
        # Ctrl-C closes the connection: the server cancels.
        return await stream_chat(client, body, on_text=view.text, on_reasoning=view.reasoning, on_call=view.call)


async def _first_model(server: ServerAddress) -> str:
    async with server.open() as client:
        return await first_model(client)
