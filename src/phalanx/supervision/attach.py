"""An engine that an external launcher starts and restarts: `mpirun`, `mlx.launch`, a job scheduler.

The server process listens on a Unix socket, and rank 0 connects to it. When rank 0 disconnects, unfinished requests
wait for the next leader and resume there.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

from msgspec.structs import replace

from phalanx.errors import ConfigError, EngineUnavailable
from phalanx.supervision.engine_connection import EngineConnection, Streams
from phalanx.types import Shutdown

CLOSE_S = 5.0  # for the leader to close its end after `Shutdown`


class AttachedEngine(EngineConnection):
    """The engine whose leader connects to `path`. A second connection is closed at once.

    Args:
        path: of the Unix socket, which this makes.
        stall_s: seconds without an answer from the engine's loop after which it counts as stuck.
    """

    def __init__(self, path: Path, *, stall_s: float) -> None:
        super().__init__(stall_s=stall_s)
        self._path = path
        self._listener: asyncio.Server | None = None
        self._current: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on the socket.

        Raises:
            ConfigError: a file has this path, or the socket cannot be made.
        """
        try:
            if self._path.is_socket():
                self._path.unlink()  # left by a killed server: a live one would still hold the HTTP port
            self._listener = await asyncio.start_unix_server(self._accept, sock=_bound(self._path))
        except OSError as error:
            raise ConfigError(
                f"--attach {self._path}: {error.strerror or error}.", remedy="Name a new file."
            ) from error
        reason = f"waiting for `phalanx rank --socket {self._path}`"
        self._state = replace(self._state, reason=reason)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        current = self._current
        if current is not None and not current.done():
            with contextlib.suppress(EngineUnavailable):
                self._write(Shutdown())
            await asyncio.wait([current], timeout=CLOSE_S)
            current.cancel()
            await asyncio.gather(current, return_exceptions=True)
        if self._listener is not None:  # else what lies there is the user's
            self._path.unlink(missing_ok=True)
        self._fail_pings("closed")
        self._state = replace(self._state, phase="stopped", reason="closed")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._current is not None and not self._current.done():
            writer.close()  # one leader at a time
        else:
            self._current = asyncio.create_task(self._serve((reader, writer)), name="attached engine")

    async def _serve(self, streams: Streams) -> None:
        """Receive from one leader until it disconnects or is stuck, then report the engine as down."""
        self._failure = None
        self._last_message_at = time.monotonic()
        receive = asyncio.create_task(self._receive_messages(streams))
        watch = asyncio.create_task(self._wait_until_stuck())
        try:
            await asyncio.wait([receive, watch], return_when=asyncio.FIRST_COMPLETED)
            stuck = watch.result() if watch.done() else ""
        finally:
            for task in (receive, watch):
                task.cancel()
            await asyncio.gather(receive, watch, return_exceptions=True)
            await self._close_connection()
        if self._listener is not None and self._listener.is_serving():
            reason = f"the engine {stuck}" if stuck else "the engine disconnected"
            if self._failure is not None:
                reason = self._failure.message
            self._report_down("restarting", reason, None)


def _bound(path: Path) -> socket.socket:
    """A Unix socket to which only this user can connect: it becomes private before it listens.

    Raises:
        OSError: a file has this path, or the socket cannot be made.
    """
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(str(path))
        path.chmod(0o600)
    except OSError:
        made.close()
        raise
    return made
