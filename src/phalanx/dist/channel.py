"""The control channel of a group: the leader's end and the workers' ends.

Each worker has one connection to the leader. It carries payloads both ways, in order, and the heartbeats by which ranks
detect the loss of another rank. Engine threads call these methods and may block in them; the rank's watchdog ends the
process if the group cannot continue.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from phalanx.config import GroupConfig
from phalanx.dist.handshake import LeaderHandshake, Member, join_leader
from phalanx.dist.peers import Identity, Notice, Payload, PeerFailure, WatchdogLimits, encode
from phalanx.dist.watchdog import Peer, Watchdog, exit_on_failure
from phalanx.errors import ExitCode, PeerLate, PeerLost
from phalanx.tls.host_credentials import Credentials
from phalanx.types import LinkStats

__all__ = ["Identity", "LeaderChannel", "OnFailure", "PeerFailure", "WatchdogLimits", "WorkerChannel"]

OnFailure = Callable[[PeerFailure], object]
"""Called on the watchdog's thread after it told the other ranks; ends the process."""

DEFAULT_LIMITS = WatchdogLimits()


class _Channel:
    """The methods of both ends."""

    def __init__(self, me: Identity, limits: WatchdogLimits, on_failure: OnFailure | None, *, leads: bool) -> None:
        self._me = me
        self._watchdog = Watchdog(me, limits, on_failure or exit_on_failure(me), leads=leads)

    @property
    def wakeups(self) -> int:
        """Rounds of the watchdog's loop, the only thing that an idle rank runs: a few per second."""
        return self._watchdog.wakeups

    def links(self) -> list[LinkStats]:
        """This end's figures of the connections to its peers."""
        return [
            peer.connection.with_figures(LinkStats(peer=peer.identity.rank, carries="plans"))
            for peer in self._watchdog.peers
        ]

    def serving(self) -> None:
        """Apply `silence_s` from now on instead of `loading_silence_s`.

        Call it after a barrier. From then on no rank may hold the GIL for long.
        """
        self._watchdog.serving()

    def enter(self, step: int, limit_s: float) -> None:
        """Record that the engine thread entered `step`, which may take `limit_s` seconds. Step numbers increase."""
        self._watchdog.enter(step, limit_s)

    def leave(self, step: int) -> None:
        """Record that the engine thread left `step`."""
        self._watchdog.leave(step)

    def fail(self, code: ExitCode, cause: str) -> NoReturn:
        """End the group because this rank cannot continue: every rank exits with `code` and reports `cause`.

        For CRASH and PEER_LOST the watchdog waits a moment first: another rank may know the cause.

        Raises:
            PeerLost: if `on_failure` does not end the process.
        """
        self._watchdog.fail(PeerFailure.of(self._me, code, cause))

    def close(self, reason: str) -> None:
        """Leave the group normally; if the leader leaves, the group ends. Takes at most `CLOSE_S`."""
        self._watchdog.close(reason)


class LeaderChannel(_Channel):
    """The leader's end. `gather` must be called before any other method.

    Args:
        listener: of `control_address.listen`; `gather` closes it.
        credentials: of this rank; None where the listener is a Unix socket.
        on_failure: `watchdog.exit_on_failure` if None: a line on stderr and `os._exit`.
    """

    def __init__(
        self,
        listener: socket.socket,
        group: GroupConfig,
        credentials: Credentials | None,
        me: Identity,
        limits: WatchdogLimits = DEFAULT_LIMITS,
        on_failure: OnFailure | None = None,
    ) -> None:
        super().__init__(me, limits, on_failure, leads=True)
        self._handshake = LeaderHandshake(listener, group, credentials, me, limits)

    def gather(self) -> list[Identity]:
        """Wait until all workers have joined. Call it once.

        Returns:
            All ranks of the group in rank order, including this one.

        Raises:
            PeerMissing: ranks did not join before the deadline, or disconnected; names them.
            PeerRefused: a connected rank cannot be in this group; it gets the same message.
        """
        members = self._handshake.run()
        self._watchdog.start(members)
        return sorted([self._me, *(member.identity for member in members)], key=lambda identity: identity.rank)

    def broadcast(self, payload: bytes) -> None:
        """Send to every worker. Returns once the kernel has the data; a worker that reads nothing ends the group."""
        data = encode(Payload(payload))
        for peer in self._watchdog.peers:
            self._watchdog.send(peer, data)

    @property
    def all_answered(self) -> bool:
        """Whether `collect` would not wait: every worker's payload is here, or the group has failed."""
        return not any(peer.inbox.empty() for peer in self._watchdog.peers)

    def listen(self, on_notice: Callable[[bytes], object]) -> None:
        """Have what workers `notify` handed over, on the watchdog's thread."""
        self._watchdog.on_notice = on_notice

    def collect(self, timeout_s: float | None) -> list[bytes]:
        """One payload from each worker, in rank order.

        Raises:
            PeerLate: some workers did not send theirs within `timeout_s` seconds; names them.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        payloads, late = [], []
        for peer in self._watchdog.peers:
            try:
                payload = _take(peer, None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late.append(str(peer.identity))
            else:
                assert payload is not None, "only the leader ends a group normally"
                payloads.append(payload)
        if late:
            raise PeerLate(f"{', '.join(late)} did not answer within {timeout_s:g} s.")
        return payloads


class WorkerChannel(_Channel):
    """A worker's end. `connect` makes it."""

    def __init__(self, leader: Member, me: Identity, limits: WatchdogLimits, on_failure: OnFailure | None) -> None:
        super().__init__(me, limits, on_failure, leads=False)
        self.leader = leader.identity
        self._watchdog.start([leader])
        (self._peer,) = self._watchdog.peers

    @classmethod
    def connect(
        cls,
        group: GroupConfig,
        credentials: Credentials | None,
        me: Identity,
        limits: WatchdogLimits = DEFAULT_LIMITS,
        on_failure: OnFailure | None = None,
    ) -> WorkerChannel:
        """Join the leader's group. Returns once the group is complete.

        Args:
            group: says where the leader listens; this rank tries to connect until `hello_s` have passed.
            credentials: of this rank; None where the leader listens on a Unix socket.
            on_failure: `watchdog.exit_on_failure` if None: a line on stderr and `os._exit`.

        Raises:
            PeerMissing: the leader was not reached, or the group did not form; names the missing ranks.
            PeerRefused: this rank, or another one, cannot be in the group.
            GroupError: the leader belongs to another start, or does not accept this rank's certificate.
        """
        return cls(join_leader(group, credentials, me, limits), me, limits, on_failure)

    def receive(self) -> bytes | None:
        """The next payload; None once the leader has ended the group normally. Blocks."""
        return _take(self._peer, None)

    def send(self, payload: bytes) -> None:
        """Send to the leader. Returns once the kernel has the data."""
        self._watchdog.send(self._peer, encode(Payload(payload)))

    def notify(self, payload: bytes) -> None:
        """Send to the leader unasked; any thread may call this."""
        self._watchdog.send(self._peer, encode(Notice(payload)))


def _take(peer: Peer, timeout_s: float | None) -> bytes | None:
    item = peer.inbox.get(timeout=timeout_s)
    if isinstance(item, bytes):
        return item
    peer.inbox.put(item)  # the next call gets it as well
    if item is None:
        return None
    raise PeerLost(f"{item}.")
