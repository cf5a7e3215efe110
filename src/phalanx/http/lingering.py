"""A transport that lets the last answer arrive while its client still sends.

A socket that is closed with unread bytes, or gets more of them, is reset, and the reset destroys an answer that the
client has not read yet. So if the client has not sent all, `close` only ends the sending: for a while, and for so many
bytes, the connection still receives the rest, which its protocol drops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 5.0  # 8 MiB at 13 Mbit/s
LINGER_BYTES = 16 << 20  # twice the largest body by default


class LingeringTransport(asyncio.Transport):
    """See the module's docstring. The protocol hands the size of what it drops to `drop`.

    Args:
        inner: the connection's own transport.
        is_sending: whether the client has not sent all, asked on `close`.
    """

    def __init__(self, inner: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._is_sending = is_sending
        self._left: int | None = None  # bytes that are still dropped; None: `close` was not called
        self._is_paused = self._is_held = False  # either stops reading

    def close(self) -> None:
        """Close once all is sent, and the client has sent all or its time is over."""
        if self.is_closing():
            return
        if not self._is_sending():
            self._inner.close()
            return
        self._left = LINGER_BYTES
        try:
            if self._inner.get_extra_info("sslcontext") is None:  # TLS has no end of one direction
                self._inner.write_eof()
        except OSError:  # the client has reset the connection, which may not have been read yet
            self._inner.abort()
            return
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self._inner.close)

    def drop(self, n_bytes: int) -> None:
        """Count bytes that came after `close`."""
        if self._left is not None:
            self._left -= n_bytes
            if self._left < 0:
                self._inner.close()

    def abort(self) -> None:
        """Close at once."""
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is lost."""
        return self._left is not None or self._inner.is_closing()

    def write(self, data: Any) -> None:
        """Send, unless `close` was called."""
        if self._left is None:
            self._inner.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the connection's own transport, as in the methods below."""
        return self._inner.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._read_or_not()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._read_or_not()

    def hold_reading(self, is_held: bool) -> None:
        """Read nothing while held, also if aiohttp resumes reading by the method above."""
        self._is_held = is_held
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._left is not None:
            return
        if self._is_paused or self._is_held:
            self._inner.pause_reading()
        else:
            self._inner.resume_reading()

    def is_reading(self) -> bool:
        return self._inner.is_reading()
