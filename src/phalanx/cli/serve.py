"""`phalanx serve`: takes a `ServerConfig`, loads the tokenizer, makes one engine process, calls `serve` once.

Does not know HTTP, nor how the engine works.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from phalanx.cli.flags import Flags, with_settings
from phalanx.cli.terminal import LoadingView, note, set_up_logging
from phalanx.config import DEFAULT_MODEL, ServerConfig, api_key_from_environment
from phalanx.errors import ConfigError
from phalanx.model.loading.resolve import resolve
from phalanx.offline.settings import check_engine
from phalanx.server.defaults import read_defaults
from phalanx.server.start import serve
from phalanx.supervision.attach import AttachedEngine
from phalanx.supervision.hosts import load_cluster
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer


@with_settings
def command(
    config: Annotated[ServerConfig, Flags(model=DEFAULT_MODEL)],
    api_key_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="One key per line.", rich_help_panel="HTTP"),
    ] = None,
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
) -> int:
    """Load a model and serve it over an OpenAI-compatible HTTP API until Ctrl-C or SIGTERM."""
    if attach is not None and cluster is not None:
        raise ConfigError("--attach waits for ranks that --cluster would start.", remedy="Give one of them.")
    prefix_cache_gb = _prefix_cache_gb(config.engine.prefix_cache_gb, no_prefix_caching)
    config = replace(
        config,
        engine=check_engine(replace(config.engine, prefix_cache_gb=prefix_cache_gb)),
        served_model_name=_names(config.served_model_name),
        api_key=_keys(config.api_key, api_key_file),
    )
    set_up_logging(config.log_level)
    if stop_on_eof:
        _stop_on_eof()
    return run(config, attach, cluster)


def run(config: ServerConfig, attach: Path | None = None, cluster: Path | None = None) -> int:
    """Serve until told to stop; with `attach`, an engine that comes to this socket; with `cluster`, on its hosts."""
    if not is_loopback(config.host) and not config.api_key:
        note(f"warning: {config.host} can be reached from other machines, and no --api-key is set")
    path = resolve(
        config.engine.model, revision=config.engine.revision, trust_remote_code=config.engine.trust_remote_code
    )
    template = None if config.chat_template is None else Path(config.chat_template).read_text()

    def load_tokenizer() -> Tokenizer:
        return Tokenizer.load(path, chat_template=template, trust_remote_code=config.engine.trust_remote_code)

    engine = (
        EngineProcess(
            config.engine,
            stall_s=config.stall_seconds,
            cluster=load_cluster(cluster, config.engine.tensor_parallel_size),
        )
        if attach is None
        else AttachedEngine(attach.absolute(), stall_s=config.stall_seconds)
    )
    with LoadingView(engine):
        return serve(config, engine, load_tokenizer, read_defaults(path))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _prefix_cache_gb(given: float | None, off: bool) -> float | None:
    """The value of `--prefix-cache-gb`, which `--no-prefix-caching` sets to 0."""
    if off and given:
        raise ConfigError(f"--no-prefix-caching contradicts --prefix-cache-gb {given:g}.", remedy="Give one of them.")
    return 0.0 if off else given


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    if any(not name.strip() for name in given):
        raise ConfigError("--served-model-name is empty.", remedy="Give the name that clients send as `model`.")
    return tuple(dict.fromkeys(given))


def _keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Keys of the flags and the file; the variable counts only where there are none."""
    keys = list(given)
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


def _stop_on_eof() -> None:
    """End as on SIGTERM when stdin closes: the process that started this server privately has ended."""

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock a daemon thread would still hold at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
