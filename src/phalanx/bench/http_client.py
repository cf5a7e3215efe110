"""Streams one request to an OpenAI-compatible server, with a time stamp for every chunk of text.

The load generator and the command line (`chat`, `demo`, `launch`) use it. Knows only OpenAI's wire format, so it works
with any server. It does not trust one: what it reads is bounded, and typed before it is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from phalanx.errors import ConfigError, PhalanxError
from phalanx.http.foreign_json import decoder
from phalanx.tls.trust import trust_only

CONNECT_S = 10.0  # a server that is busy accepts connections all the same
NO_LIMIT = httpx.Timeout(None, connect=CONNECT_S)  # no limit on the time of an answer
LIST_S = 60.0  # for the list of models, which no server computes
MAX_LIST = 4 << 20  # bytes of the list of models
MAX_EVENT = 16 << 20  # bytes of one event, as at the gateway
MAX_STREAM = 512 << 20  # bytes of an answer; of a million tokens, about 200 MB
MAX_ERROR = 64 << 10  # bytes that are read of a refusal
MAX_MESSAGE = 2000  # characters that are shown of it
MAX_NAME = 512  # characters of a model's name, which may become an argument of a program
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)
KEY_REMEDY = "Give one of the server's keys: --api-key, or PHALANX_API_KEY."
REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "Give the certificate that the server has now: --ssl-certfile FILE.",
    "WRONG_VERSION_NUMBER": "The server there does not speak HTTPS: try http://.",
    "RECORD_LAYER_FAILURE": "The server there does not speak HTTPS: try http://.",
    "Server disconnected without sending a response": "Does the server speak HTTPS? Then try https://.",
}
"""Part of an error of httpx -> what to do."""


class RequestFailed(PhalanxError):
    """A request failed. `status` is the HTTP status; None if the server sent none."""

    def __init__(self, message: str, *, remedy: str = "", status: int | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class TimedExchange(Struct, frozen=True, kw_only=True):
    """A finished stream. Times are seconds on this process's monotonic clock."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    sent: float
    arrivals: tuple[float, ...]  # of chunks with text, in order
    ended: float
    timing: dict[str, float] | None = None  # phalanx's `timing` extension, if the server sent it

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending the request to the first text; None without text."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first, to the stream's end: the last tokens may have no text."""
        n = self.completion_tokens or len(self.arrivals)
        if not self.arrivals or n < 2:
            return None
        return (self.ended - self.arrivals[0]) / (n - 1)

    @property
    def e2el_s(self) -> float:
        """Seconds from sending the request to the stream's end."""
        return self.ended - self.sent

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first one: by the server's clock if known, since chunks may arrive in bursts."""
        tpot = (self.timing or {}).get("tpot") or self.tpot_s
        return 1.0 / tpot if tpot else None


def open_client(base_url: str, api_key: str | None = None, certificate: Path | None = None) -> httpx.AsyncClient:
    """A client for `base_url` (which ends in /v1). It ignores the environment's proxies, even for other machines.

    Args:
        certificate: the server's (PEM): with https, exactly this one is accepted; None asks the usual authorities.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    try:
        verify = True if certificate is None else trust_only(certificate)
    except OSError as error:  # ssl.SSLError among them
        raise ConfigError(
            f"{certificate} is not a certificate (PEM): {error.strerror or error}.",
            remedy="Give the file that the server has as --ssl-certfile.",
        ) from error
    return httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=NO_LIMIT, limits=UNLIMITED, trust_env=False, verify=verify
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the first model that the server lists.

    Raises:
        RequestFailed: as of `listed_models`.
    """
    return (await listed_models(client))[0].id


Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class ListedModel(Struct):
    """A model as a server lists it."""

    id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    max_model_len: Count | None = None  # tokens; None: the server does not say
    tool_call_parser: str | UnsetType | None = UNSET  # phalanx's: None if the model cannot call tools


class _Models(Struct):
    data: list[ListedModel] = []


_models = decoder(_Models)


async def listed_models(client: httpx.AsyncClient) -> list[ListedModel]:
    """The models that the server lists, at least one.

    Names are printable, on one line, and of at most MAX_NAME characters.

    Raises:
        RequestFailed: the server cannot be reached, refuses the key, lists no model, or answers in another form.
    """
    try:
        async with asyncio.timeout(LIST_S), client.stream("GET", "/models") as response:
            if response.status_code != httpx.codes.OK:
                raise await _refused(response)
            body = await _beginning(response, MAX_LIST)
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error
    except TimeoutError as error:
        raise RequestFailed(
            f"{client.base_url}models did not answer within {LIST_S:g} s.", remedy="Is it the address of a server?"
        ) from error
    if len(body) > MAX_LIST:
        raise RequestFailed(f"{client.base_url}models answers more than {MAX_LIST} bytes.")
    try:
        listed = _models(body).data
    except msgspec.DecodeError as error:
        raise RequestFailed(
            f"{client.base_url}models is not a list of models: {error}.", remedy="Is it the address of a server?"
        ) from error
    if not listed:
        raise RequestFailed(f"{client.base_url} lists no model.")
    for model in listed:
        if not model.id.isprintable():  # it would command a terminal, or be more than one line of a file
            raise RequestFailed(f"{client.base_url} lists a model with control characters in its name: {model.id!a}.")
    return listed


