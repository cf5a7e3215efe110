"""The server process at run time: signals, draining, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence

from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.http.connection_table import Deadlines
from phalanx.http.listening import base_url, server_context
from phalanx.http.service import HttpService, handling
from phalanx.server.requests.parsed import GenerationDefaults, served_names
from phalanx.server.sequences.speed_meter import PredictedSpeed, SpeedMeter
from phalanx.server.server_app import create_app
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.server.start import ending_signals, limits_of
from phalanx.supervision.client import EngineClient
from phalanx.text.printable import as_entry
from phalanx.text.tokenizer import Tokenizer
from phalanx.text.word_wrap import fitted
from phalanx.types import Batch, ModelInfo

log = logging.getLogger(__name__)


class ServerProcess:
    """A server until its end. During the drain, new requests get a 503.

    Args:
        listeners: bound and listening TCP sockets: of `config.port` and, if there is one, of `config.ollama_port`.
            Both share the routes and the limits.
        defaults: sampling parameters of requests that set none.
        speeds: measures requests beside a prediction.
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
        speeds: SpeedMeter | None = None,
    ) -> None:
        app = create_app(config, engine, tokenizer, defaults=defaults, on_failure=self._on_failure, speeds=speeds)
        self.port, *self.further_ports = (int(listener.getsockname()[1]) for listener in listeners)
        self._settings = config
        self._engine = engine
        self._speeds = speeds
        self._listeners = listeners
        self._deadlines = deadlines
        self.tls = server_context(config.ssl_certfile, config.ssl_keyfile)
        self.app = app
        self.service: HttpService | None = None
        """The running HTTP service; None before it runs."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
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
        gc.freeze()  # else a collection scans every imported module, which stalls all streams for 30 ms
        signals = dict.fromkeys((signal.SIGINT, *ending_signals()), self._drain)
        with handling(signals):  # to the very end: a second signal must not keep the engine from being closed
            await self._serve()
        if self._failure is not None:
            raise self._failure
        return self._exit_code

    async def _serve(self) -> None:
        async with self.app.running():
            self.app.prepare()  # while the ranks load
            self.service = HttpService(
                self.app.application.handle,
                self._listeners,
                limits_of(self._settings),
                deadlines=self._deadlines,
                tls=self.tls,
            )
            self.service.start()
            await self._ended.wait()
            await self.service.stop()

    def drain(self) -> None:
        """Refuse new requests, wait for running ones, then stop. A second call stops at once, one after the end does
        nothing. Thread-safe.
        """
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._drain)

    # The engine's listener -------------------------------------------------------------------------------------

    def on_ready(self, info: ModelInfo) -> None:
        """Log the model's formats of calls and reasoning, and print the URL of the API last, once."""
        if not self._announced:
            self._announced = True
            tls = self.tls is not None
            url = base_url(self._settings.host, self.port, tls=tls)
            served = self.app.served
            log.info("%s", served.formats.describe(shows_tools=served.shows_tools))
            if self._speeds is not None and self._speeds.predicted is not None:
                log.info("%s", _beside(self._speeds.predicted, info))
            log.info("a page for browsers: %s/", url.removesuffix("/v1"))
            for port in self.further_ports:
                other = base_url(self._settings.host, port, tls=tls).removesuffix("/v1")
                print(f"for Ollama's clients: {other}")
            print(f"phalanx is ready: {url} (model {served_names(self._settings)[0]})", flush=True)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """End the server if the engine has failed for good, with the engine's exit code for supervisors."""
        if will_restart:
            log.warning("the engine went down and is being restarted: %s", reason)
            return
        if self._announced:
            log.error("the engine went down for good: %s", reason)
        else:
            text = fitted(f"phalanx could not start: {as_entry(reason)}", sys.stderr)
            print(text, file=sys.stderr, flush=True)
        self._exit_code = self._engine.state.exit_code or ExitCode.CRASH
        self._ended.set()

    def on_batch(self, batch: Batch) -> None:
        """Nothing to do: the journal handles batches."""

    # The end ---------------------------------------------------------------------------------------------------

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        self._ended.set()

    def _drain(self) -> None:
        if self._draining is not None:
            self._fail_unfinished()
            self._ended.set()
            return
        self.app.application.is_draining = True
        self.app.journal.close("The server is shutting down.")
        self._draining = asyncio.create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        if self.app.journal.unfinished:
            log.info(
                "draining %d requests, %g s at most; a second Ctrl-C or SIGTERM ends them at once",
                self.app.journal.unfinished, self._settings.drain_seconds,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await self.app.journal.wait_until_idle()
        except TimeoutError:
            log.warning("%d requests did not end in time and are cancelled", self.app.journal.unfinished)
            self._fail_unfinished()
        self._ended.set()

    def _fail_unfinished(self) -> None:
        self.app.journal.fail_all(EngineUnavailable("The server is shutting down.", retry_after=5.0))


def _beside(predicted: PredictedSpeed, info: ModelInfo) -> str:
    """What was predicted, beside the first figure of the self-test, which a single rank does not have."""
    text = (
        f"predicted: {predicted.tokens_per_second:.1f} tokens/s with one stream, {predicted.ttft_seconds:.2f} s to the "
        "first token of 512"
    )
    if info.self_test is None or not info.self_test.step_ms:
        return text
    step_ms = info.self_test.step_ms
    return f"{text}; the self-test's step took {step_ms:.2f} ms ({1000 / step_ms:.1f} a second)"
