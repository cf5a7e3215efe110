"""Starts the server process: binds the address and starts the ranks; while they load, it loads the HTTP framework and
the tokenizer, which take about as long.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from phalanx.errors import ExitCode
from phalanx.http.connection_table import ConnectionLimits, limits_for
from phalanx.http.listening import bind, server_context
from phalanx.open_files import raise_limit
from phalanx.server.requests.parsed import GenerationDefaults
from phalanx.server.sequences.speed_meter import SpeedMeter
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.client import EngineClient
from phalanx.text.tokenizer import Tokenizer

OPEN_FILES = 256  # besides one per connection


def serve(
    config: ServerConfig,
    engine: EngineClient,
    load_tokenizer: Callable[[], Tokenizer],
    defaults: GenerationDefaults | None = None,
    speeds: SpeedMeter | None = None,
) -> int:
    """Serve until a signal, or until the engine has failed to start. Returns the exit code.

    Args:
        load_tokenizer: called in another thread, after the engine has begun to load.
        defaults: sampling parameters of requests that set none.
        speeds: measures requests beside a prediction.

    Raises:
        ConfigError: the address cannot be bound, or the certificate cannot be used; says which and what to do.
        PhalanxError: the error of the engine's start or of `load_tokenizer`. The engine is closed before.
    """
    server_context(config.ssl_certfile, config.ssl_keyfile)  # raises before anything starts
    raise_limit(limits_of(config).total + OPEN_FILES)
    with ExitStack() as stack:
        listeners = [stack.enter_context(bind(config.host, config.port))]
        if config.ollama_port is not None:
            listeners.append(stack.enter_context(bind(config.host, config.ollama_port, "--ollama-port")))
        return asyncio.run(_serve(config, engine, load_tokenizer, listeners, defaults, speeds))


def limits_of(config: ServerConfig) -> ConnectionLimits:
    """The connection limits by a server's settings."""
    requests = config.engine.max_num_seqs + config.queue
    return limits_for(config.max_connections, config.max_connections_per_address, requests)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Signals that end a server gently: SIGTERM, and a closing terminal's SIGHUP, unless `nohup` ignores it."""
    hears = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGHUP) if hears else (signal.SIGTERM,)


async def _serve(
    config: ServerConfig,
    engine: EngineClient,
    load_tokenizer: Callable[[], Tokenizer],
    listeners: Sequence[socket.socket],
    defaults: GenerationDefaults | None,
    speeds: SpeedMeter | None,
) -> int:
    """Prepare a server and run it. A signal during the preparation closes the engine; later the server drains."""
    loop = asyncio.get_running_loop()
    preparing = asyncio.create_task(_prepare(engine, load_tokenizer))
    signals = ending_signals()
    for number in signals:
        loop.add_signal_handler(number, preparing.cancel)
    try:
        await asyncio.wait([preparing])
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        if not preparing.done() or preparing.cancelled() or preparing.exception() is not None:
            preparing.cancel()
            await engine.close()
    if preparing.cancelled():
        return ExitCode.OK
    server_process, tokenizer = preparing.result()
    server = server_process.ServerProcess(config, engine, tokenizer, listeners, defaults, speeds=speeds)
    code: int = await server.run_until_ended()
    return code


async def _prepare(engine: EngineClient, load_tokenizer: Callable[[], Tokenizer]) -> tuple[Any, Tokenizer]:
    """Launch the engine, then load `server_process.py` and the tokenizer while the engine loads."""
    await engine.launch()
    server_process = await asyncio.to_thread(importlib.import_module, "phalanx.server.server_process")
    return server_process, await asyncio.to_thread(load_tokenizer)
