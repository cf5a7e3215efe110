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

from phalanx.cli.options import (
    DEFAULTS,
    BackendOption,
    CpuKernels,
    CpuPrecisionOption,
    DtypeOption,
    KvCacheGb,
    LogLevelOption,
    MaxModelLen,
    MemoryGuardGb,
    Model,
    Revision,
    SpeculativeConfigOption,
    TensorParallelSize,
    Threads,
    Trace,
    TrustRemoteCode,
    check_engine,
    number,
    whole,
)
from phalanx.cli.terminal import LoadingView, report, set_up_logging
from phalanx.config import EngineConfig
from phalanx.errors import ConfigError, EngineUnavailable, ExitCode
from phalanx.model.loading.resolve import resolve
from phalanx.server.answers import Ending, timing_json
from phalanx.server.defaults import read_defaults
from phalanx.server.generation import Generation
from phalanx.server.journal import Journal
from phalanx.server.metrics import Metrics
from phalanx.server.parsed import Served
from phalanx.server.prompts import Prompts
from phalanx.server.schema import ChatBody, CompletionBody
from phalanx.server.validate import parse_chat, parse_completion, plan_sequences
from phalanx.spec.parse_config import parse as parse_speculation
from phalanx.spec.stats import report as speculation_report
from phalanx.supervision.client import EngineClient
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Batch, EngineStats, ModelInfo, Tokens

_SAMPLING = "Sampling"


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
    """What it came to; null without --speculative-config."""


def command(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to answer; `-` reads it from stdin.")],
    model: Model = "demo",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(**whole(1), help="Output tokens, at most.", show_default="what the context has room for"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(**number(0.0), help="0 is greedy.", show_default="the model's", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[float | None, typer.Option(**number(0.0, 1.0), rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(**whole(-1), help="0 is off.", rich_help_panel=_SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(**number(0.0, 1.0), rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same tokens.", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    max_model_len: MaxModelLen = None,
    dtype: DtypeOption = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    cpu_kernels: CpuKernels = DEFAULTS.cpu_kernels,
    cpu_precision: CpuPrecisionOption = DEFAULTS.cpu_precision,
    threads: Threads = None,
    trace: Trace = None,
    kv_cache_gb: KvCacheGb = None,
    memory_guard_gb: MemoryGuardGb = None,
    speculative_config: SpeculativeConfigOption = None,
    tensor_parallel_size: TensorParallelSize = DEFAULTS.tensor_parallel_size,
    backend: BackendOption = DEFAULTS.backend,
    log_level: LogLevelOption = "warning",
) -> int:
    """Write one answer to a prompt, then end."""
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw leaves out.", remedy="Give one of them.")
    text = sys.stdin.read() if prompt == "-" else prompt
    shared = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "seed": secrets.randbits(63) if seed is None else seed, "stop": stop or None,
    }  # fmt: skip
    if raw:
        body: ChatBody | CompletionBody = CompletionBody.model_validate({"prompt": text, **shared})
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        body = ChatBody.model_validate({"messages": [*messages, {"role": "user", "content": text}], **shared})
    config = EngineConfig(
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=1,
        kv_cache_gb=kv_cache_gb,
        prefix_cache_gb=0.0,
        memory_guard_gb=memory_guard_gb,
        cpu_kernels=cpu_kernels,
        cpu_precision=cpu_precision,
        threads=threads,
        trace=trace,
        speculative_config=None if speculative_config is None else parse_speculation(speculative_config),
        tensor_parallel_size=tensor_parallel_size,
        backend=backend,
    )
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
