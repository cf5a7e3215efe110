"""The handshake by which workers join the leader of their start.

    worker                                  leader
    (TLS: each end shows its certificate)
    Hello(identity, protocol, size, nonce)  ->
                                            <-    Admitted | Refused
                                            <-    Welcome | Refused    once the group is complete, or cannot form

Between machines both ends show certificates: a worker accepts only rank 0's, and the leader accepts rank i's only from
rank i. On one machine the socket's directory is private (`control_address.py`). Any process may connect over TCP, so a
connection is only a candidate until it is admitted: it gets little time and little memory, and cannot delay others.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from phalanx.config import GroupConfig
from phalanx.dist import control_address
from phalanx.dist.frame_connection import FrameConnection
from phalanx.dist.peers import (
    PROTOCOL,
    Admitted,
    GroupWelcome,
    Hello,
    Identity,
    Message,
    Refused,
    WatchdogLimits,
    encode,
)
from phalanx.errors import FrameError, GroupError, PeerMissing, PeerRefused
from phalanx.http.connection_table import ConnectionLimits, ConnectionSlot, ConnectionTable
from phalanx.tls.host_credentials import Credentials, accepting, connecting
from phalanx.tls.session import TlsSession

log = logging.getLogger("phalanx.channel")

MAX_CANDIDATES = 64  # a further one replaces an older one; a rank that was dropped connects again
CANDIDATE_BYTES = 1 << 14  # accepted from a candidate in all; TLS and a Hello take about 3,000
WORKER_FRAME = 4 << 20  # bytes of a worker's message at most: figures and failures, never plans
LOGGED_DROPS = 20  # further ones of a start are only counted, so that the log cannot fill a disk
RETRY_S = 0.1  # between a worker's attempts to connect
MAX_REASONS = 4  # in the error: the last different ones, so that an earlier refusal shows although the leader is gone
OUTCOME_WAIT_S = 5.0  # extra time of a worker for the group to form, so that the leader reports first

MUST_MATCH = ("version", "mlx", "mlx_lm", "fingerprint")
"""Fields of `Identity` that must be equal on all ranks. An empty one is unknown and not compared."""

_Expected = TypeVar("_Expected", Admitted, GroupWelcome)

_ERRORS = {error.__name__: error for error in (GroupError, PeerMissing, PeerRefused)}


class Member(NamedTuple):
    """An admitted rank."""

    identity: Identity
    connection: FrameConnection
    early: tuple[Message, ...] = ()  # that arrived together with the handshake's last message


def mismatch(mine: Identity, hello: Hello, size: int, present: Iterable[Identity]) -> str:
    """Why a rank cannot join the leader's group: names field, rank, host and both values. "" if it can.

    Args:
        present: the ranks that have joined so far.
    """
    theirs = hello.identity
    if hello.protocol != PROTOCOL:
        return f"{theirs} speaks control protocol {hello.protocol}; the leader, {mine}, speaks {PROTOCOL}."
    if hello.size != size:
        return f"{theirs} was started for a group of size {hello.size}; the leader, {mine}, for size {size}."
    if not 0 <= theirs.rank < size:
        return f"{theirs} has no place in a group of size {size}; rank must be 0 to {size - 1}."
    for other in (mine, *present):
        if other.rank == theirs.rank:
            return f"{theirs} has the rank of another process of the group: {other}."
    for field in MUST_MATCH:
        ours, its = getattr(mine, field), getattr(theirs, field)
        if ours and its and ours != its:
            return f"{theirs} has {field} {its}; the leader, {mine}, has {ours}."
    return ""


# The leader's side -----------------------------------------------------------------------------------------------


class _Candidate:
    """A connection to the leader that has not joined the group yet."""

    def __init__(
        self, accepted: socket.socket, address: tuple[str, int], tls: TlsSession | None, admit_s: float
    ) -> None:
        self.source, port = address
        self.address = f"{self.source} port {port}" if port else self.source
        self.tls = tls
        self.connection = FrameConnection(accepted, tls, stranger_bytes=CANDIDATE_BYTES)
        self.deadline = time.monotonic() + admit_s


class LeaderHandshake:
    """The leader's side: accepts connections until every other rank has joined.

    Owns the listener and closes it at the end, so that later connections are refused.

    Args:
        credentials: of rank 0; None where the listener is a Unix socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        group: GroupConfig,
        credentials: Credentials | None,
        me: Identity,
        limits: WatchdogLimits,
    ) -> None:
        self._listener = listener
        self._group = group
        self._credentials = credentials
        self._context = None if credentials is None else accepting(credentials, peers=range(1, group.size))
        self._me = me
        self._limits = limits
        self._table = ConnectionTable(ConnectionLimits(MAX_CANDIDATES, MAX_CANDIDATES))
        self._candidates: dict[_Candidate, ConnectionSlot] = {}
        self._members: dict[int, Member] = {}
        self._selector = selectors.DefaultSelector()
        self._drops = 0

    def run(self) -> list[Member]:
        """Wait for the other ranks. Returns them in rank order; the caller owns their connections.

        Raises:
            PeerMissing: ranks did not join in time, or disconnected; names them.
            PeerRefused: a connected rank cannot be in this group; it gets the same message.
        """
        try:
            self._gather()
            for member in self._members.values():
                member.connection.offer(encode(GroupWelcome(self._me)))
        except GroupError as error:
            refused = encode(Refused(type(error).__name__, error.message, error.remedy))
            for member in self._members.values():
                member.connection.offer(refused)
                member.connection.close()
            raise
        finally:
            for candidate in self._candidates:
                candidate.connection.close()
            self._selector.close()
            self._listener.close()
            if self._drops > LOGGED_DROPS:
                log.warning("%d more connections were dropped", self._drops - LOGGED_DROPS)
        return [self._members[rank] for rank in sorted(self._members)]

    def _gather(self) -> None:
        deadline = time.monotonic() + self._limits.hello_s
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while len(self._members) < self._group.size - 1:
            now = time.monotonic()
            for candidate in [candidate for candidate in self._candidates if candidate.deadline <= now]:
                self._drop(candidate, f"sent no Hello within {self._limits.admit_s:g} s")
            if now >= deadline:
                raise self._missing()
            next_deadline = min([deadline, *(candidate.deadline for candidate in self._candidates)])
            for key, _ in self._selector.select(next_deadline - now):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Member):
                    self._check_member(key.data)
                elif key.data in self._candidates:  # else dropped since the select
                    self._receive(key.data)

    def _missing(self) -> PeerMissing:
        size = self._group.size
        missing = sorted(set(range(size)) - {self._me.rank} - self._members.keys())
        names = ", ".join(map(str, missing))
        return PeerMissing(
            f"Rank{'s' * (len(missing) > 1)} {names} of {size} did not come to the leader, {self._me}, within "
            f"{self._limits.hello_s:g} s.",
            remedy="Look at the log of that rank's machine, and whether it can reach the leader's control port.",
        )

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError as error:  # it disconnected, or this process has too many open files; keep waiting
            self._log_drop("a connection could not be accepted: %s", error)
            return
        source = ("this machine", 0) if accepted.family == socket.AF_UNIX else address[:2]
        tls = None if self._context is None else TlsSession(self._context, server_side=True)
        candidate = _Candidate(accepted, source, tls, self._limits.admit_s)
        why = f"made room: {MAX_CANDIDATES} connections wait"
        slot = self._table.admit(candidate.source, lambda: self._drop(candidate, why))
        assert slot is not None, "an idle candidate makes room"
        self._candidates[candidate] = slot
        self._selector.register(candidate.connection, selectors.EVENT_READ, candidate)

    def _drop(self, candidate: _Candidate, why: str) -> None:
        self._log_drop("the connection from %s was dropped: it %s", candidate.address, why)
        self._selector.unregister(candidate.connection)
        self._table.remove(self._candidates.pop(candidate))
        candidate.connection.close()

    def _log_drop(self, line: str, *values: object) -> None:
        self._drops += 1
        if self._drops <= LOGGED_DROPS:
            log.warning(line, *values)

    def _check_member(self, member: Member) -> None:
        """A member sends nothing while the group forms, so its connection is readable only if it was lost."""
        try:
            member.connection.read()
        except FrameError as error:
            raise PeerMissing(f"{member.identity} broke the protocol while the group was forming: {error}") from error
        if member.connection.ended:
            raise PeerMissing(
                f"{member.identity} {member.connection.ended} while the group was forming.",
                remedy="Its own log says why.",
            )

    def _receive(self, candidate: _Candidate) -> None:
        try:
            messages = candidate.connection.read()
        except FrameError as error:
            self._drop(candidate, f"is not a rank. {error}")
            return
        if messages:
            first = messages[0]
            if isinstance(first, Hello):
                self._admit_or_refuse(candidate, first)
            else:
                self._drop(candidate, f"sent {type(first).__name__} out of turn")
        elif candidate.connection.ended:
            self._drop(candidate, candidate.connection.ended)

    def _admit_or_refuse(self, candidate: _Candidate, hello: Hello) -> None:
        """Admit a rank of this start. A stranger is dropped; a rank that cannot be in the group ends the start."""
        if why := self._why_stranger(candidate, hello):
            refused = Refused(
                GroupError.__name__,
                f"The leader at this address, {self._me}, refuses {hello.identity}, which {why}.",
                "Start all ranks by one command, and no other group on this port.",
            )
            candidate.connection.offer(encode(refused))
            self._drop(candidate, why)
            return
        present = [member.identity for member in self._members.values()]
        if reason := mismatch(self._me, hello, self._group.size, present):
            error = PeerRefused(reason, remedy="All ranks need the same installation, model and start.")
            candidate.connection.offer(encode(Refused(type(error).__name__, error.message, error.remedy)))
            raise error
        member = Member(hello.identity, candidate.connection)
        self._table.remove(self._candidates.pop(candidate))
        self._members[hello.identity.rank] = member
        member.connection.trust(WORKER_FRAME)
        member.connection.offer(encode(Admitted()))
        self._selector.modify(member.connection, selectors.EVENT_READ, member)
        log.info("%s on %s connected from %s", member.identity, member.identity.device, candidate.address)

    def _why_stranger(self, candidate: _Candidate, hello: Hello) -> str:
        """Why a process is not a rank of this start, as a predicate; "" if it is one."""
        rank = hello.identity.rank
        if candidate.tls is not None and self._credentials is not None:
            place = candidate.tls.place(self._credentials)
            if place != rank:
                whose = "an unknown certificate" if place is None else f"the certificate of rank {place}"
                return f"says that it is rank {rank}, but shows {whose}"
        if hello.nonce != self._group.nonce:
            return "belongs to another job, or to another start of this one"
        return ""


