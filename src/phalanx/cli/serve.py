"""`phalanx serve`: takes a `ServerConfig`, loads the tokenizer, makes one engine process, calls `serve` once."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from phalanx.cli.auto_plan import learn_from, read_predicted
from phalanx.cli.setting_flags import Flags, text_of, with_settings
from phalanx.cli.terminal import LoadingView, PullView, note, set_up_logging
from phalanx.config import DEFAULT_MODEL
from phalanx.errors import ConfigError
from phalanx.http.listening import is_loopback
from phalanx.model.loading.resolve import resolve_models, with_imported_names
from phalanx.offline.engine_settings import check_engine, check_start
from phalanx.server.outputs.output_formats import reasoning_parsers, tool_parsers
from phalanx.server.requests.generation_defaults import read_defaults
from phalanx.server.sequences.speed_meter import SpeedMeter
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.server.start import serve
from phalanx.supervision.attach import AttachedEngine
from phalanx.supervision.awake import stay_awake
from phalanx.supervision.host_ranks import load_cluster
from phalanx.supervision.process import EngineProcess
from phalanx.text.template_files import BYTE_ORDER_MARK
from phalanx.text.tokenizer import Tokenizer

HOST_NAME = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\*|(\*\.)?[^/\s*]+(:\*)?)")  # "null": a page from a file


@with_settings
def command(
    config: Annotated[ServerConfig, Flags(model=DEFAULT_MODEL)],
    no_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-prefix-caching",
            "--no-enable-prefix-caching",
            help="The same as --prefix-cache-gb 0.",
            rich_help_panel="Memory",
        ),
    ] = False,
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
    stop_on_eof: Annotated[bool, typer.Option(hidden=True)] = False,
    predicted: Annotated[str, typer.Option(hidden=True, metavar="JSON", help="By `--tp auto`.")] = "",
) -> int:
    """Load a model and serve it over an OpenAI-compatible HTTP API until Ctrl-C or SIGTERM."""
    if attach is not None and cluster is not None:
        raise ConfigError("--attach waits for ranks that --cluster would start.", remedy="Give one of them.")
    if attach is not None and config.engine.pipeline_parallel_size > 1:
        raise ConfigError(
            "--attach waits for ranks of another launcher, which starts one stage, but --pp asks for "
            f"{config.engine.pipeline_parallel_size}.",
            remedy="Leave one of them out: `phalanx serve --pp` starts stages on this machine, `phalanx up` on more.",
        )
    prefix_cache_gb = _prefix_cache_gb(config.engine.prefix_cache_gb, no_prefix_caching)
    _check_names(config)
    _check_parsers(config)
    config = replace(
        config,
        engine=check_engine(replace(config.engine, prefix_cache_gb=prefix_cache_gb)),
        served_model_name=_names(config.served_model_name),
    )
    _check_admin_key(config)
    set_up_logging(config.log_level)
    if stop_on_eof:
        _stop_on_eof()
    return run(config, attach, cluster, SpeedMeter(read_predicted(predicted)))


def run(
    config: ServerConfig, attach: Path | None = None, cluster: Path | None = None, speeds: SpeedMeter | None = None
) -> int:
    """Serve until a signal; with `attach`, an engine that connects to this socket; with `cluster`, on its hosts.

    Args:
        speeds: measures requests beside a prediction, from which the planner learns at the end.
    """
    if not is_loopback(config.host) and not config.api_key:
        note(f"warning: {config.host} can be reached from other machines, and no --api-key is set")
    with PullView() as view:
        path = resolve_models(config.engine, view)
    check_start(config.engine, path, is_here=cluster is None)
    template = None
    if config.chat_template is not None:
        template = text_of(Path(config.chat_template), "--chat-template").removeprefix(BYTE_ORDER_MARK)

    def load_tokenizer() -> Tokenizer:
        tokenizer = Tokenizer.load(path, chat_template=template, trust_remote_code=config.engine.trust_remote_code)
        tokenizer.start_rendering()
        return tokenizer

    engine = (
        EngineProcess(
            config.engine if cluster else with_imported_names(config.engine),  # other hosts have the file or not
            stall_s=config.stall_seconds,
            cluster=load_cluster(cluster, config.engine.n_ranks),
        )
        if attach is None
        else AttachedEngine(attach.absolute(), stall_s=config.stall_seconds)
    )
    stay_awake()
    with LoadingView(engine):
        code = serve(config, engine, load_tokenizer, read_defaults(path), speeds)
    if speeds is not None:
        learn_from(speeds)
    return code


def _prefix_cache_gb(given: float | None, off: bool) -> float | None:
    """The value of `--prefix-cache-gb`, which `--no-prefix-caching` sets to 0."""
    if off and given:
        raise ConfigError(f"--no-prefix-caching contradicts --prefix-cache-gb {given:g}.", remedy="Give one of them.")
    return 0.0 if off else given


def _check_names(config: ServerConfig) -> None:
    """Refuse names that no Host or Origin header can have: they would let nothing in.

    Raises:
        ConfigError: names the flag and the value.
    """
    for name in config.allowed_hosts:
        if not HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"--allowed-hosts {name!r} is not a name.",
                remedy="Give the name without scheme and port, `*.NAME`, or `*`. Addresses are always allowed.",
            )
    for origin in config.allowed_origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins {origin!r} is not an origin.",
                remedy="Give scheme and name without a path: https://chat.example.com, `chrome-extension://*`, or `*`.",
            )


def _check_parsers(config: ServerConfig) -> None:
    """Refuse names of forms that are unknown.

    Raises:
        ConfigError: names the flag, and all names.
    """
    for flag, name, known in (
        ("--tool-call-parser", config.tool_call_parser, tool_parsers()),
        ("--reasoning-parser", config.reasoning_parser, reasoning_parsers()),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"{flag} {name!r} is not known.", remedy=f"Known are {', '.join(known)}.")


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name.strip() for name in given):
        raise ConfigError("--served-model-name is empty.", remedy="Give the name that clients send as `model`.")
    return tuple(dict.fromkeys(given))


def _check_admin_key(config: ServerConfig) -> None:
    """Refuse an admin key that clients have.

    Raises:
        ConfigError: says so.
    """
    if config.admin_key is not None and config.admin_key in config.api_key:
        raise ConfigError(
            "--admin-key is also an --api-key, so that every client could use it.",
            remedy="`openssl rand -hex 32` prints a good one.",
        )


def _stop_on_eof() -> None:
    """End as on SIGTERM when stdin closes: the process that started this server privately has ended."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock a daemon thread would still hold at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
