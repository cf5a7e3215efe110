"""TLS without a socket: decrypts received bytes and encrypts bytes to send.

`dist/frame_connection.py` has the socket, `host_credentials.py` the accepted certificates. One thread at a time.
"""

from __future__ import annotations

import contextlib
import ssl

from phalanx.tls.failures import predicate_of
from phalanx.tls.host_credentials import Credentials, place_of

_PLAIN = 1 << 14  # bytes of a TLS record at most

CUT_OFF = "lost its connection: the stream was cut off"
"""End of a stream without TLS's close_notify: the other process was killed, or an attacker in between forged the
end."""


class TlsSession:
    """One end of a connection.

    Args:
        context: says which certificates the other end may show.
        server_side: this end accepted the connection.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.established = False
        """Whether the handshake is over: the other end has shown a certificate that this end accepts."""
        self.ended = ""
        """How the other end closed the session, or what broke it, as a predicate; "" while it is open."""
        self._open(b"")  # a client begins

    @property
    def has_answer(self) -> bool:
        """Whether TLS itself has something to send, which `seal` returns."""
        return self._outgoing.pending > 0

    def receive(self, piece: bytes) -> bytes:
        """Take in received bytes. Returns the decrypted ones.

        A session that breaks sets `ended`, and returns what it decrypted before.
        """
        return b"" if self.ended else self._open(piece)

    def receive_end(self) -> None:
        """The stream has ended. Sets `ended`."""
        self.ended = self.ended or CUT_OFF

    def seal(self, data: memoryview) -> bytes:
        """The bytes to send in order to say `data`, after those that TLS itself has to send.

        Only TLS's own before the handshake is over: `data` has to be empty then.

        Raises:
            ConnectionError: the session has broken, or this end has closed its direction.
        """
        try:
            while data:
                data = data[self._object.write(data) :]
        except ssl.SSLError as error:
            raise ConnectionError(self.ended or predicate_of(error)) from error
        return self._outgoing.read()

    def finish(self) -> None:
        """Say that this end sends nothing more (close_notify). It may still receive."""
        if self.established:
            with contextlib.suppress(ssl.SSLError):  # it would wait for the other end's close_notify
                self._object.unwrap()

    def place(self, credentials: Credentials) -> int | None:
        """The place of the host at the other end, once the session is established."""
        return place_of(self._object, credentials) if self.established else None

    def _open(self, piece: bytes) -> bytes:
        self._incoming.write(piece)
        decrypted = bytearray()
        try:
            if not self.established:
                self._object.do_handshake()
                self.established = True
            while plain := self._object.read(_PLAIN):
                decrypted += plain
            self.ended = "closed its connection"
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.ended = predicate_of(error)
        return bytes(decrypted)
