"""`phalanx generate`: one prompt, one answer, through the server's own path (parse, journal, decode) without HTTP.

What a flag means is decided where the API's fields are (`server/validate.py`): this file only builds the body.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from phalanx.cli.flags import Flags, flag, with_settings
from phalanx.cli.terminal import LoadingView, report, set_up_logging
from phalanx.config import DEFAULT_MODEL, EngineConfig, LogLevel, ServerConfig
from phalanx.errors import ConfigError, EngineUnavailable, ExitCode
from phalanx.model.loading.resolve import resolve
from phalanx.offline.sampling_params import SamplingParams
from phalanx.offline.settings import check_engine
from phalanx.server.answers import Ending, timing_json
from phalanx.server.defaults import read_defaults
from phalanx.server.generation import Generation
from phalanx.server.journal import Journal
from phalanx.server.metrics import Metrics
from phalanx.server.parsed import Served
from phalanx.server.prompts import Prompts
from phalanx.server.schema import ChatBody, CompletionBody
from phalanx.server.validate import parse_chat, parse_completion, plan_sequences
from phalanx.spec.stats import report as speculation_report
from phalanx.supervision.client import EngineClient
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Batch, EngineStats, ModelInfo, Tokens

SETTINGS = Flags(
    "model", "max_model_len", "dtype", "revision", "trust_remote_code", "cpu_kernels", "cpu_precision", "threads",
    "trace", "kv_cache_gb", "memory_guard_gb", "speculative_config", "tensor_parallel_size", "backend",
    model=DEFAULT_MODEL, max_num_seqs=1, prefix_cache_gb=0.0,
)  # fmt: skip
SAMPLING = Flags("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


class Result(Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    text: str
    tokens: list[int]
    """Output token ids, the stop token included."""
    finish_reason: str
    usage: dict[str, object]
    """As OpenAI's."""
    timing: dict[str, float]
    """Seconds: queue, prefill, ttft, tpot."""
    seed: int
    """Give it as --seed to get the same tokens again."""
    speculation: dict[str, object] | None
    """Drafted and accepted tokens; null without --speculative-config."""


@with_settings
def command(
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to answer; `-` reads it from stdin.")],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    sampling: Annotated[SamplingParams, SAMPLING],
    config: Annotated[EngineConfig, SETTINGS],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    log_level: Annotated[LogLevel, flag(ServerConfig, "log_level")] = "warning",
) -> int:
    """Write one answer to a prompt, then end."""
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw leaves out.", remedy="Give one of them.")
    text = sys.stdin.read() if prompt == "-" else prompt
    shared = {"seed": secrets.randbits(63), **sampling.fields()}
    if raw:
        body: ChatBody | CompletionBody = CompletionBody.model_validate({"prompt": text, **shared})
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        body = ChatBody.model_validate({"messages": [*messages, {"role": "user", "content": text}], **shared})
    set_up_logging(log_level)
    return asyncio.run(run(check_engine(config), body, json))


async def run(config: EngineConfig, body: ChatBody | CompletionBody, as_json: bool) -> int:
    """Start an engine, answer, print, end the engine."""
    path = resolve(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    tokenizer = Tokenizer.load(path, trust_remote_code=config.trust_remote_code)
    served = Served(
        names=(config.model,),
        max_n=1,
        defaults=read_defaults(path),
        eos_ids=frozenset(tokenizer.eos_ids),
        template_kwargs={},
    )
    engine = EngineProcess(config)
    once = Once(engine, tokenizer, served)
    try:
        with LoadingView(engine):
            await engine.start()
            if not await once.ready():
                report(EngineUnavailable(f"The engine did not start: {engine.state.reason}."))
                return engine.state.exit_code or ExitCode.CRASH
        result = await once.answer(body, _ignore if as_json else _write)
    finally:
        await engine.close()
        once.close()
    print(msgspec.json.encode(result).decode() if as_json else "")
    return ExitCode.OK


class Once:
    """The server's path for a single request. An `EngineListener`, for token ids and for the end of loading."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, served: Served) -> None:
        self._engine = engine
        self._served = served
        self._prompts = Prompts(tokenizer)
        self._journal = Journal(engine, Metrics(served.names[0]), max_num_seqs=1, queue=0, clock=time.monotonic)
        self._tokens: list[int] = []
        self._up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        engine.subscribe(self)

    async def ready(self) -> bool:
        """Wait for the engine; False when it will not come."""
        return await self._up

    async def answer(self, body: ChatBody | CompletionBody, show: Callable[[str], None]) -> Result:
        """Generate, showing text as it comes.

        Raises:
            PhalanxError: the request cannot be answered.
        """
        info = self._journal.require_ready()
        with self._journal.reserve(1) as slots:
            if isinstance(body, ChatBody):
                chat = parse_chat(body, self._served)
                options, field = chat.options, "messages"
                prompt = await self._prompts.encode_chat(chat.conversation)
            else:
                completion = parse_completion(body, self._served)
                options, field = completion.options, "prompt"
                prompt = await self._prompts.encode(completion.prompts[0])
            requests = plan_sequences(
                options,
                [prompt],
                field=field,
                group="generate",
                seed=options.sampling.seed,
                eos_ids=self._served.eos_ids,
                info=info,
            )
            generation = Generation(self._prompts.tokenizer, options, requests, [None])
            generation.begin(slots)
            pieces: list[str] = []
            async for deltas in generation.deltas(None):
                for delta in deltas:
                    pieces.append(delta.text)
                    show(delta.text)
        stats = await self._engine.ping()
        return self._result("".join(pieces), generation, generation.first_ending, body.seed or 0, stats)

    def close(self) -> None:
        """Drop the tokenizer's threads."""
        self._prompts.close()

    def _result(self, text: str, generation: Generation, ending: Ending, seed: int, stats: EngineStats) -> Result:
        return Result(
            text=text,
            tokens=self._tokens[: ending.n_tokens],
            finish_reason=ending.reason,
            usage=generation.usage().json(),
            timing=timing_json(ending, None),
            seed=seed,
            speculation=None if stats.spec is None else speculation_report(stats.spec),
        )

    def on_batch(self, batch: Batch) -> None:
        """Collect token ids; the server's own objects carry text only."""
        for event in batch.events:
            if isinstance(event, Tokens):
                self._tokens += event.tokens

    def on_ready(self, info: ModelInfo) -> None:
        """Loading is over."""
        if not self._up.done():
            self._up.set_result(True)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """It failed, perhaps for good."""
        if not will_restart and not self._up.done():
            self._up.set_result(False)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    """Nothing is shown before the JSON object."""
