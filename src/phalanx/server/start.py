"""Starts the server process: it binds the address, starts the ranks, and loads the rest while the ranks load.

The rest is the HTTP framework and the tokenizer, which take about as long to import as the ranks take to load. Does not
know routes or messages.
"""

from __future__ import annotations

import asyncio
import importlib
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

from phalanx.config import ServerConfig
from phalanx.errors import ConfigError, ExitCode
from phalanx.server.parsed import GenerationDefaults
from phalanx.supervision.client import EngineClient
from phalanx.text.tokenizer import Tokenizer

BACKLOG = 2048
OPEN_FILES = 4096  # file descriptors; each connection takes one


def serve(
    config: ServerConfig,
    engine: EngineClient,
    load_tokenizer: Callable[[], Tokenizer],
    defaults: GenerationDefaults | None = None,
) -> int:
    """Serve until a signal, or until the engine has failed to start. Returns the exit code.

    Args:
        load_tokenizer: called in another thread, after the engine has begun to load.
        defaults: sampling parameters of requests that set none.

    Raises:
        ConfigError: the address cannot be bound; says which and what to do.
        PhalanxError: the error of the engine's start or of `load_tokenizer`. The engine is closed before.
    """
    _allow_many_connections()
    with bind(config.host, config.port) as listener:
        return asyncio.run(_serve(config, engine, load_tokenizer, listener, defaults))


async def _serve(
    config: ServerConfig,
    engine: EngineClient,
    load_tokenizer: Callable[[], Tokenizer],
    listener: socket.socket,
    defaults: GenerationDefaults | None,
) -> int:
    """Prepare a server and run it. SIGTERM during the preparation closes the engine; later the server handles it."""
    loop = asyncio.get_running_loop()
    preparing = asyncio.create_task(_prepare(engine, load_tokenizer))
    loop.add_signal_handler(signal.SIGTERM, preparing.cancel)
    try:
        await asyncio.wait([preparing])
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if not preparing.done() or preparing.cancelled() or preparing.exception() is not None:
            preparing.cancel()
            await engine.close()
    if preparing.cancelled():
        return ExitCode.OK
    run, tokenizer = preparing.result()
    code: int = await run.Server(config, engine, tokenizer, listener, defaults).run_until_ended()
    return code


async def _prepare(engine: EngineClient, load_tokenizer: Callable[[], Tokenizer]) -> tuple[Any, Tokenizer]:
    """Launch the engine, then load the module `run` and the tokenizer while the engine loads."""
    await engine.launch()
    run = await asyncio.to_thread(importlib.import_module, "phalanx.server.run")
    return run, await asyncio.to_thread(load_tokenizer)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, which is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """A bound and listening TCP socket; `port` 0 takes a free one.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is not an address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # asyncio sets TCP_NODELAY only on sockets of protocol TCP; without it every chunk may wait 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address: {error}.", remedy="Use 127.0.0.1 or 0.0.0.0.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}.",
            remedy="Choose another --port (0 picks a free one), or stop what uses it "
            f"(`ss -ltnp 'sport = :{port}'` or `lsof -i :{port}` shows what).",
        ) from error
    listener.setblocking(False)
    return listener
