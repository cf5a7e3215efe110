"""OpenAI's endpoints. Each request is read, parsed, given slots, tokenised, generated and answered, in this order.

Other modules decide: `validate.py` what a field means, the journal whether there is room, `app.py` which status an
error has. Does not know the engine process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from msgspec import Struct
from starlette.responses import JSONResponse

from phalanx.config import ServerConfig
from phalanx.errors import PhalanxError
from phalanx.server.answers import ChatFormat, CompletionFormat, Delta, ResponseFormat, ResponseHead, timing_json
from phalanx.server.generation import Generation
from phalanx.server.intake import cache_salt, read_body
from phalanx.server.journal import Journal
from phalanx.server.metrics import Metrics
from phalanx.server.parsed import Options, Served
from phalanx.server.prompts import Prompts
from phalanx.server.schema import ChatBody, CompletionBody
from phalanx.server.stream import DONE, KEEP_ALIVE, EventStream, disconnected, event
from phalanx.server.validate import parse_chat, parse_completion, plan_sequences

CLIENT_GONE = 499  # nginx's status for its log; the client, which has left, never sees it

ErrorObject = Callable[[PhalanxError], Mapping[str, Any]]


class Job(Struct, frozen=True, kw_only=True):
    """A parsed request that is not tokenised yet."""

    options: Options
    encode: Callable[[int], Coroutine[Any, Any, list[list[int]]]]  # (max_model_len) -> token ids of each prompt
    n_prompts: int
    field: str  # "prompt" or "messages", for errors
    id: str
    format: Callable[[ResponseHead], ResponseFormat]
    texts: tuple[str | None, ...] = (None,)  # per prompt; None if the client sent token ids or messages
    echo: bool = False
    salt: str = ""  # of the prefix cache


class CompletionEndpoints:
    """`/v1/chat/completions` and `/v1/completions`."""

    def __init__(
        self,
        config: ServerConfig,
        served: Served,
        prompts: Prompts,
        journal: Journal,
        metrics: Metrics,
        error_object: ErrorObject,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._served = served
        self._prompts = prompts
        self._journal = journal
        self._metrics = metrics
        self._error_object = error_object
        self._clock = clock

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`"""
        parsed = parse_chat(await read_body(request, ChatBody, self._config.max_body_bytes), self._served)

        async def encode(limit: int) -> list[list[int]]:
            return [await self._prompts.encode_chat(parsed.conversation, limit=limit)]

        job = Job(
            options=parsed.options,
            encode=encode,
            n_prompts=1,
            field="messages",
            id=f"chatcmpl-{uuid.uuid4().hex}",
            format=ChatFormat,
            salt=cache_salt(request.state.api_key),
        )
        return await self._answer(request, job)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`"""
        parsed = parse_completion(await read_body(request, CompletionBody, self._config.max_body_bytes), self._served)

        async def encode(limit: int) -> list[list[int]]:
            return [await self._prompts.encode(prompt, limit=limit) for prompt in parsed.prompts]

        job = Job(
            options=parsed.options,
            encode=encode,
            n_prompts=len(parsed.prompts),
            field="prompt",
            id=f"cmpl-{uuid.uuid4().hex}",
            format=CompletionFormat,
            texts=tuple(prompt if isinstance(prompt, str) else None for prompt in parsed.prompts),
            echo=parsed.echo,
            salt=cache_salt(request.state.api_key),
        )
        return await self._answer(request, job)

    async def _answer(self, request: Request, job: Job) -> Response:
        if job.options.stream:
            return await self._stream(job)
        return await unless_disconnected(request, self._whole(job))

    async def _whole(self, job: Job) -> Response:
        with self._journal.reserve(job.n_prompts * job.options.n) as slots:
            generation = await self._prepare(job)
            choices = await generation.choices(slots)
        timing = timing_json(generation.first_ending, None) if job.options.timing else None
        body = job.format(self._head(job)).whole(choices, generation.usage(), timing)
        return JSONResponse(body)

    async def _stream(self, job: Job) -> Response:
        with ExitStack() as stack:
            slots = stack.enter_context(self._journal.reserve(job.n_prompts * job.options.n))
            generation = await self._prepare(job)
            first = generation.begin(slots)  # errors up to here become an HTTP status
            events = self._events(job, generation, slots.arrived, first)
            return EventStream(events, stack.pop_all().close)

    async def _prepare(self, job: Job) -> Generation:
        info = self._journal.require_ready()
        prompts = await job.encode(info.max_model_len)
        requests = plan_sequences(
            job.options,
            prompts,
            field=job.field,
            group=job.id,
            seed=job.options.sampling.seed if job.options.seeded else secrets.randbits(64),
            eos_ids=self._served.eos_ids,
            info=info,
            echo=job.echo,
            cache_salt=job.salt,
        )
        echoes: list[str | None] = [None] * len(prompts)
        if job.echo:
            pairs = zip(job.texts, prompts, strict=True)
            echoes = [await self._prompts.decode(ids) if text is None else text for text, ids in pairs]
        return Generation(self._prompts.tokenizer, job.options, requests, echoes)

    async def _events(
        self, job: Job, generation: Generation, arrived: float, first: list[Delta]
    ) -> AsyncGenerator[bytes]:
        """The stream's bytes. An error becomes an event, because the status was sent before."""
        form = job.format(self._head(job))
        openings = [form.opening(index) for index in range(job.n_prompts * job.options.n)]
        yield b"".join(event(chunk) for chunk in openings if chunk is not None) or KEEP_ALIVE
        if first:
            yield b"".join(event(form.chunk(delta)) for delta in first)
        first_byte_s: float | None = None
        try:
            async with aclosing(generation.deltas(self._config.keepalive_seconds)) as deltas:
                async for new in deltas:
                    yield b"".join(event(form.chunk(delta)) for delta in new) or KEEP_ALIVE
                    if first_byte_s is None and any(delta.text for delta in new):
                        first_byte_s = self._clock() - arrived
                        self._metrics.first_byte(first_byte_s)
        except PhalanxError as error:
            yield event(self._error_object(error)) + DONE
            return
        timing = timing_json(generation.first_ending, first_byte_s) if job.options.timing else None
        if job.options.include_usage or timing is not None or job.options.speculation:
            yield event(form.usage_chunk(generation.usage(), timing))
        yield DONE

    def _head(self, job: Job) -> ResponseHead:
        return ResponseHead(
            id=job.id,
            created=int(time.time()),
            model=job.options.model,
            logprobs=job.options.sampling.logprobs is not None,
            null_usage=job.options.stream and job.options.include_usage,
        )


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes; cancels the work when the client disconnects."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = task.done()
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    return task.result() if finished else Response(status_code=CLIENT_GONE)
