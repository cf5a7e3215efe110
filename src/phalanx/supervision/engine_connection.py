"""The server's end of the connection to a leader: messages, states, pings. The common part of two `EngineClient`s.

`process.py` starts and restarts the ranks; `attach.py` waits for ranks that an external launcher starts. Runs on one
asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from msgspec.structs import replace

from phalanx.dist.frames import read_frame
from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.supervision.client import EngineClient, EngineState, LoadProgress
from phalanx.supervision.wire import server_codec
from phalanx.types import Batch, EngineStats, Failed, FromEngine, Loading, ModelInfo, Ping, Pong, Ready, ToEngine

PING_PERIOD_S = 1.0  # ranks report with each: their figures are at most so old
LOG_WAIT_S = 0.5  # a relayed log may lag behind the connection for so long
LOAD_STALL_S = 600.0  # a load that reports nothing for this long is stuck

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class EngineConnection(EngineClient):
    """Serves one leader at a time.

    Args:
        stall_s: seconds without an answer from the engine's loop after which it counts as stuck.
    """

    def __init__(self, *, stall_s: float) -> None:
        super().__init__()
        self._stall_s = stall_s
        self._codec = server_codec()
        self._state = EngineState(down_since=time.time())
        self._info: ModelInfo | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pings: dict[int, tuple[asyncio.Future[EngineStats], float]] = {}  # and when each was sent
        self._nonce = 0
        self._last_message_at = 0.0  # monotonic seconds
        self._last_pong_at = 0.0  # monotonic seconds
        self._ready_at: float | None = None  # monotonic seconds, of the leader that is or was connected last
        self._failure: Failed | None = None
        self._log_complete = asyncio.Event()
        """The log of the ranks is printed up to the last line before `Ready`; always set where it is not read."""
        self._log_complete.set()

    @property
    def info(self) -> ModelInfo | None:
        return self._info

    @property
    def state(self) -> EngineState:
        return replace(self._state, last_pong_age_s=self._silent_s() if self._state.phase == "ready" else None)

    def _silent_s(self) -> float:
        """Seconds without a sign of life. While pings are open only an answered one is: a rank that withholds its
        report may compute on. (Ranks report in turns, and a ping may have to wait for the second one.)"""
        asked = [max(sent_at, self._last_pong_at) for _, sent_at in self._pings.values()]
        return time.monotonic() - min([self._last_message_at, *asked])

    def send(self, message: ToEngine) -> None:
        if self._state.phase != "ready":
            raise EngineUnavailable(f"The engine is {self._state.phase}: {self._state.reason or 'not ready yet'}.")
        self._write(message)

    async def ping(self) -> EngineStats:
        self._nonce += 1
        nonce = self._nonce
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self.send(Ping(nonce))
        self._pings[nonce] = future, time.monotonic()
        try:
            return await future
        finally:
            self._pings.pop(nonce, None)

    async def _receive_messages(self, streams: Streams) -> None:
        """Handle a leader's messages until it closes its end."""
        reader, self._writer = streams
        try:
            while (payload := await read_frame(reader)) is not None:
                self._last_message_at = time.monotonic()
                message = self._codec.decode(payload)
                if isinstance(message, Ready):  # the line *ready* comes after the ranks' log lines
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._log_complete.wait(), LOG_WAIT_S)
                self._handle(message)
        finally:
            self._note_lost()

    async def _close_connection(self) -> None:
        """Close the connection and drop unsent bytes: the leader has stopped reading."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Batch():
                self.emit_batch(message)
            case Pong():
                self._last_pong_at = time.monotonic()
                future, _ = self._pings.pop(message.nonce, (None, 0.0))
                if future is not None and not future.done():
                    future.set_result(message.stats)
            case Loading():
                phase = "loading" if self._info is None else "restarting"
                progress = LoadProgress(message.phase, message.done, message.total)
                reason = self._state.reason if phase == "restarting" else "loading the model"
                self._state = replace(self._state, phase=phase, reason=reason, progress=progress)
            case Ready():
                self._info = message.info
                self._ready_at = time.monotonic()
                self._state = replace(self._state, phase="ready", reason="", down_since=None, progress=None)
                self.emit_ready(message.info)
            case Failed():
                self._failure = message

    async def _wait_until_stuck(self) -> str:
        """Ping the leader every second. Returns once it is silent for too long; the text says for how long."""
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            ready = self._state.phase == "ready"
            limit = self._stall_s if ready else LOAD_STALL_S
            silent = self._silent_s()
            if silent > limit:
                return f"did not {'answer' if ready else 'report progress while loading'} for {silent:.0f} s"
            if ready and not self._pings:
                asyncio.create_task(self._quiet_ping(), name="engine ping")  # noqa: RUF006

    async def _quiet_ping(self) -> None:
        with contextlib.suppress(EngineUnavailable):
            await self.ping()

    def _write(self, message: ToEngine) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineUnavailable("The engine's connection is closed.")
        self._writer.write(self._codec.encode(message))

    def _note_lost(self) -> None:
        """The leader computes no more. Why, and whether a restart helps, is known once its processes have ended."""
        if self._state.phase == "ready":
            self._state = replace(
                self._state, phase="restarting", reason="the engine disconnected", down_since=time.time()
            )
            for call in self.when_lost:
                call()

    def _report_down(self, phase: str, reason: str, code: ExitCode | None) -> None:
        """Set the state, fail pending pings and tell the listeners that the engine is gone."""
        self._state = EngineState(
            phase="restarting" if phase == "restarting" else "failed",
            reason=reason,
            down_since=self._state.down_since or time.time(),
            restarts=self._state.restarts + (phase == "restarting"),
            exit_code=code,
        )
        self._fail_pings(reason)
        self.emit_down(reason, will_restart=phase == "restarting")

    def _fail_pings(self, reason: str) -> None:
        for future, _ in self._pings.values():
            if not future.done():
                future.set_exception(EngineUnavailable(f"The engine went down: {reason}."))
        self._pings.clear()
