"""The endpoints that generate, of all dialects.

Each request is read, parsed, given slots, tokenised, generated and answered, in this order. A dialect interprets fields
and writes answers; the journal decides whether there is room.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from phalanx.errors import PhalanxError
from phalanx.http.body_budget import BodyLease
from phalanx.http.error_responses import public_failure
from phalanx.http.http_exchange import Answer, EventStream, Exchange, Reply
from phalanx.http.stream_records import Start
from phalanx.server.answers.deltas import Delta, ResponseHead, timing_json
from phalanx.server.answers.generation import Generation
from phalanx.server.dialects.common.answer_format import AnswerFormat
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody, StaticAnswer
from phalanx.server.endpoints.migration import StreamMigration
from phalanx.server.fields.json_pieces import to_json
from phalanx.server.fields.openai_bodies import Body
from phalanx.server.prompts.chat_encoding import ChatEncoder, Encoded
from phalanx.server.prompts.grammar_checks import GrammarChecks
from phalanx.server.prompts.prompt_encoder import SHORT, Prompts
from phalanx.server.requests.intake import Intake
from phalanx.server.requests.parsed import ApiModel, ChatRequest, CompletionRequest, Options
from phalanx.server.requests.validate import check_echoed, plan_sequences
from phalanx.server.sequences.journal import Journal, RequestSlots
from phalanx.server.sequences.request_log import RequestLife, RequestLog
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.types import ModelInfo, SequenceRequest

FEW_SCORED = 1024  # log-probabilities that are written on the event loop, in 3 ms
CHARS = 256  # that are written in the time of one log-probability

B = TypeVar("B", bound=Body)


class GenerationJob(Struct, frozen=True, kw_only=True):
    """A parsed request that is not tokenised yet."""

    options: Options
    encode: Callable[[ModelInfo, list[int] | None], Coroutine[Any, Any, Encoded]]
    """(model, `begun` of `Prompts.encode_chat`) -> prompts and what else the engine needs."""
    field: str  # that holds the prompts, for errors
    group: str  # of its sequences; always new, so that they differ from those of an answer that ends just now
    migration: StreamMigration
    life: RequestLife  # for the log, which takes it once it is submitted
    start: Start  # of the answer: its id, time and seed
    format: Callable[[ResponseHead], AnswerFormat]
    silence_s: float  # of a stream, after which its client gets a keep-alive
    texts: tuple[str | None, ...] = (None,)  # per prompt; None if the client sent token ids or messages
    echo: bool = False
    owner: str = ""  # of the request; see `owner_on_server`
    memory: BodyLease  # of the body, until the prompts are tokenised

    @property
    def n_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.texts) * self.options.n


class CompletionEndpoints:
    """Answers requests of any dialect.

    Args:
        determinism_key: of a server with this model; see `determinism_key.py`.
    """

    def __init__(
        self,
        config: ServerConfig,
        served: ApiModel,
        intake: Intake,
        prompts: Prompts,
        chats: ChatEncoder,
        grammars: GrammarChecks,
        journal: Journal,
        metrics: ServerMetrics,
        request_log: RequestLog,
        determinism_key: Callable[[ModelInfo], str],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._served = served
        self._intake = intake
        self._prompts = prompts
        self._chats = chats
        self._grammars = grammars
        self._journal = journal
        self._metrics = metrics
        self._request_log = request_log
        self._determinism_key = determinism_key
        self._clock = clock

    def of(self, dialect: Dialect[B]) -> Callable[[Exchange], Awaitable[Reply]]:
        """The handler of a dialect's requests."""

        async def endpoint(exchange: Exchange) -> Reply:
            """The model's answer, whole or as a stream."""
            owner = exchange.owner or ""
            migration = StreamMigration(exchange.headers, self._config.admin_key, self._prompts, self._determinism_key)
            with self._intake.memory(owner) as memory:
                asked = await self._intake.read(
                    exchange,
                    dialect.body,
                    lambda body: migration.accept(dialect.parse(body, self._served)),
                    memory=memory,
                    readers=dialect.readers,
                    body_in=migration.body,
                    n_before=migration.n_before,
                )
                if isinstance(asked, StaticAnswer):
                    self._journal.require_ready()
                    return Answer(to_json(asked.answer(int(time.time()))))
                job = self._job(asked, dialect, exchange, memory, migration)
                return await (self._stream(job) if job.options.stream else exchange.unless_lost(self._whole(job)))

        return endpoint

    def _job(
        self, asked: ParsedBody, dialect: Dialect[B], exchange: Exchange, memory: BodyLease, migration: StreamMigration
    ) -> GenerationJob:
        owner = exchange.owner or ""
        id = f"{dialect.id_prefix}{uuid.uuid4().hex}"
        silence_s = min(self._config.keepalive_seconds, dialect.longest_silence_s)
        parsed = asked.request
        seed = parsed.options.sampling.seed if parsed.options.seeded else secrets.randbits(64)
        start = migration.start(id, int(time.time()), seed)
        job = partial(
            GenerationJob,
            options=parsed.options,
            field=dialect.field,
            group=id,
            migration=migration,
            life=_life(parsed, exchange, start, migration.n_moves),
            start=start,
            format=asked.format,
            silence_s=silence_s,
            owner=owner,
            memory=memory,
        )
        if isinstance(parsed, ChatRequest):
            return job(
                encode=lambda info, begun: self._chats.encode(
                    parsed, owner, info.max_model_len, begun, with_checkpoint=not info.supports_rollback
                )
            )
        return job(
            encode=lambda info, _: self._encode_texts(parsed, info.max_model_len),
            texts=tuple(prompt if isinstance(prompt, str) else None for prompt in parsed.prompts),
            echo=parsed.echo,
        )

    async def _encode_texts(self, parsed: CompletionRequest, limit: int) -> Encoded:
        return Encoded(prompts=[await self._prompts.encode(prompt, limit=limit) for prompt in parsed.prompts])

    async def _whole(self, job: GenerationJob) -> Answer:
        with self._journal.reserve(job.n_choices, job.owner) as slots:
            generation = await self._prepare(job, slots)
            with self._request_log.watching(job.start.id, generation.is_complete):
                choices = await generation.choices(slots)
        timing = timing_json(generation.first_ending, None) if job.options.timing else None
        form, usage = job.format(self._head(job)), generation.usage()
        body = await self._prompts.run(_size(job, choices), lambda: to_json(form.whole(choices, usage, timing)))
        return Answer(body)

    async def _stream(self, job: GenerationJob) -> EventStream:
        with ExitStack() as stack:
            slots = stack.enter_context(self._journal.reserve(job.n_choices, job.owner))
            generation = await self._prepare(job, slots)
            stack.enter_context(self._request_log.watching(job.start.id, generation.is_complete))
            form = job.format(self._head(job))
            is_open = await job.migration.replay(generation, form, job.n_choices)
            await generation.begin(slots)  # errors up to here become an HTTP status
            events = self._events(job, form, generation, slots.arrived, is_open=is_open)
            events = job.migration.with_records(events, slots.output, form.media_type)
            return EventStream(events, stack.pop_all().close, form.media_type)

    async def _prepare(self, job: GenerationJob, slots: RequestSlots) -> Generation:
        info = self._journal.require_ready()
        encoded = await job.encode(info, await job.migration.prompt(info.vocab_size))
        prompts = encoded.prompts
        job.memory.free()
        answer = encoded.answer or job.options.answer
        grammar = await self._grammars.output_grammar(answer, job.owner, encoded.wrap)

        def plan() -> list[SequenceRequest]:
            planned = plan_sequences(
                job.options,
                prompts,
                field=job.field,
                group=job.group,
                seed=job.start.seed,
                eos_ids=self._served.eos_ids,
                info=info,
                echo=job.echo,
                owner=job.owner,
                grammar=grammar,
                checkpoint=encoded.checkpoint,
            )
            return job.migration.begin(planned, job.start, info, echo=job.echo, is_recalled=encoded.is_recalled)

        n_tokens = sum(map(len, prompts)) + job.migration.n_known
        requests = plan() if n_tokens <= SHORT else await self._prompts.run(n_tokens, plan)
        echoes: list[str | None] = [None] * len(prompts)
        if job.echo:
            pairs = zip(job.texts, prompts, strict=True)
            echoes = [await self._prompts.decode(ids) if text is None else text for text, ids in pairs]
            check_echoed(sum(map(len, filter(None, echoes))), job.options.n)
        job.life.arrived = slots.arrived
        self._request_log.begin(job.life, requests)
        return Generation(
            self._prompts.tokenizer,
            job.options,
            requests,
            echoes,
            id=job.start.id,
            parser_config=encoded.parser_config,
            watch=job.migration.watch,
        )

    async def _events(
        self, job: GenerationJob, form: AnswerFormat, generation: Generation, arrived: float, *, is_open: bool
    ) -> AsyncGenerator[bytes]:
        """The stream's bytes; none after a step without text. An error becomes an event, since the status was sent.

        Args:
            is_open: the client has the first events already.
        """
        so_far = generation.usage_so_far() if job.options.continuous_usage else None
        if not is_open:
            yield form.opening(job.n_choices, so_far) or form.keep_alive
        for delta in generation.opening():  # one by one: an echoed prompt may be long, and there may be many
            yield await self._written(_size(job, [delta]), partial(form.events, [delta], so_far))
        first_byte_s: float | None = None
        last_s = self._clock()  # when bytes were last sent
        try:
            async with aclosing(generation.deltas(job.silence_s)) as deltas:
                async for new in deltas:
                    so_far = generation.usage_so_far() if job.options.continuous_usage else None
                    written = await self._written(_size(job, new), partial(form.events, new, so_far))
                    if not written and self._clock() - last_s < job.silence_s:
                        yield b""
                        continue
                    yield written or form.keep_alive
                    last_s = self._clock()
                    if first_byte_s is None and written and any(delta.n_chars for delta in new):
                        first_byte_s = self._clock() - arrived
                        self._metrics.first_byte(first_byte_s)
        except PhalanxError as error:
            job.migration.fail(error)
            self._request_log.fail(job.start.id, str(error))
            yield form.failure(public_failure(error))
            return
        timing = timing_json(generation.first_ending, first_byte_s) if job.options.timing else None
        usage = generation.usage()
        n_scored = usage.completion * _scores_of_one(job)  # a dialect may repeat them
        yield await self._written(n_scored, partial(form.closing, usage, timing))

    async def _written(self, size: int, write: Callable[[], bytes]) -> bytes:
        """The result of `write`, called on a thread for long output, such as an echoed prompt."""
        return write() if size <= FEW_SCORED else await self._prompts.run(size, write)

    def _head(self, job: GenerationJob) -> ResponseHead:
        options = job.options
        return ResponseHead(
            id=job.start.id,
            created=job.start.created,
            model=options.model,
            logprobs=options.sampling.logprobs is not None,
            usage_at_end=options.include_usage or options.timing or options.speculation,
            null_usage=options.stream and options.include_usage,
            moves=job.migration.moves,
        )


def _life(parsed: ChatRequest | CompletionRequest, exchange: Exchange, start: Start, moves: int) -> RequestLife:
    messages = parsed.conversation.messages if isinstance(parsed, ChatRequest) else []
    return RequestLife(
        id=start.id,
        request_id=exchange.id,
        owner=exchange.owner or "",
        model=parsed.options.model,
        endpoint=exchange.endpoint,
        created=start.created,
        arrived=0.0,
        stream=parsed.options.stream,
        moves=moves,
        roles=tuple(message["role"] for message in messages),
        contents=tuple(message["content"] for message in messages),
    )


def _size(job: GenerationJob, deltas: list[Delta]) -> int:
    """The cost of writing these deltas, in log-probabilities."""
    n_scored = sum(len(delta.scored) for delta in deltas) * _scores_of_one(job)
    return n_scored + sum(delta.n_chars for delta in deltas) // CHARS


def _scores_of_one(job: GenerationJob) -> int:
    """Log-probabilities of one token in the answer."""
    top = job.options.sampling.logprobs
    return 0 if top is None else 1 + top