# The worker's side -----------------------------------------------------------------------------------------------


class _Retry(Exception):
    """The other end is not the leader, or the connection was lost; another attempt may succeed."""


def join_leader(group: GroupConfig, credentials: Credentials | None, me: Identity, limits: WatchdogLimits) -> Member:
    """Connect to the leader and wait until the group is complete. The caller owns the leader's connection.

    Args:
        credentials: of this rank; None where the leader listens on a Unix socket.

    Raises:
        PeerMissing: the leader was not reached before the deadline, or other ranks did not join.
        PeerRefused: this rank, or another one, cannot be in the leader's group.
        GroupError: the leader belongs to another start, or does not accept this rank's certificate.
    """
    deadline = time.monotonic() + limits.hello_s
    context = None if credentials is None else connecting(credentials, peer=0)
    reasons: list[str] = []
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _attempt(group, context, me, left, limits)
        except (OSError, FrameError, _Retry) as error:
            if (reason := str(error)) not in reasons:
                reasons = [*reasons, reason][-MAX_REASONS:]
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise PeerMissing(
        f"{me} did not reach the leader at {group.control} within {limits.hello_s:g} s: "
        f"{'; '.join(reasons) or 'no attempt was made'}.",
        remedy="Is the leader running, and may this machine connect to that port?",
    )


