"""Settings of the server, parsed once and frozen; `config.py` says how a field is declared, and has the engine's."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.config import DEFAULT_MODEL, DEFAULT_PORT, MIB, Count, EngineConfig, Flag, LogLevel, Size
from phalanx.environment import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, Flag("HTTP")] = "127.0.0.1"
    """Address to bind; the default accepts connections from this machine only."""
    port: Annotated[int, Meta(ge=0, le=65535), Flag("HTTP")] = DEFAULT_PORT
    """TCP port; 0 picks a free one, which is printed."""
    ollama_port: Annotated[int | None, Meta(ge=0, le=65535), Flag("HTTP", default="none")] = None
    """A second port for the same API; 0 picks a free one. Ollama's clients use 11434."""
    api_key: Annotated[
        tuple[str, ...], Flag("HTTP", default="no key is needed", variable=API_KEY_VARIABLE, is_key=True)
    ] = ()
    """A key clients must send; may be repeated (in the variable: separated by blanks). Clients with different keys
    share queue and rows fairly."""
    admin_key: Annotated[str | None, Flag("HTTP", variable=ADMIN_KEY_VARIABLE, is_key=True)] = None
    """Key of a gateway, which may read streams' tokens, move streams between servers and name a request's owner; and of
    clients on other machines that may pull and delete models."""
    metrics_open: Annotated[bool, Flag("HTTP")] = False
    """Serve /metrics without a key."""
    allowed_hosts: Annotated[tuple[str, ...], Flag("HTTP")] = ()
    """Name in clients' Host header, besides addresses, localhost and the machine's own; may be repeated.
    `*.example.com`, or `*` for all. Others are refused: a web page could use a name of its own."""
    allowed_origins: Annotated[tuple[str, ...], Flag("HTTP", default="this server's own pages")] = ()
    """Origin of web pages that may send requests (CORS): https://chat.example.com, `chrome-extension://*`,
    `https://*.example.com`, or `*` for all; may be repeated."""
    ssl_certfile: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Certificate chain (PEM), the server's own first; enables HTTPS."""
    ssl_keyfile: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Its private key, unless it is in the same file."""
    served_model_name: Annotated[
        tuple[str, ...], Flag("HTTP", default="MODEL; of a directory, its last part, and unlisted the path")
    ] = ()
    """Name clients use; may be repeated."""
    chat_template: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Jinja file with a chat template instead of the model's."""
    default_chat_template_kwargs: Annotated[dict[str, object], Flag("HTTP")] = {}
    """Variables of the chat template; a request's own win."""
    tool_call_parser: Annotated[str | None, Flag("HTTP", default="as its template")] = None
    """Format of the model's tool calls, by vLLM's or mlx-lm's names: hermes, mistral, ..."""
    reasoning_parser: Annotated[str | None, Flag("HTTP", default="as its template")] = None
    """Format of the model's reasoning, by vLLM's names: deepseek_r1, qwen3, ..."""
    enable_auto_tool_choice: Annotated[bool, Flag("HTTP")] = True
    """The model may call a request's tools; without it, only if the request has a `tool_choice`."""
    tools: Annotated[Literal["refuse", "drop"] | None, Flag("HTTP", default="drop for the demo, else refuse")] = None
    """Handling of tools in requests to a model that cannot call any: `refuse` answers 400, `drop` leaves them out. If
    the request requires a call, the answer is always 400."""
    keepalive_seconds: Annotated[float, Meta(ge=0.1), Flag("HTTP")] = 5.0
    """Seconds without an event after which a stream gets a keep-alive comment."""

    queue: Annotated[int, Meta(ge=0), Flag("Limits")] = 1024  # benchmarks send 512 at once
    """Requests (choices) that may wait beyond --max-num-seqs; further ones get a 429."""
    max_n: Annotated[int, Meta(ge=1, le=1024), Flag("Limits")] = 16
    """Largest `n`: choices per prompt."""
    max_prompts: Annotated[int, Meta(ge=1, le=1024), Flag("Limits")] = 256  # evaluations send tens at once
    """Prompts of one completions request, at most."""
    clamp_max_tokens: Annotated[bool, Flag("Limits")] = True  # agents ask for 32,000 tokens whatever the model
    """Lower a `max_tokens` that the context has no room for and say so in `finish_detail`; else refuse it."""
    max_body_mb: Annotated[float, Meta(ge=0.001, le=1024), Flag("Limits")] = 8.0
    """Largest body of a request, MiB."""
    max_connections: Annotated[
        Count | None, Flag("Limits", default="twice --max-num-seqs + --queue, 1,024 at least")
    ] = None
    """Connections, at most."""
    max_connections_per_address: Annotated[Count | None, Flag("Limits", default="half of all")] = None
    """Connections from one IPv4 address or IPv6 /64 network, at most; a proxy is one address."""
    drain_seconds: Annotated[Size, Flag("Limits")] = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    stall_seconds: Annotated[float, Meta(ge=1.0), Flag("Limits")] = 60.0
    """Seconds without a step or an answer after which the engine is killed and restarted."""

    engine: EngineConfig
    """The engine this server starts and restarts."""
    log_level: Annotated[LogLevel, Flag()] = "info"
    """Verbosity of the log on stderr."""

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)

    @property
    def drops_tools(self) -> bool:
        """Whether tools that the model cannot call are left out of requests. Chat programs send some with every one."""
        return self.tools == "drop" or (self.tools is None and self.engine.model == DEFAULT_MODEL)
