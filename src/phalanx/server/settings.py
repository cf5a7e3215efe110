"""Settings of the server, parsed once and frozen; `config.py` says how a field is declared, and has the engine's.

Does not know where a value came from.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from phalanx.config import DEFAULT_PORT, MIB, Count, EngineConfig, Flag, LogLevel, Size
from phalanx.environment import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, Flag("Address to bind.", "HTTP")] = "127.0.0.1"
    """Address to bind. Other machines reach the server only if the user gives another address than the default."""
    port: Annotated[int, Meta(ge=0, le=65535), Flag("Port; 0 picks a free one.", "HTTP")] = DEFAULT_PORT
    """TCP port; 0 picks a free one, which is printed."""
    ollama_port: Annotated[
        int | None,
        Meta(ge=0, le=65535),
        Flag("A second port for the same API; Ollama's clients ask at 11434.", "HTTP", default="none"),
    ] = None
    """A second TCP port, at which the whole API is served as well; 0 picks a free one. Ollama's clients expect it at
    11434."""
    api_key: Annotated[
        tuple[str, ...],
        Flag(
            "A key clients must send; may be repeated (in the variable: with blanks between them).",
            "HTTP",
            variable=API_KEY_VARIABLE,
        ),
    ] = ()
    """Accepted keys; empty means no key is needed. Clients with different keys share places and rows by turns."""
    admin_key: Annotated[
        str | None,
        Flag("Key of a gateway that may move streams between servers.", "HTTP", variable=ADMIN_KEY_VARIABLE),
    ] = None
    """Who sends it is told which tokens a stream is made of, and may go on with one of another server's; None: nobody
    is and may. See `edge/migration.py`."""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag(
            "Name in clients' Host header, besides addresses, localhost and the machine's own; may be repeated. "
            "`*.example.com`, or `*` for all.",
            "HTTP",
        ),
    ] = ()
    """Further names that a Host header may have. Other names are refused: a web page could send requests under a name
    of its own (DNS rebinding)."""
    allowed_origins: Annotated[
        tuple[str, ...],
        Flag("Origin of web pages that may ask (CORS), such as https://chat.example.com; may be repeated.", "HTTP"),
    ] = ()
    """Origins whose web pages may use the API (CORS); `*` is all. Empty: no page but this server's own."""
    ssl_certfile: Annotated[
        str | None, Flag("Certificate chain (PEM): the server speaks HTTPS.", "HTTP", is_file=True)
    ] = None
    """File with the server's certificate chain, PEM, the server's own first; None is plain HTTP."""
    ssl_keyfile: Annotated[
        str | None, Flag("Its private key, unless it is in the same file.", "HTTP", is_file=True)
    ] = None
    """File with the certificate's private key, PEM; None if `ssl_certfile` has it."""
    served_model_name: Annotated[
        tuple[str, ...],
        Flag("Name clients use; may be repeated.", "HTTP", default="MODEL; of a directory, its last part"),
    ] = ()
    """Names by which clients may ask for the model; empty is the model argument, or the last part of a directory's
    path; then the argument itself is understood as well, but not shown."""
    chat_template: Annotated[str | None, Flag("Jinja file instead of the model's.", "HTTP", is_file=True)] = None
    """File with a Jinja chat template that replaces the model's."""
    default_chat_template_kwargs: Annotated[dict[str, object], Flag("Variables of the chat template.", "HTTP")] = {}
    """Defaults for the template's variables; a request's own win."""
    tool_call_parser: Annotated[
        str | None,
        Flag(
            "Form in which the model calls tools, by vLLM's names: hermes, mistral, ...",
            "HTTP",
            default="as its template",
        ),
    ] = None
    """Form in which the model writes calls of tools, by a name of vLLM's or mlx-lm's; None is its chat template's."""
    reasoning_parser: Annotated[
        str | None,
        Flag(
            "Form of the model's reasoning, by vLLM's names: deepseek_r1, qwen3, ...", "HTTP", default="as its template"
        ),
    ] = None
    """Form in which the model writes its reasoning, by a name of vLLM's; None is its chat template's."""
    enable_auto_tool_choice: Annotated[bool, Flag("As in vLLM; here the model may always call.", "HTTP")] = True
    """Whether a request's tools may be called where it does not say so; with False it has to say `tool_choice`."""
    keepalive_seconds: Annotated[float, Meta(ge=0.1), Flag("A comment after this much silence.", "HTTP")] = 5.0
    """After so many seconds without an event, a stream gets a comment line, which keeps the connection open."""

    queue: Annotated[int, Meta(ge=0), Flag("Requests that may wait; one more is a 429.", "Limits")] = 32
    """Requests (choices) that may wait beyond `max_num_seqs`; one more is answered 429."""
    max_n: Annotated[int, Meta(ge=1, le=1024), Flag("Largest `n`.", "Limits")] = 16
    """Largest `n`: choices per prompt."""
    max_prompts: Annotated[int, Meta(ge=1, le=1024), Flag("Prompts of one completions request.", "Limits")] = 256
    """Most prompts of one completions request. Evaluations send tens at once."""
    clamp_max_tokens: Annotated[
        bool, Flag("Lower a `max_tokens` that the context has no room for, instead of refusing it.", "Limits")
    ] = True
    """Lower a request's max_tokens to what the context has room for, and say so in `finish_detail`; else refuse it.
    Agents ask for 32,000 tokens whatever the model."""
    max_body_mb: Annotated[float, Meta(ge=0.001, le=1024), Flag("Largest request, MiB.", "Limits")] = 8.0
    """Largest HTTP request body, MiB."""
    max_connections: Annotated[Count | None, Flag("Connections, at most.", "Limits", default="at least 1,024")] = None
    """Most connections at once; None is 1,024, or twice `max_num_seqs + queue`. See `edge/table.py`."""
    max_connections_per_address: Annotated[
        Count | None, Flag("Of them, from one address (a proxy is one).", "Limits", default="half of all")
    ] = None
    """Most connections from one IPv4 address or IPv6 /64 network; None is half of `max_connections`."""
    drain_seconds: Annotated[Size, Flag("Seconds for running requests after SIGTERM.", "Limits")] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    stall_seconds: Annotated[
        float, Meta(ge=1.0), Flag("Seconds without a step after which the engine is ended.", "Limits")
    ] = 60.0
    """Seconds without a step or an answer after which the engine process is killed and restarted."""

    engine: EngineConfig
    """The engine this server starts and restarts."""
    log_level: Annotated[LogLevel, Flag("Verbosity of the log on stderr.")] = "info"
    """Verbosity of the log on stderr."""

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)