async def stream_chat(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    *,
    on_text: Callable[[str], None] | None = None,
    on_reasoning: Callable[[str], None] | None = None,
    on_call: Callable[[str, str], None] | None = None,
    path: str = "/chat/completions",
) -> TimedExchange:
    """Post `body` as a streaming request and read the answer to its end.

    Args:
        on_text: gets each further part of the answer's content.
        on_reasoning: the same of its reasoning.
        on_call: the same of its calls: the name of one that begins, else empty, and a part of the arguments, JSON.

    Raises:
        RequestFailed: the server cannot be reached, answers an error, or breaks the stream.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    record = _Record(on_text or _pass, on_reasoning or _pass, on_call or _pass)
    try:
        async with client.stream("POST", path, json=request) as response:
            if response.status_code != httpx.codes.OK:
                raise await _refused(response)
            async for event in _events(response):
                record.add(event)
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error
    return record.exchange()


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Event(Struct):
    """The fields of an event that this client reads."""

    error: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timing: dict[str, float] | None = None


_event = decoder(_Event)
_any = decoder(object)


class _Record:
    """Collects the events of one stream."""

    def __init__(
        self,
        on_text: Callable[[str], None],
        on_reasoning: Callable[[str], None],
        on_call: Callable[[str, str], None],
    ) -> None:
        self._on_text = on_text
        self._on_reasoning = on_reasoning
        self._on_call = on_call
        self._sent = time.monotonic()
        self._arrivals: list[float] = []
        self._pieces: list[str] = []
        self._finish_reason: str | None = None
        self._usage = _Usage()
        self._timing: dict[str, float] | None = None

    def add(self, event: _Event) -> None:
        """Add an event."""
        if event.error is not None:
            raise RequestFailed(f"The stream ended with an error: {_message({'error': event.error})}")
        for choice in event.choices or ():
            delta = choice.delta or _Delta()
            text = choice.text or delta.content or ""
            reasoning = delta.reasoning_content or delta.reasoning or ""
            calls = [call.function or _Function() for call in delta.tool_calls or ()]
            if text or reasoning or calls:
                self._arrivals.append(time.monotonic())
            if reasoning:
                self._on_reasoning(reasoning)
            if text:
                self._pieces.append(text)
                self._on_text(text)
            for call in calls:
                self._on_call(call.name or "", call.arguments or "")
            self._finish_reason = choice.finish_reason or self._finish_reason
        self._usage = event.usage or self._usage
        self._timing = event.timing or self._timing

    def exchange(self) -> TimedExchange:
        """The finished exchange; to be called after the stream ended."""
        return TimedExchange(
            text="".join(self._pieces),
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            sent=self._sent,
            arrivals=tuple(self._arrivals),
            ended=time.monotonic(),
            timing=self._timing,
        )


def _pass(*parts: str) -> None:
    """Do nothing with a part of an answer."""


async def _events(response: httpx.Response) -> AsyncIterator[_Event]:
    """Yield the JSON of each `data:` line up to [DONE]; skip comments and other fields."""
    done = False
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        try:
            yield _event(data)
        except msgspec.DecodeError as error:
            raise RequestFailed(f"{response.request.url} sent an event that is not OpenAI's: {error}.") from error
    if not done:
        raise RequestFailed("The stream broke off before its end.")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of an answer, with their ends.

    Raises:
        RequestFailed: a line, or the answer, is too long.
    """
    held, size = bytearray(), 0
    async for part in _parts(response):
        size += len(part)
        held += part
        if size > MAX_STREAM:
            raise RequestFailed(f"{response.request.url} sends an answer of more than {MAX_STREAM >> 20} MiB.")
        if len(held) > MAX_EVENT:
            raise RequestFailed(f"{response.request.url} sends an event of more than {MAX_EVENT >> 20} MiB.")
        if b"\n" in part or b"\r" in part:
            lines = bytes(held).splitlines(keepends=True)
            held = bytearray(b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop())
            for line in lines:
                yield line
    if held:
        yield bytes(held)


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes. Not compressed: no one asked for that, and a few bytes could become gigabytes."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise RequestFailed(
            f"{response.request.url} answers in the encoding {encoding[:40]!a}, which was not asked for."
        )
    async for part in response.aiter_raw():
        yield part


async def _beginning(response: httpx.Response, limit: int) -> bytes:
    """The body; of a longer one the beginning, with more than `limit` bytes."""
    body = b""
    async for part in _parts(response):
        body += part
        if len(body) > limit:
            break
    return body


async def _refused(response: httpx.Response) -> RequestFailed:
    """The error for an answer whose status is not 200; reads the beginning of its body."""
    body = await _beginning(response, MAX_ERROR)
    try:
        message = _message(_any(body))
    except msgspec.DecodeError:
        message = body.decode(errors="replace")[:500]
    remedy = KEY_REMEDY if response.status_code == httpx.codes.UNAUTHORIZED else ""
    if response.status_code == httpx.codes.NOT_FOUND and response.request.url.path.endswith("/models"):
        remedy = "Give the server's own address, as http://127.0.0.1:8000."
    return RequestFailed(
        f"{response.request.url} answered {response.status_code}: {message}",
        remedy=remedy,
        status=response.status_code,
    )


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_MESSAGE]


def unreachable(client: httpx.AsyncClient, error: httpx.HTTPError) -> RequestFailed:
    """The error of a server that gives no answer."""
    cause = str(error).rstrip(".") or type(error).__name__
    remedies = (remedy for part, remedy in REMEDIES.items() if part in cause)
    return RequestFailed(
        f"No answer from {client.base_url}: {cause}.",
        remedy=next(remedies, "Is the server running there? `phalanx serve` prints its address."),
    )
