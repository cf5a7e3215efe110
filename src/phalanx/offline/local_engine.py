"""An engine of this process's own, and the server's path to it without HTTP: parse, journal, decode.

`phalanx generate` runs it for one prompt, `LLM` for many. Runs on one event loop. The caller bounds the number of
running requests.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from phalanx.catalog.pull_progress import Report, quiet
from phalanx.config import EngineConfig
from phalanx.errors import EngineUnavailable
from phalanx.model.loading.resolve import resolve_models
from phalanx.offline.engine_settings import check_start
from phalanx.offline.outputs import CompletionOutput, Logprob, RequestOutput
from phalanx.server.answers.deltas import ChoiceEnding, timing_json
from phalanx.server.answers.generation import Generation
from phalanx.server.dialects.openai.openai_objects import usage_json
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody
from phalanx.server.fields.refusals import in_range
from phalanx.server.prompts.grammar_checks import GrammarChecks
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.requests.generation_defaults import read_defaults
from phalanx.server.requests.parsed import ApiModel, ChatRequest, CompletionRequest
from phalanx.server.requests.sampling_fields import MAX_TOP_LOGPROBS
from phalanx.server.requests.validate import parse_chat, parse_completion, plan_sequences
from phalanx.server.sequences.journal import Journal, RequestSlots
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.supervision.client import EngineClient
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Batch, ModelInfo, PromptScored, SequenceRequest, TokenLogprobs, Tokens

WAITING = 1 << 20  # choices; the queue is never full for a client
MAX_N = 1024  # as `phalanx serve --max-n` allows at most


@dataclass
class _Record:
    """Token ids and log-probabilities of one sequence. The server's own objects carry text."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, where asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LocalEngine:
    """Answers requests through an engine. An `EngineListener`, for token ids and for the end of loading.

    Args:
        engine: not started yet; `start` and `close` start and close it.
        report: called with the progress of a download.

    Raises:
        ModelNotFound: the model is neither a directory nor a hub id that could be fetched.
        ModelUnsupported, ConfigError, MemoryShortage: as `check_start`.
    """

    def __init__(self, config: EngineConfig, engine: EngineClient, report: Report = quiet) -> None:
        self._config = config
        self._engine = engine
        self._path = resolve_models(config, report)
        check_start(config, self._path)
        self._journal = Journal(
            engine,
            ServerMetrics(config.model),
            max_num_seqs=config.max_num_seqs,
            queue=WAITING,
            prompt_bytes=sys.maxsize,
            clock=time.monotonic,
        )
        self._records: dict[str, _Record] = {}  # by the sequence's id
        self._numbers = itertools.count()
        self._loaded: asyncio.Future[bool] | None = None
        self._prompts: Prompts | None = None
        self._grammars: GrammarChecks | None = None
        self._served: ApiModel | None = None

    async def start(self) -> None:
        """Start the engine, load the tokenizer beside it, and wait until both are there.

        Raises:
            ModelError: the tokenizer cannot be loaded.
            EngineUnavailable: the engine did not start; with its reason.
        """
        loop = asyncio.get_running_loop()
        self._loaded = loop.create_future()
        self._engine.subscribe(self)
        await self._engine.start()
        with ThreadPoolExecutor(1, thread_name_prefix="load tokenizer") as pool:
            tokenizer = await loop.run_in_executor(pool, self._load_tokenizer)
        self._prompts = Prompts(tokenizer)
        self._grammars = GrammarChecks(tokenizer)
        self._served = ApiModel(
            names=(self._config.model,),
            max_n=MAX_N,
            max_prompts=1,
            defaults=read_defaults(self._path),
            eos_ids=frozenset(tokenizer.eos_ids),
            template_kwargs={},
        )
        if not await self._loaded:
            raise EngineUnavailable(f"The engine did not start: {self._engine.state.reason.rstrip('.')}.")

    async def close(self) -> None:
        """End the engine's processes and drop the tokenizer's threads. Safe to call twice and before `start`."""
        await self._engine.close()
        if self._prompts is not None:
            self._prompts.close()
        if self._grammars is not None:
            self._grammars.close()

    async def answer(
        self,
        body: ChatBody | CompletionBody,
        *,
        prompt_logprobs: int | None = None,
        show: Callable[[str], None] | None = None,
    ) -> RequestOutput:
        """Answer one prompt with `n` choices.

        Args:
            body: as the HTTP API takes it; a completion has one prompt.
            prompt_logprobs: number of most likely tokens that are reported per prompt token.
            show: gets the text as it comes, for a single choice.

        Raises:
            PhalanxError: the request cannot be answered.
        """
        info = self._journal.require_ready()
        assert self._prompts is not None and self._grammars is not None and self._served is not None, (
            "start comes first"
        )
        if prompt_logprobs is not None:
            in_range("prompt_logprobs", prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        parsed = parse_chat(body, self._served) if isinstance(body, ChatBody) else parse_completion(body, self._served)
        options = parsed.options
        with self._journal.reserve(options.n) as slots:
            text, prompt = await _encode(self._prompts, parsed, info.max_model_len)
            grammar = await self._grammars.output_grammar(options.answer, owner="")
            requests = plan_sequences(
                options,
                [prompt],
                field="messages" if isinstance(body, ChatBody) else "prompt",
                group=f"offline-{next(self._numbers)}",
                seed=options.sampling.seed if options.seeded else secrets.randbits(64),
                eos_ids=self._served.eos_ids,
                info=info,
                grammar=grammar,
            )
            requests = [replace(request, prompt_logprobs=prompt_logprobs) for request in requests]
            generation = Generation(self._prompts.tokenizer, options, requests, [None], id=requests[0].group)
            return await self._generate(generation, slots, requests, text, show)

    async def _generate(
        self,
        generation: Generation,
        slots: RequestSlots,
        requests: Sequence[SequenceRequest],
        text: str | None,
        show: Callable[[str], None] | None,
    ) -> RequestOutput:
        """Run a planned request to its end."""
        texts = [""] * len(requests)
        endings: dict[int, ChoiceEnding] = {}
        with self._recording(requests) as records:
            await generation.begin(slots)
            async for deltas in generation.deltas(None):
                for delta in deltas:
                    texts[delta.index] += delta.text
                    if delta.ending is not None:
                        endings[delta.index] = delta.ending
                    if show is not None:
                        show(delta.text)
        return RequestOutput(
            request_id=requests[0].group,
            prompt=text,
            prompt_token_ids=requests[0].prompt,
            prompt_logprobs=self._scored(records[0].prompt_logprobs),
            outputs=[self._output(i, texts[i], endings[i], record) for i, record in enumerate(records)],
            usage=usage_json(generation.usage()),
            timing=timing_json(generation.first_ending, None),
        )

    def _output(self, index: int, text: str, ending: ChoiceEnding, record: _Record) -> CompletionOutput:
        logprobs = self._scored(record.logprobs[: ending.n_tokens] if record.logprobs else None)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=record.tokens[: ending.n_tokens],
            finish_reason=ending.reason,
            logprobs=None if logprobs is None else [entry for entry in logprobs if entry is not None],
        )

    def _scored(self, tokens: Sequence[TokenLogprobs | None] | None) -> list[dict[int, Logprob] | None] | None:
        """Per token, the token itself and the most likely ones."""
        return None if tokens is None else [None if token is None else self._candidates(token) for token in tokens]

    def _candidates(self, token: TokenLogprobs) -> dict[int, Logprob]:
        assert self._prompts is not None
        tokenizer = self._prompts.tokenizer
        candidates = [(token.token, token.logprob, token.rank + 1)]
        candidates += [(other, logprob, rank) for rank, (other, logprob) in enumerate(token.top, 1)]
        return {id: Logprob(logprob, rank, tokenizer.token_text(id)) for id, logprob, rank in candidates}

    @contextmanager
    def _recording(self, requests: Sequence[SequenceRequest]) -> Iterator[list[_Record]]:
        """Record the tokens committed for these sequences, in their order."""
        records = {request.id: _Record() for request in requests}
        self._records |= records
        try:
            yield list(records.values())
        finally:
            for id in records:
                del self._records[id]

    def _load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._path, trust_remote_code=self._config.trust_remote_code)

    # The engine's listener -------------------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Record the tokens of a step."""
        for event in batch.events:
            record = self._records.get(event.id)
            if record is None:
                continue
            if isinstance(event, Tokens):
                record.tokens += event.tokens
                record.logprobs += event.logprobs or []
            elif isinstance(event, PromptScored):
                record.prompt_logprobs = event.logprobs

    def on_ready(self, info: ModelInfo) -> None:
        """Loading is over."""
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(True)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """The engine is gone; if for good, it will not load either."""
        if self._loaded is not None and not will_restart and not self._loaded.done():
            self._loaded.set_result(False)


async def _encode(
    prompts: Prompts, parsed: ChatRequest | CompletionRequest, max_model_len: int
) -> tuple[str | None, list[int]]:
    """The prompt's text, if it is known, and its token ids."""
    if isinstance(parsed, ChatRequest):
        ids = (await prompts.encode_chat(parsed.conversation, limit=max_model_len)).tokens
        return prompts.tokenizer.decode(ids, skip_special_tokens=False), ids
    (prompt,) = parsed.prompts
    return prompt if isinstance(prompt, str) else None, await prompts.encode(prompt, limit=max_model_len)
