"""`phalanx generate`: one prompt, one answer, through the server's own path (parse, journal, decode) without HTTP.

`server/requests/validate.py` decides what a flag means, as for the API's fields; this file only builds the body.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from phalanx.cli.setting_flags import Flags, flag, with_settings
from phalanx.cli.terminal import LoadingView, PullView, report, set_up_logging, show
from phalanx.config import DEFAULT_MODEL, EngineConfig, LogLevel
from phalanx.errors import ConfigError, EngineUnavailable, ExitCode
from phalanx.offline.engine_settings import check_engine
from phalanx.offline.local_engine import LocalEngine
from phalanx.offline.outputs import RequestOutput
from phalanx.offline.sampling_params import SamplingParams
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.spec.stats import report as speculation_report
from phalanx.supervision.process import EngineProcess
from phalanx.types import SpecStats

SETTINGS = Flags(
    "model", "max_model_len", "dtype", "revision", "trust_remote_code", "cpu_kernels", "cpu_precision", "threads",
    "trace", "kv_cache_gb", "memory_guard_gb", "wired_limit", "speculative_config", "tensor_parallel_size",
    "pipeline_parallel_size", "pp_split", "pp_activation_dtype", "backend",
    model=DEFAULT_MODEL, max_num_seqs=1, prefix_cache_gb=0.0,
)  # fmt: skip
SAMPLING = Flags("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")


class Result(Struct, frozen=True, kw_only=True):
    """The JSON of `--json`."""

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
        body: ChatBody | CompletionBody = msgspec.convert({"prompt": text, **shared}, CompletionBody)
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        body = msgspec.convert({"messages": [*messages, {"role": "user", "content": text}], **shared}, ChatBody)
    set_up_logging(log_level)
    return asyncio.run(run(check_engine(config), body, json))


async def run(config: EngineConfig, body: ChatBody | CompletionBody, as_json: bool) -> int:
    """Start an engine, answer, print, end the engine."""
    process = EngineProcess(config)
    with PullView() as view:
        engine = LocalEngine(config, process, view)
    try:
        with LoadingView(process):
            try:
                await engine.start()
            except EngineUnavailable as error:
                report(error)
                return process.state.exit_code or ExitCode.CRASH
        output = await engine.answer(body, show=None if as_json else show)
        stats = await process.ping()
    finally:
        await engine.close()
    print(msgspec.json.encode(_result(output, body.seed or 0, stats.spec)).decode() if as_json else "")
    return ExitCode.OK


def _result(output: RequestOutput, seed: int, spec: SpecStats | None) -> Result:
    (answer,) = output.outputs
    return Result(
        text=answer.text,
        tokens=answer.token_ids,
        finish_reason=answer.finish_reason,
        usage=output.usage,
        timing=output.timing,
        seed=seed,
        speculation=None if spec is None else speculation_report(spec),
    )
