"""The progress of one attempt on one replica. `attempt.py` and `relay.py` update it; `failover.py` decides by it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from phalanx.gateway.dispatch.dispatcher import Grant
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.transcript import Transcript

QUIET_S = 0.5  # a stream silent for longer has its replica checked: most steps are shorter


class BufferedResponse(Struct, frozen=True):
    """A whole answer, not sent to the client yet."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_final: bool = False  # the replica says that no other one would answer better
    fault: str = ""  # the error that the client gets in place of the answer


class Traffic(Struct, eq=False):
    """See the module's docstring. Times are the loop's."""

    grant: Grant
    admin_key: str | None  # sent with the request
    transcript: Transcript | None  # of the replica's records; None: the gateway asks for none
    last_byte: float  # when the last one came or was passed on, or the attempt began
    reader: EventReader | None  # of a stream, once the answer is known to be one
    has_begun: bool = False  # a byte of the answer has come
    is_sent: bool = False  # the replica may be computing
    is_unreachable: bool = False  # it accepted no connection, so the request is not the cause
    is_reused: bool = False  # the connection has served a request before
    client_was_slow: bool = False  # the client read slowly, so that the replica may have given up
    is_relaying: bool = False  # waiting for the client, not for the replica
    passed_at: float | None = None  # when the last piece was written to the client

    @property
    def is_stale(self) -> bool:
        """Whether a failure may mean only that the replica had just closed an idle connection."""
        return self.is_reused and not self.has_begun

    @property
    def can_move(self) -> bool:
        """Whether another replica can continue the stream."""
        return self.reader is not None and self.reader.can_go_on

    def needs_check(self, now: float) -> bool:
        """Whether a movable stream is quiet and its replica was not checked since the last byte."""
        is_quiet = self.grant.replica.health.checked_at < self.last_byte < now - QUIET_S
        return is_quiet and self.can_move and not self.is_relaying

    def silence(self, stream_timeout_s: float, now: float) -> str:
        """Why this attempt is over, as a predicate; empty if it is not."""
        health = self.grant.replica.health
        if health.is_lost(self.last_byte):
            return f"is down ({health.reason})"
        is_late = self.has_begun and now - self.last_byte > stream_timeout_s
        return f"sent nothing for {stream_timeout_s:g} s" if is_late else ""

    def standstill(self, check_timeout_s: float, now: float) -> str:
        """Why this attempt makes no progress for now, as a predicate; empty if it does."""
        health = self.grant.replica.health
        if self.reader is None and health.determinism_key and not self.has_begun:  # an answer that is not a stream
            since = health.refused_since
            return "says that it cannot serve" if since is not None and self.last_byte < since else ""
        if self.reader is None or not self.can_move:
            return ""
        if self.reader.is_paused:
            return "has lost its engine"
        is_silent = health.silence(self.last_byte, now) > check_timeout_s
        return "answers neither the stream nor a health check" if is_silent else ""
