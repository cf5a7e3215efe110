"""The handshake by which workers join the leader: both ends prove that they know the group's secret.

    leader                        worker
    Challenge(nonce)        ->
                            <-    Proof(own nonce, HMAC(secret, "worker", both nonces))
    Proof(HMAC(secret, "leader", both nonces))  ->
                            <-    Hello(identity, protocol, size)
    Welcome | Refused       ->    once the group is complete, or cannot form

Any process may connect, so a connection is only a candidate until its proof: it gets little time and little memory, and
cannot delay others. The handshake authenticates; it does not encrypt. Does not know what the complete group does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from phalanx.dist.connection import Connection
from phalanx.dist.peers import (
    PROTOCOL,
    Challenge,
    Hello,
    Identity,
    Message,
    Proof,
    Refused,
    WatchdogLimits,
    Welcome,
    encode,
)
from phalanx.errors import FrameError, GroupError, PeerMissing, PeerRefused

log = logging.getLogger("phalanx.channel")

MAX_CANDIDATES = 64  # one more drops the oldest; a rank that was dropped connects again
CANDIDATE_BYTES = 4096  # per message before authentication; a Hello takes a few hundred
NONCE_BYTES = 32
RETRY_S = 0.1  # between a worker's attempts to connect
OUTCOME_WAIT_S = 5.0  # a worker waits so much longer than the leader for the group, so that the leader reports first

MUST_MATCH = ("version", "mlx", "mlx_lm", "fingerprint")
"""Fields of `Identity` that must be equal on all ranks. An empty one is not known yet and is not compared."""

_Expected = TypeVar("_Expected", Challenge, Proof, Welcome)

_ERRORS = {error.__name__: error for error in (GroupError, PeerMissing, PeerRefused)}


class Member(NamedTuple):
    """An authenticated rank."""

    identity: Identity
    connection: Connection
    early: tuple[Message, ...] = ()  # messages that arrived together with the last one of the handshake


def _is_valid_mac(mac: bytes, secret: bytes, role: str, leader_nonce: bytes, worker_nonce: bytes) -> bool:
    complete = len(leader_nonce) == len(worker_nonce) == NONCE_BYTES
    return complete and hmac.compare_digest(mac, prove(secret, role, leader_nonce, worker_nonce))


def prove(secret: bytes, role: str, leader_nonce: bytes, worker_nonce: bytes) -> bytes:
    """The MAC of one end of the handshake. It includes the role, so that an attacker cannot send an end its own MAC."""
    return hmac.digest(secret, role.encode() + b"\0" + leader_nonce + worker_nonce, hashlib.sha256)


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

    def __init__(self, accepted: socket.socket, address: str, deadline: float) -> None:
        self.connection = Connection(accepted, limit=CANDIDATE_BYTES)
        self.address = address
        self.deadline = deadline
        self.nonce = os.urandom(NONCE_BYTES)
        self.authenticated = False


class LeaderHandshake:
    """The leader's side: accepts connections until every other rank has joined.

    Owns the listener and closes it at the end, so that later connections are refused.
    """

    def __init__(self, listener: socket.socket, size: int, secret: bytes, me: Identity, limits: WatchdogLimits) -> None:
        self._listener = listener
        self._size = size
        self._secret = secret
        self._me = me
        self._limits = limits
        self._candidates: list[_Candidate] = []  # oldest first
        self._members: dict[int, Member] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Member]:
        """Wait for the other ranks. Returns them in rank order; the caller owns their connections.

        Raises:
            PeerMissing: ranks did not join in time, or disconnected; names them.
            PeerRefused: a rank connected that cannot be in this group; it gets the same message.
        """
        try:
            self._gather()
            for member in self._members.values():
                member.connection.offer(encode(Welcome(self._me)))
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
        return [self._members[rank] for rank in sorted(self._members)]

    def _gather(self) -> None:
        deadline = time.monotonic() + self._limits.hello_s
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while len(self._members) < self._size - 1:
            now = time.monotonic()
            for candidate in [candidate for candidate in self._candidates if candidate.deadline <= now]:
                self._drop(candidate, f"did not prove itself within {self._limits.authenticate_s:g} s")
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
        missing = sorted(set(range(self._size)) - {self._me.rank} - self._members.keys())
        names = ", ".join(map(str, missing))
        return PeerMissing(
            f"Rank{'s' * (len(missing) > 1)} {names} of {self._size} did not come to the leader, {self._me}, within "
            f"{self._limits.hello_s:g} s.",
            remedy="Look at the log of that rank's machine, and whether it can reach the leader's control port.",
        )

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError as error:  # it disconnected, or this process has too many open files: the leader goes on waiting
            log.warning("a connection could not be accepted: %s", error)
            return
        if len(self._candidates) >= MAX_CANDIDATES:
            self._drop(self._candidates[0], f"made room: {MAX_CANDIDATES} connections wait")
        candidate = _Candidate(accepted, _name(address), time.monotonic() + self._limits.authenticate_s)
        self._candidates.append(candidate)
        self._selector.register(candidate.connection, selectors.EVENT_READ, candidate)
        candidate.connection.offer(encode(Challenge(candidate.nonce)))

    def _drop(self, candidate: _Candidate, why: str) -> None:
        log.warning("the connection from %s was dropped: it %s", candidate.address, why)
        self._selector.unregister(candidate.connection)
        self._candidates.remove(candidate)
        candidate.connection.close()

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
            self._drop(candidate, f"is none of ours. {error}")
            return
        for message in messages:
            if not self._answer(candidate, message):
                return
        if candidate.connection.ended:
            self._drop(candidate, candidate.connection.ended)

    def _answer(self, candidate: _Candidate, message: Message) -> bool:
        """Handle a message. Returns whether the connection is still a candidate."""
        match message:
            case Proof() if not candidate.authenticated:
                return self._check_proof(candidate, message)
            case Hello() if candidate.authenticated:
                self._admit(candidate, message)
            case _:
                self._drop(candidate, f"sent {type(message).__name__} out of turn")
        return False

    def _check_proof(self, candidate: _Candidate, proof: Proof) -> bool:
        if not _is_valid_mac(proof.mac, self._secret, "worker", candidate.nonce, proof.nonce):
            refused = Refused(
                GroupError.__name__,
                f"The leader at this address, {self._me}, is of another job: its secret is not ours.",
                "Another group uses the same port; start this one on another.",
            )
            candidate.connection.offer(encode(refused))
            self._drop(candidate, "belongs to another job: its secret is not ours")
            return False
        candidate.authenticated = True
        mac = prove(self._secret, "leader", candidate.nonce, proof.nonce)
        candidate.connection.offer(encode(Proof(b"", mac)))
        return True

    def _admit(self, candidate: _Candidate, hello: Hello) -> None:
        present = [member.identity for member in self._members.values()]
        if reason := mismatch(self._me, hello, self._size, present):
            error = PeerRefused(reason, remedy="All ranks need the same installation, model and start.")
            candidate.connection.offer(encode(Refused(type(error).__name__, error.message, error.remedy)))
            raise error
        member = Member(hello.identity, candidate.connection)
        self._candidates.remove(candidate)
        self._members[hello.identity.rank] = member
        member.connection.accept_large_messages()
        self._selector.modify(member.connection, selectors.EVENT_READ, member)
        log.info("%s on %s connected from %s", member.identity, member.identity.device, candidate.address)


def _name(address: tuple[str, int] | tuple[str, int, int, int] | str) -> str:
    return address if isinstance(address, str) else f"{address[0]} port {address[1]}"


# The worker's side -----------------------------------------------------------------------------------------------


class _Retry(Exception):
    """The other end is not the leader, or the connection was lost; another attempt may succeed."""


def join_leader(address: tuple[str, int], size: int, secret: bytes, me: Identity, limits: WatchdogLimits) -> Member:
    """Connect to the leader and wait until the group is complete. The caller owns the leader's connection.

    Raises:
        PeerMissing: the leader was not reached before the deadline, or other ranks did not join.
        PeerRefused: this rank, or another one, cannot be in the leader's group.
        GroupError: the leader of another job listens at this address.
    """
    deadline = time.monotonic() + limits.hello_s
    where = _name(address)
    last = "no attempt was made"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _attempt(address, size, secret, me, left)
        except (OSError, FrameError, _Retry) as error:
            last = str(error)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise PeerMissing(
        f"{me} did not reach the leader at {where} within {limits.hello_s:g} s: {last}.",
        remedy="Is the leader running, and may this machine connect to that port?",
    )


def _attempt(address: tuple[str, int], size: int, secret: bytes, me: Identity, left_s: float) -> Member:
    deadline = time.monotonic() + left_s
    connection = Connection(_connect(address, left_s), limit=CANDIDATE_BYTES)
    with contextlib.ExitStack() as on_error:
        on_error.callback(connection.close)
        reader = _MessageReader(connection)
        leader_nonce, nonce = reader.expect(Challenge, deadline).nonce, os.urandom(NONCE_BYTES)
        connection.send(encode(Proof(nonce, prove(secret, "worker", leader_nonce, nonce))), left_s)
        mac = reader.expect(Proof, deadline).mac
        if not _is_valid_mac(mac, secret, "leader", leader_nonce, nonce):
            raise _Retry("what listens there does not know this group's secret")
        connection.accept_large_messages()
        connection.send(encode(Hello(me, PROTOCOL, size)), left_s)
        try:
            leader = reader.expect(Welcome, deadline + OUTCOME_WAIT_S).leader
        except (OSError, FrameError, _Retry) as error:  # this was the group's leader: another attempt is useless
            raise PeerMissing(f"{me} had joined, but the group did not form: {error}.") from error
        on_error.pop_all()
    return Member(leader, connection, tuple(reader.unread))


def _connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    connected = socket.create_connection(address, timeout=timeout_s)
    if connected.getsockname() == connected.getpeername():
        connected.close()  # TCP's simultaneous open: a connection to a free local port may connect to itself
        raise _Retry("nothing listens there")
    return connected


class _MessageReader:
    """Reads messages one at a time. Messages that arrive together with the expected one stay in `unread`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.unread: list[Message] = []

    def expect(self, kind: type[_Expected], deadline: float) -> _Expected:
        while not self.unread:
            if (left := deadline - time.monotonic()) <= 0:
                raise _Retry("what listens there did not answer in time")
            self._connection.wait_readable(left)
            self.unread += self._connection.read()
            if self._connection.ended and not self.unread:
                raise _Retry(f"the leader {self._connection.ended}")
        message = self.unread.pop(0)
        if isinstance(message, Refused):
            raise _ERRORS.get(message.kind, GroupError)(message.message, remedy=message.remedy)
        if not isinstance(message, kind):
            raise _Retry(f"what listens there sent {type(message).__name__} instead of {kind.__name__}")
        return message
