"""How ranks find each other: a connection proves that it knows the group's secret, then says who it is.

    leader                        worker
    Challenge(nonce)        ->
                            <-    Proof(own nonce, HMAC(secret, "worker", both nonces))
    Proof(HMAC(secret, "leader", both nonces))  ->
                            <-    Hello(identity, protocol, size)
    Welcome | Refused       ->    when all are here, or will not be

Until the proof a connection is a stranger: there may be many at once, each has little time and little memory, and none
delays the others. This authenticates; it does not encrypt. Does not know what the group does once it is complete.
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
    Limits,
    Message,
    Proof,
    Refused,
    Welcome,
    encode,
)
from phalanx.errors import FrameError, GroupError, PeerMissing, PeerRefused

log = logging.getLogger("phalanx.channel")

STRANGERS = 64  # at once; one more drops the oldest, and a rank that was dropped tries again
STRANGER_BYTES = 4096  # per message before a connection is trusted; a Hello takes a few hundred
NONCE_BYTES = 32
RETRY_S = 0.1  # between a worker's attempts to connect
VERDICT_S = 5.0  # that a worker waits longer than the leader for the group, so that the leader says what is wrong

MUST_MATCH = ("version", "mlx", "mlx_lm", "fingerprint")
"""Fields of `Identity` in which ranks may not differ; an empty one is not known yet and passes."""

_Expected = TypeVar("_Expected", Challenge, Proof, Welcome)

_ERRORS = {error.__name__: error for error in (GroupError, PeerMissing, PeerRefused)}


class Member(NamedTuple):
    """A rank that has proved itself."""

    identity: Identity
    connection: Connection
    early: tuple[Message, ...] = ()  # what it sent right after the handshake


def _proves(mac: bytes, secret: bytes, role: str, leader_nonce: bytes, worker_nonce: bytes) -> bool:
    whole = len(leader_nonce) == len(worker_nonce) == NONCE_BYTES
    return whole and hmac.compare_digest(mac, prove(secret, role, leader_nonce, worker_nonce))


def prove(secret: bytes, role: str, leader_nonce: bytes, worker_nonce: bytes) -> bytes:
    """The MAC. Naming the speaker's role keeps one end from being answered with its own words."""
    return hmac.digest(secret, role.encode() + b"\0" + leader_nonce + worker_nonce, hashlib.sha256)


def mismatch(mine: Identity, hello: Hello, size: int, present: Iterable[Identity]) -> str:
    """Why a rank cannot be in the leader's group: names field, rank, host and both values. "" if it can."""
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


class _Guest:
    """A connection that is not a member yet."""

    def __init__(self, accepted: socket.socket, address: str, deadline: float) -> None:
        self.connection = Connection(accepted, limit=STRANGER_BYTES)
        self.address = address
        self.deadline = deadline
        self.nonce = os.urandom(NONCE_BYTES)
        self.proven = False