def _attempt(
    group: GroupConfig, context: ssl.SSLContext | None, me: Identity, left_s: float, limits: WatchdogLimits
) -> Member:
    deadline = time.monotonic() + left_s
    admit_s = min(left_s, limits.admit_s)
    admit_by = time.monotonic() + admit_s
    connected = control_address.connect(group.control, admit_s)
    tls = None if context is None else TlsSession(context, server_side=False)
    connection = FrameConnection(connected, tls, stranger_bytes=CANDIDATE_BYTES)
    with contextlib.ExitStack() as on_error:
        on_error.callback(connection.close)
        reader = _MessageReader(connection)
        reader.establish(admit_by)
        connection.trust()
        connection.send(encode(Hello(me, PROTOCOL, group.size, group.nonce)), admit_s)
        reader.expect(Admitted, admit_by)
        try:
            leader = reader.expect(GroupWelcome, deadline + OUTCOME_WAIT_S).leader
        except (OSError, FrameError, _Retry) as error:  # the leader had admitted this rank: another attempt is useless
            raise PeerMissing(f"{me} had joined, but the group did not form: {error}.") from error
        on_error.pop_all()
    return Member(leader, connection, tuple(reader.unread))


class _MessageReader:
    """Reads messages one at a time. Messages that arrive together with the expected one stay in `unread`."""

    def __init__(self, connection: FrameConnection) -> None:
        self._connection = connection
        self.unread: list[Message] = []

    def establish(self, deadline: float) -> None:
        """Wait until messages may be sent."""
        while not self._connection.established:
            self._read(deadline)

    def expect(self, kind: type[_Expected], deadline: float) -> _Expected:
        while not self.unread:
            self._read(deadline)
        message = self.unread.pop(0)
        if isinstance(message, Refused):
            raise _ERRORS.get(message.kind, GroupError)(message.message, remedy=message.remedy)
        if not isinstance(message, kind):
            raise _Retry(f"the process there sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def _read(self, deadline: float) -> None:
        """Read once, even after the deadline: an answer may have arrived while this process was stopped."""
        left = deadline - time.monotonic()
        arrived = self._connection.wait_readable(max(0.0, left))
        if not arrived and left <= 0:
            raise _Retry("the process there did not answer in time")
        self.unread += self._connection.read()
        if self._connection.ended and not self.unread:
            raise _Retry(f"the process there {self._connection.ended}")
