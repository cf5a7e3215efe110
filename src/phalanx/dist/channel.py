"""The control channel of a group: the leader's end and the workers' ends, for their engine threads.

One TCP connection from each worker to the leader carries payloads both ways, in order, and everything by which ranks
notice that another one is lost. An engine thread that waits here waits without computing; it never waits for ever,
because the watchdog of its rank ends the process when the group cannot go on. Does not know what payloads mean.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from phalanx.dist.handshake import Gathering, Member, introduce
from phalanx.dist.peers import Identity, Limits, Payload, PeerFailure, encode
from phalanx.dist.watchdog import Peer, Watchdog, ending
from phalanx.errors import ExitCode, PeerLate, PeerLost

__all__ = ["Identity", "LeaderChannel", "Limits", "OnFailure", "PeerFailure", "WorkerChannel"]

OnFailure = Callable[[PeerFailure], object]
"""Called on the watchdog's thread after the other ranks were told; ends the process."""

DEFAULT_LIMITS = Limits()


class _Channel:
    """What both ends have."""

    def __init__(self, me: Identity, limits: Limits, on_failure: OnFailure | None, *, leads: bool) -> None:
        self._me = me
        self._watchdog = Watchdog(me, limits, on_failure or ending(me), leads=leads)

    @property
    def turns(self) -> int:
        """Turns of the watchdog's loop so far: what an idle rank costs is a few of them a second."""
        return self._watchdog.turns

    def serving(self) -> None:
        """From now on `silence_s` applies instead of `loading_silence_s`.

        To be called when no rank will hold its interpreter's lock for long any more, so after a barrier.
        """
        self._watchdog.serving()

    def enter(self, step: int, limit_s: float) -> None:
        """The engine thread is inside `step`, which should take `limit_s` at most. Steps are numbered upwards."""
        self._watchdog.enter(step, limit_s)

    def leave(self, step: int) -> None:
        """The engine thread is out of `step`."""
        self._watchdog.leave(step)

    def fail(self, code: ExitCode, cause: str) -> NoReturn:
        """This rank cannot go on (a Desync, a failed check): every rank ends with `code`, and all say `cause`.

        For CRASH and PEER_LOST the watchdog waits a moment first: another rank may know better what happened.

        Raises:
            PeerLost: where `on_failure` does not end the process.
        """
        self._watchdog.fail(PeerFailure.of(self._me, code, cause))

    def close(self, reason: str) -> None:
        """Leave in order. From the leader: the group ends; takes a second at most, less when workers close too."""
        self._watchdog.close(reason)


class LeaderChannel(_Channel):
    """The leader's end. First `gather`, then the rest.

    Args:
        listener: a listening TCP socket, IPv4 or IPv6; `gather` closes it.
        on_failure: None is `watchdog.ending`: a line on stderr and `os._exit`.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        secret: bytes,
        me: Identity,
        limits: Limits = DEFAULT_LIMITS,
        on_failure: OnFailure | None = None,
    ) -> None:
        super().__init__(me, limits, on_failure, leads=True)
        self._gathering = Gathering(listener, size, secret, me, limits)

    def gather(self) -> list[Identity]:
        """Wait for all workers, once.

        Returns:
            All ranks of the group in rank order, this one included.

        Raises:
            PeerMissing: ranks did not come by the deadline (names them), or left again.
            PeerRefused: a rank came that cannot be in this group; it gets the same message.
        """
        members = self._gathering.run()
        self._watchdog.start(members)
        return sorted([self._me, *(member.identity for member in members)], key=lambda identity: identity.rank)

    def broadcast(self, payload: bytes) -> None:
        """Send to every worker. Returns when it is on its way; a worker that takes no data ends the group."""
        data = encode(Payload(payload))
        for peer in self._watchdog.peers:
            self._watchdog.send(peer, data)

    def collect(self, timeout_s: float | None) -> list[bytes]:
        """One payload from each worker, in rank order.

        Raises:
            PeerLate: some have not sent theirs within `timeout_s`; names them.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        payloads, late = [], []
        for peer in self._watchdog.peers:
            try:
                payload = _take(peer, None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late.append(str(peer.identity))
            else:
                assert payload is not None, "only a leader ends a group in order"
                payloads.append(payload)
        if late:
            raise PeerLate(f"{', '.join(late)} did not answer within {timeout_s:g} s.")
        return payloads


class WorkerChannel(_Channel):
    """A worker's end. Made by `connect`."""

    def __init__(self, leader: Member, me: Identity, limits: Limits, on_failure: OnFailure | None) -> None:
        super().__init__(me, limits, on_failure, leads=False)
        self.leader = leader.identity
        self._watchdog.start([leader])
        (self._peer,) = self._watchdog.peers

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        size: int,
        secret: bytes,
        me: Identity,
        limits: Limits = DEFAULT_LIMITS,
        on_failure: OnFailure | None = None,
    ) -> WorkerChannel:
        """Join the leader's group; returns when the group is complete.

        Args:
            address: host and port of the leader; tried until `hello_s` have passed.
            on_failure: None is `watchdog.ending`: a line on stderr and `os._exit`.

        Raises:
            PeerMissing: the leader was not reached, or the group did not form; says who was missing.
            PeerRefused: this rank, or another one, cannot be in the group.
            GroupError: another job's leader listens at `address`.
        """
        return cls(introduce(address, size, secret, me, limits), me, limits, on_failure)

    def receive(self) -> bytes | None:
        """The next payload; None when the leader has ended the group in order. Waits without computing."""
        return _take(self._peer, None)

    def send(self, payload: bytes) -> None:
        """Send to the leader. Returns when it is on its way."""
        self._watchdog.send(self._peer, encode(Payload(payload)))


def _take(peer: Peer, timeout_s: float | None) -> bytes | None:
    item = peer.inbox.get(timeout=timeout_s)
    if isinstance(item, bytes):
        return item
    peer.inbox.put(item)  # the end stays the end
    if item is None:
        return None
    raise PeerLost(f"{item}.")