class Gathering:
    """The leader's start: waits until every other rank of the group has come.

    Owns the listener, which is closed at the end whatever happens: who comes later finds nobody.
    """

    def __init__(self, listener: socket.socket, size: int, secret: bytes, me: Identity, limits: Limits) -> None:
        self._listener = listener
        self._size = size
        self._secret = secret
        self._me = me
        self._limits = limits
        self._guests: list[_Guest] = []  # oldest first
        self._members: dict[int, Member] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Member]:
        """The other ranks, by rank, once all are here. The caller owns their connections.

        Raises:
            PeerMissing: some did not come in time, or left; names them.
            PeerRefused: one came that cannot be in this group; it gets the same message.
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
            for guest in self._guests:
                guest.connection.close()
            self._selector.close()
            self._listener.close()
        return [self._members[rank] for rank in sorted(self._members)]

    def _gather(self) -> None:
        deadline = time.monotonic() + self._limits.hello_s
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while len(self._members) < self._size - 1:
            now = time.monotonic()
            for guest in [guest for guest in self._guests if guest.deadline <= now]:
                self._drop(guest, f"did not prove itself within {self._limits.stranger_s:g} s")
            if now >= deadline:
                raise self._missing()
            next_deadline = min([deadline, *(guest.deadline for guest in self._guests)])
            for key, _ in self._selector.select(next_deadline - now):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, Member):
                    self._watch(key.data)
                elif key.data in self._guests:  # else dropped since the select
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
        except OSError as error:  # gone again, or no more files: neither is the group's end
            log.warning("a connection could not be accepted: %s", error)
            return
        if len(self._guests) >= STRANGERS:
            self._drop(self._guests[0], f"made room: {STRANGERS} connections wait")
        guest = _Guest(accepted, _name(address), time.monotonic() + self._limits.stranger_s)
        self._guests.append(guest)
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)
        guest.connection.offer(encode(Challenge(guest.nonce)))

    def _drop(self, guest: _Guest, why: str) -> None:
        log.warning("the connection from %s was dropped: it %s", guest.address, why)
        self._selector.unregister(guest.connection)
        self._guests.remove(guest)
        guest.connection.close()

    def _watch(self, member: Member) -> None:
        """A member has nothing to say now; it can only be lost."""
        try:
            member.connection.read()
        except FrameError as error:
            raise PeerMissing(f"{member.identity} broke the protocol while the group was forming: {error}") from error
        if member.connection.ended:
            raise PeerMissing(
                f"{member.identity} {member.connection.ended} while the group was forming.",
                remedy="Its own log says why.",
            )

    def _receive(self, guest: _Guest) -> None:
        try:
            messages = guest.connection.read()
        except FrameError as error:
            self._drop(guest, f"is none of ours. {error}")
            return
        for message in messages:
            if not self._answer(guest, message):
                return
        if guest.connection.ended:
            self._drop(guest, guest.connection.ended)

    def _answer(self, guest: _Guest, message: Message) -> bool:
        """Whether the guest is still one."""
        match message:
            case Proof() if not guest.proven:
                return self._examine(guest, message)
            case Hello() if guest.proven:
                self._admit(guest, message)
            case _:
                self._drop(guest, f"sent {type(message).__name__} out of turn")
        return False

    def _examine(self, guest: _Guest, proof: Proof) -> bool:
        if not _proves(proof.mac, self._secret, "worker", guest.nonce, proof.nonce):
            refused = Refused(
                GroupError.__name__,
                f"The leader at this address, {self._me}, is of another job: its secret is not ours.",
                "Another group uses the same port; start this one on another.",
            )
            guest.connection.offer(encode(refused))
            self._drop(guest, "belongs to another job: its secret is not ours")
            return False
        guest.proven = True
        mac = prove(self._secret, "leader", guest.nonce, proof.nonce)
        guest.connection.offer(encode(Proof(b"", mac)))
        return True

    def _admit(self, guest: _Guest, hello: Hello) -> None:
        present = [member.identity for member in self._members.values()]
        if reason := mismatch(self._me, hello, self._size, present):
            error = PeerRefused(reason, remedy="All ranks need the same installation, model and start.")
            guest.connection.offer(encode(Refused(type(error).__name__, error.message, error.remedy)))
            raise error
        member = Member(hello.identity, guest.connection)
        self._guests.remove(guest)
        self._members[hello.identity.rank] = member
        member.connection.trust()
        self._selector.modify(member.connection, selectors.EVENT_READ, member)
        log.info("%s on %s has come from %s", member.identity, member.identity.device, guest.address)


def _name(address: tuple[str, int] | tuple[str, int, int, int] | str) -> str:
    return address if isinstance(address, str) else f"{address[0]} port {address[1]}"


# The worker's side -----------------------------------------------------------------------------------------------


class _NotYet(Exception):
    """What answered is not the leader, or no longer; another attempt may succeed."""


def introduce(address: tuple[str, int], size: int, secret: bytes, me: Identity, limits: Limits) -> Member:
    """The leader, once the whole group is complete. The caller owns the connection.

    Raises:
        PeerMissing: the leader could not be reached by the deadline, or other ranks did not come.
        PeerRefused: this rank, or another one, cannot be in the leader's group.
        GroupError: another job's leader listens there.
    """
    deadline = time.monotonic() + limits.hello_s
    where = _name(address)
    last = "no attempt was made"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _attempt(address, size, secret, me, left)
        except (OSError, FrameError, _NotYet) as error:
            last = str(error)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise PeerMissing(
        f"{me} did not reach the leader at {where} within {limits.hello_s:g} s: {last}.",
        remedy="Is the leader running, and may this machine connect to that port?",
    )


def _attempt(address: tuple[str, int], size: int, secret: bytes, me: Identity, left_s: float) -> Member:
    deadline = time.monotonic() + left_s
    connection = Connection(_connect(address, left_s), limit=STRANGER_BYTES)
    with contextlib.ExitStack() as on_error:
        on_error.callback(connection.close)
        dialogue = _Dialogue(connection)
        leader_nonce, nonce = dialogue.expect(Challenge, deadline).nonce, os.urandom(NONCE_BYTES)
        connection.send(encode(Proof(nonce, prove(secret, "worker", leader_nonce, nonce))), left_s)
        mac = dialogue.expect(Proof, deadline).mac
        if not _proves(mac, secret, "leader", leader_nonce, nonce):
            raise _NotYet("what listens there does not know this group's secret")
        connection.trust()
        connection.send(encode(Hello(me, PROTOCOL, size)), left_s)
        try:
            leader = dialogue.expect(Welcome, deadline + VERDICT_S).leader
        except (OSError, FrameError, _NotYet) as error:  # it was our leader: it will not be another time
            raise PeerMissing(f"{me} had joined, but the group did not form: {error}.") from error
        on_error.pop_all()
    return Member(leader, connection, tuple(dialogue.arrived))


def _connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    connected = socket.create_connection(address, timeout=timeout_s)
    if connected.getsockname() == connected.getpeername():
        connected.close()  # TCP's simultaneous open: a local port that nobody listens on yet may connect to itself
        raise _NotYet("nobody listens there")
    return connected


class _Dialogue:
    """Messages one at a time. What arrives behind the one that was expected stays in `arrived`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.arrived: list[Message] = []

    def expect(self, kind: type[_Expected], deadline: float) -> _Expected:
        while not self.arrived:
            if (left := deadline - time.monotonic()) <= 0:
                raise _NotYet("what listens there did not answer in time")
            self._connection.wait_readable(left)
            self.arrived += self._connection.read()
            if self._connection.ended and not self.arrived:
                raise _NotYet(f"the leader {self._connection.ended}")
        message = self.arrived.pop(0)
        if isinstance(message, Refused):
            raise _ERRORS.get(message.kind, GroupError)(message.message, remedy=message.remedy)
        if not isinstance(message, kind):
            raise _NotYet(f"what listens there sent {type(message).__name__} instead of {kind.__name__}")
        return message
