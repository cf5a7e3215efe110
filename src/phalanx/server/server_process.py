"""The server process at run time: signals, draining, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.http.acceptor import FLUSH_S, Acceptor, limits_within
from phalanx.http.connection_table import KEEP_ALIVE_S, ConnectionPlace, ConnectionTable, Deadlines
from phalanx.http.listening import base_url
from phalanx.server.connections import Connection
from phalanx.server.outputs.shapes import OutputShapes
from phalanx.server.requests.parsed import GenerationDefaults, served_names
from phalanx.server.sequences.journal import Journal
from phalanx.server.server_app import create_app
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.server.start import ending_signals, limits_of
from phalanx.supervision.client import EngineClient
from phalanx.text.printable import as_entry
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Batch, ModelInfo

log = logging.getLogger(__name__)


class ServerProcess(uvicorn.Server):
    """uvicorn with a drain before its own shutdown. During the drain the server answers new requests with 503.

    Args:
        listeners: bound and listening TCP sockets: of `config.port` and, if there is one, of `config.ollama_port`.
            What is served at both, and within which limits, is the same.
        defaults: sampling parameters of requests that set none.
        deadlines: how long clients may keep a connection waiting.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        tokenizer: Tokenizer,
        listeners: Sequence[socket.socket],
        defaults: GenerationDefaults | None = None,
        deadlines: Deadlines = Deadlines(),
    ) -> None:
        app = create_app(config, engine, tokenizer, defaults=defaults, on_failure=self._on_failure)
        super().__init__(
            uvicorn.Config(
                app,
                log_level=config.log_level,
                access_log=config.log_level == "debug",
                log_config=None,
                lifespan="on",
                ws="none",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=KEEP_ALIVE_S,
                server_header=False,
                proxy_headers=False,  # clients send X-Forwarded-For too, and the log says who came
                timeout_graceful_shutdown=int(FLUSH_S),
            )
        )
        self.port, *self.further_ports = (int(listener.getsockname()[1]) for listener in listeners)
        self._settings = config
        self._engine = engine
        self._listeners = listeners
        self._deadlines = deadlines
        self._table = ConnectionTable(limits_within(limits_of(config)))
        self._acceptors: list[Acceptor[Connection]] = []
        self._journal: Journal = app.state.journal
        self._shapes: OutputShapes = app.state.shapes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._announced = False
        self._exit_code: int = ExitCode.OK
        engine.subscribe(self)

    async def run_until_ended(self) -> int:
        """Serve until the end. Returns the exit code.

        Raises:
            PhalanxError: the error of `engine.start`.
        """
        self._loop = asyncio.get_running_loop()
        gc.freeze()  # else a collection looks at every imported module, for 30 ms in which no stream goes on
        await self.serve()
        if self._failure is not None:
            raise self._failure
        return self._exit_code

    def drain(self) -> None:
        """Refuse new requests, wait for running ones, then stop. A second call stops at once, one after the end does
        nothing. Thread-safe.
        """
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drain)

    # uvicorn's hooks -------------------------------------------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections in uvicorn's place: it knows neither limits nor deadlines."""
        await super().startup(sockets=[])
        for listener in self._listeners:
            acceptor = Acceptor(listener, self._table, self._connect, deadlines=self._deadlines, tls=self.config.ssl)
            acceptor.start()
            self._acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and let uvicorn end those that are open."""
        for acceptor in self._acceptors:
            await acceptor.stop()
        await super().shutdown(sockets=list(self._listeners))

    def _connect(self, place: ConnectionPlace) -> Connection:
        return Connection(
            place,
            self._table,
            self._deadlines,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP drain. uvicorn would raise them again at its end and replace the exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, *ending_signals())
        old = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on a signal."""
        self.drain()

    # The engine's listener -------------------------------------------------------------------------------------

    def on_ready(self, info: ModelInfo) -> None:
        """Print the URL of the API, and in which forms the model calls tools and reasons, once."""
        if not self._announced:
            self._announced = True
            tls = self._settings.ssl_certfile is not None
            url = base_url(self._settings.host, self.port, tls=tls)
            print(f"phalanx is ready: {url} (model {served_names(self._settings)[0]})", flush=True)
            for port in self.further_ports:
                other = base_url(self._settings.host, port, tls=tls).removesuffix("/v1")
                print(f"for Ollama's clients: {other}", flush=True)
            print(self._shapes.describe(), flush=True)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """End the server if the engine has failed for good, with the engine's exit code: supervisors see it."""
        if will_restart:
            log.warning("the engine went down and is being restarted: %s", reason)
            return
        if self._announced:
            log.error("the engine went down for good: %s", reason)
        else:
            print(f"phalanx could not start: {as_entry(reason)}", file=sys.stderr, flush=True)
        self._exit_code = self._engine.state.exit_code or ExitCode.CRASH
        self.should_exit = True

    def on_batch(self, batch: Batch) -> None:
        """Nothing to do: the journal handles batches."""

    # The end ---------------------------------------------------------------------------------------------------

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        self.should_exit = True

    def _drain(self) -> None:
        if self._draining is not None:
            self._fail_unfinished()
            self.should_exit = True
            return
        self._journal.close("The server is shutting down.")
        self._draining = asyncio.create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        if self._journal.unfinished:
            log.info("draining %d requests, %g s at most", self._journal.unfinished, self._settings.drain_seconds)
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await self._journal.wait_until_idle()
        except TimeoutError:
            log.warning("%d requests did not end in time and are cancelled", self._journal.unfinished)
            self._fail_unfinished()
        self.should_exit = True

    def _fail_unfinished(self) -> None:
        self._journal.fail_all(EngineUnavailable("The server is shutting down.", retry_after=5.0))
