"""`phalanx serve`: flags to a `ServerConfig`, the model's tokenizer, one engine process, one call of `serve`.

Does not know HTTP, nor how the engine works.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from phalanx.cli.options import (
    DEFAULTS,
    BackendOption,
    CheckCollectives,
    CollectiveOption,
    CpuKernels,
    CpuPrecisionOption,
    DtypeOption,
    Inject,
    JoinSeconds,
    KvCacheGb,
    LogLevelOption,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MemoryGuardGb,
    Model,
    NoPrefixCaching,
    PrefixCacheGb,
    Revision,
    SilenceSeconds,
    SpeculativeConfigOption,
    TargetStepMs,
    TensorParallelSize,
    Threads,
    Trace,
    TrustRemoteCode,
    WedgeSeconds,
    check_engine,
    number,
    prefix_budget,
    whole,
)
from phalanx.cli.terminal import LoadingView, note, set_up_logging
from phalanx.config import (
    DEFAULT_PORT,
    EngineConfig,
    ServerConfig,
    api_key_from_environment,
)
from phalanx.errors import ConfigError
from phalanx.model.loading.resolve import resolve
from phalanx.server.defaults import read_defaults
from phalanx.server.start import serve
from phalanx.spec.parse_config import parse as parse_speculation
from phalanx.supervision.attach import AttachedEngine
from phalanx.supervision.hosts import load_cluster
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

MIB = 1 << 20
_DEFAULTS = ServerConfig(engine=DEFAULTS)
_HTTP = "HTTP"
_LIMITS = "Limits"


def command(
    model: Model = "demo",
    host: Annotated[str, typer.Option(help="Address to bind.", rich_help_panel=_HTTP)] = _DEFAULTS.host,
    port: Annotated[
        int, typer.Option(**whole(0, 65535), help="Port; 0 picks a free one.", rich_help_panel=_HTTP)
    ] = DEFAULT_PORT,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key clients must send; may be repeated. Also PHALANX_API_KEY.", rich_help_panel=_HTTP),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="One key per line.", rich_help_panel=_HTTP),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name clients use; may be repeated.", show_default="MODEL as given", rich_help_panel=_HTTP),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="Jinja file instead of the model's.", rich_help_panel=_HTTP
        ),
    ] = None,
    default_chat_template_kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Variables of the chat template.", rich_help_panel=_HTTP)
    ] = "{}",
    keepalive_seconds: Annotated[
        float,
        typer.Option(**number(0.1), help="A comment after this much silence.", rich_help_panel=_HTTP),
    ] = _DEFAULTS.keepalive_s,
    queue: Annotated[
        int, typer.Option(**whole(0), help="Requests that may wait; one more is a 429.", rich_help_panel=_LIMITS)
    ] = _DEFAULTS.queue,
    max_n: Annotated[
        int, typer.Option("--max-n", **whole(1, 1024), help="Largest `n`.", rich_help_panel=_LIMITS)
    ] = _DEFAULTS.max_n,
    max_body_mb: Annotated[
        float,
        typer.Option(**number(0.001, 1024), help="Largest request, MiB.", rich_help_panel=_LIMITS),
    ] = _DEFAULTS.max_body_bytes / MIB,
    drain_seconds: Annotated[
        float,
        typer.Option(**number(0.0), help="For running requests at the end.", rich_help_panel=_LIMITS),
    ] = _DEFAULTS.drain_s,
    stall_seconds: Annotated[
        float,
        typer.Option(**number(1.0), help="Silence that ends the engine.", rich_help_panel=_LIMITS),
    ] = _DEFAULTS.stall_s,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    target_step_ms: TargetStepMs = DEFAULTS.target_step_ms,
    dtype: DtypeOption = DEFAULTS.dtype,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    trace: Trace = None,
    kv_cache_gb: KvCacheGb = None,
    prefix_cache_gb: PrefixCacheGb = None,
    no_prefix_caching: NoPrefixCaching = False,
    memory_guard_gb: MemoryGuardGb = None,
    speculative_config: SpeculativeConfigOption = None,
    tensor_parallel_size: TensorParallelSize = DEFAULTS.tensor_parallel_size,
    cpu_kernels: CpuKernels = DEFAULTS.cpu_kernels,
    cpu_precision: CpuPrecisionOption = DEFAULTS.cpu_precision,
    threads: Threads = None,
    backend: BackendOption = DEFAULTS.backend,
    collective: CollectiveOption = DEFAULTS.collective,
    check_collectives: CheckCollectives = DEFAULTS.check_collectives,
    join_seconds: JoinSeconds = DEFAULTS.join_s,
    silence_seconds: SilenceSeconds = DEFAULTS.silence_s,
    wedge_seconds: WedgeSeconds = DEFAULTS.wedge_s,
    inject: Inject = None,
    attach: Annotated[
        Path | None,
        typer.Option(
            metavar="SOCKET",
            help="Start no engine: wait here for `phalanx rank --socket SOCKET` under mpirun or mlx.launch.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Hosts of the ranks; `phalanx up` writes it.", rich_help_panel="Ranks", hidden=True
        ),
    ] = None,
    log_level: LogLevelOption = "info",
    stop_on_eof: Annotated[bool, typer.Option(hidden=True)] = False,
) -> int:
    """Load a model and serve it over an OpenAI-compatible HTTP API until Ctrl-C or SIGTERM."""
    engine = EngineConfig(
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        target_step_ms=target_step_ms,
        kv_cache_gb=kv_cache_gb,
        prefix_cache_gb=prefix_budget(prefix_cache_gb, no_prefix_caching),
        memory_guard_gb=memory_guard_gb,
        trace=trace,
        speculative=None if speculative_config is None else parse_speculation(speculative_config),
        tensor_parallel_size=tensor_parallel_size,
        cpu_kernels=cpu_kernels,
        cpu_precision=cpu_precision,
        threads=threads,
        backend=backend,
        collective=collective,
        check_collectives=check_collectives,
        join_s=join_seconds,
        silence_s=silence_seconds,
        wedge_s=wedge_seconds,
        inject=inject,
    )
    config = ServerConfig(
        engine=check_engine(engine),
        host=host,
        port=port,
        served_model_name=_names(served_model_name),
        api_keys=_keys(api_key, api_key_file),
        queue=queue,
        max_body_bytes=int(max_body_mb * MIB),
        max_n=max_n,
        keepalive_s=keepalive_seconds,
        drain_s=drain_seconds,
        stall_s=stall_seconds,
        chat_template=None if chat_template is None else str(chat_template),
        chat_template_kwargs=_template_kwargs(default_chat_template_kwargs),
        log_level=log_level,
    )
    if attach is not None and cluster is not None:
        raise ConfigError("--attach waits for ranks that --cluster would start.", remedy="Give one of them.")
    set_up_logging(log_level)
    if stop_on_eof:
        _stop_on_eof()
    return run(config, attach, cluster)


def run(config: ServerConfig, attach: Path | None = None, cluster: Path | None = None) -> int:
    """Serve until told to stop; with `attach`, an engine that comes to this socket; with `cluster`, on its hosts."""
    if not is_loopback(config.host) and not config.api_keys:
        note(f"warning: {config.host} can be reached from other machines, and no --api-key is set")
    path = resolve(
        config.engine.model, revision=config.engine.revision, trust_remote_code=config.engine.trust_remote_code
    )
    template = None if config.chat_template is None else Path(config.chat_template).read_text()

    def load_tokenizer() -> Tokenizer:
        return Tokenizer.load(path, chat_template=template, trust_remote_code=config.engine.trust_remote_code)

    engine = (
        EngineProcess(
            config.engine, stall_s=config.stall_s, cluster=load_cluster(cluster, config.engine.tensor_parallel_size)
        )
        if attach is None
        else AttachedEngine(attach.absolute(), stall_s=config.stall_s)
    )
    with LoadingView(engine):
        return serve(config, engine, load_tokenizer, read_defaults(path))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names(given: list[str] | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(given or ()))
    if any(not name.strip() for name in names):
        raise ConfigError("--served-model-name is empty.", remedy="Give the name that clients send as `model`.")
    return names


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """Keys from flags and file; from the environment only when there are none."""
    keys = list(given or ())
    if any(not key.strip() for key in keys):
        raise ConfigError("--api-key is empty.", remedy="Leave it out to need no key.")
    if file is not None:
        lines = [line.strip() for line in file.read_text().splitlines()]
        from_file = [line for line in lines if line and not line.startswith("#")]
        if not from_file:
            raise ConfigError(f"--api-key-file {file} has no key.", remedy="Write one key per line.")
        keys += from_file
    if not keys and (key := api_key_from_environment()):
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def _template_kwargs(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--default-chat-template-kwargs {text!r} is not a JSON object: {error}.",
            remedy="""For example '{"enable_thinking": false}'.""",
        ) from error


def _stop_on_eof() -> None:
    """End as on SIGTERM when stdin closes: whoever started this server privately is gone."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock a daemon thread would still hold at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
