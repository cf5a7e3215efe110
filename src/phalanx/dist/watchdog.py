"""The watchdog of a rank: a thread that reads the control connections, sends heartbeats, and ends the process if the
group cannot continue.

It does not depend on the engine thread, which may block in a collective for ever: the two threads share only queues and
attributes that one of them assigns. The first sign of a failure is often a symptom (a connection ends, a collective
raises), and its cause arrives a moment later (in the Goodbye of the failing rank), so the watchdog waits that moment
before it acts on a symptom. The leader decides for the group; workers watch the leader, and decide a little later
themselves if the leader does not.
"""

from __future__ import annotations

import os
import queue
import select
import selectors
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from phalanx.dist.awake_clock import AwakeClock, boot_time
from phalanx.dist.handshake import Member
from phalanx.dist.peers import (
    Goodbye,
    Heartbeat,
    Identity,
    Message,
    Notice,
    Payload,
    PeerFailure,
    WatchdogLimits,
    encode,
)
from phalanx.dist.stall import StepPosition, stalled
from phalanx.errors import ExitCode, FrameError, PeerLost

SYMPTOMS = {ExitCode.CRASH: 0, ExitCode.PEER_LOST: 1}
"""Exit codes that name a symptom, with their weights. A failure replaces one of a lower weight."""
CAUSE = 2  # weight of all other codes
FINAL = 3  # weight, for a worker, of the leader's decision

LEADER_PATIENCE_S = 0.1  # between a symptom and the decision
WORKER_PATIENCE_S = 0.3  # longer, so that the leader's decision arrives first
GOODBYE_LOCK_S = 0.05  # longest wait for a connection on which the engine thread is sending
STDERR_S = 0.5  # longest wait for stderr to accept a line
MAX_UNREAD = 16  # payloads of a worker, which sends one when the leader asks: more would fill the leader's memory
CLOSE_S = 1.0  # longest wait for the other ranks to read the Goodbye and close
REPORT_S = 5.0  # longest wait of the engine thread for the watchdog to end the process; it needs a fraction


class Peer:
    """Another rank of the group: its connection, its last heartbeat, its unread payloads."""

    def __init__(self, member: Member, now: float) -> None:
        self.identity = member.identity
        self.connection = member.connection
        self.early = member.early
        self.last_heard = now
        self.heartbeat = Heartbeat()
        self.inbox: queue.SimpleQueue[bytes | PeerFailure | None] = queue.SimpleQueue()
        """Payloads; at the end None if the group ended normally, else its failure."""


def write_stderr(line: str) -> None:
    """Write a line to stderr without buffers and locks. Gives up after `STDERR_S` if stderr is a full pipe."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(STDERR_S * 1000):
        os.write(2, line.encode()[: select.PIPE_BUF - 1] + b"\n")


def exit_on_failure(me: Identity) -> Callable[[PeerFailure], NoReturn]:
    """The default `on_failure`: writes one line to stderr and exits at once."""

    def end(failure: PeerFailure) -> NoReturn:
        write_stderr(f"{me} ends with status {int(failure.code)} ({failure.code.name}): {failure}")
        os._exit(failure.code)

    return end


class Watchdog:
    """One thread for a rank's control connections. The engine thread calls the public methods.

    Args:
        leads: this rank is the leader.
        on_failure: ends the process, as `exit_on_failure` does. If it returns (in tests), the engine thread's calls
            raise `PeerLost`.
    """

    def __init__(
        self,
        me: Identity,
        limits: WatchdogLimits,
        on_failure: Callable[[PeerFailure], object],
        *,
        leads: bool,
    ) -> None:
        self.wakeups = 0
        """Rounds of the loop; a few per second in an idle group."""
        self.on_notice: Callable[[bytes], object] | None = None
        """Called on the watchdog's thread with each `Notice` of a worker."""
        self._me = me
        self._limits = limits
        self._on_failure = on_failure
        self._leads = leads
        self._clock = AwakeClock(limits.heartbeat_s)
        self.peers: tuple[Peer, ...] = ()
        self._patience_s = LEADER_PATIENCE_S if leads else WORKER_PATIENCE_S
        self._grace_s = 0.0 if leads else limits.stall_grace_s
        # Assigned by the engine thread:
        self._position = StepPosition()
        self._serving_since: float | None = None
        self._reported_failure: PeerFailure | None = None
        self._closing = False  # also assigned by the watchdog thread
        # Used only by the watchdog thread:
        self._now = self._clock.now()
        self._heartbeat_due = self._now
        self._close_at = float("inf")
        self._suspected: PeerFailure | None = None
        self._weight = 0  # of the suspected failure
        self._decide_at = 0.0
        self._heartbeat_sent = boot_time()  # this clock also runs while the process is stopped
        self._own_silence_s = 0.0  # the last long silence of this rank
        self._own_silence_until = 0.0  # time (of the AwakeClock) until which that silence explains others' failures
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    # -- for the engine thread -------------------------------------------------------------------------------------

    def start(self, members: Iterable[Member]) -> None:
        """Start the thread. `members` are all other ranks for the leader, only the leader for a worker."""
        self._clock.tick()
        self._heartbeat_sent = boot_time()
        self.peers = tuple(Peer(member, self._clock.now()) for member in members)
        self._thread.start()

    def serving(self) -> None:
        """Apply `silence_s` from now on: see `channel._Channel.serving`."""
        self._serving_since = self._clock.now()

    def enter(self, step: int, limit_s: float) -> None:
        """Record that the engine thread entered `step`, which may take `limit_s` seconds."""
        self._position = StepPosition(step, self._clock.now(), limit_s)

    def leave(self, step: int) -> None:
        """Record that the engine thread left `step`."""
        self._position = StepPosition(step)

    @property
    def silence_s(self) -> float:
        """Seconds without a byte after which a peer counts as lost: more during the start."""
        return self._limits.loading_silence_s if self._serving_since is None else self._limits.silence_s

    def fail(self, failure: PeerFailure) -> NoReturn:
        """End the group because the engine thread cannot continue: tell every rank, then end the process.

        Raises:
            PeerLost: if `on_failure` does not end the process.
        """
        self._reported_failure = failure
        if not self._ended.wait(REPORT_S):
            self._on_failure(failure)
        raise PeerLost(f"{failure}.")

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a frame. If the peer does not read it within `silence_s`, the group ends."""
        try:
            peer.connection.send(data, self.silence_s)
        except TimeoutError as error:
            self.fail(PeerFailure.of(peer.identity, ExitCode.PEER_SILENT, f"takes no data: {error}"))
        except OSError as error:
            self.fail(
                PeerFailure.of(peer.identity, ExitCode.PEER_LOST, f"cannot be sent to: {error.strerror or error}")
            )

    def close(self, reason: str) -> None:
        """Leave normally: send a Goodbye, wait up to `CLOSE_S` for the other ranks to close, then close."""
        self._closing = True
        goodbye = encode(Goodbye(reason))
        for peer in self.peers:
            peer.connection.offer(goodbye, wait_s=CLOSE_S)
            peer.connection.finish()
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_S)
        if not self._thread.is_alive():
            for peer in self.peers:
                peer.connection.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure = None
        try:
            failure = self._watch()
            if failure is None:
                self._ended.set()
            else:
                self._end_group(failure)
        finally:
            if not self._ended.is_set():  # an error in the watchdog or in `on_failure` must end the process too
                traceback.print_exc()
                exit_on_failure(self._me)(
                    failure or PeerFailure.of(self._me, ExitCode.CRASH, "lost its watchdog by an error")
                )

    def _watch(self) -> PeerFailure | None:
        """The loop. Returns the failure that ends the group; None if it ended normally."""
        with selectors.DefaultSelector() as selector:
            for peer in self.peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
                for message in peer.early:
                    self._handle(peer, message)
            while not self._is_closed():
                events = selector.select(self._select_timeout_s())
                self.wakeups += 1
                stopped_s = self._clock.tick()
                self._now = self._clock.now()
                for key, _ in events:
                    self._read(key.data)
                    if key.data.connection.ended:
                        selector.unregister(key.data.connection)
                if self._now >= self._heartbeat_due:
                    self._send_heartbeats()
                if self._reported_failure is not None:
                    self._suspect(self._reported_failure)
                if not stopped_s:  # after a stop, first read what arrived meanwhile
                    self._check()
                if self._suspected is not None and self._now >= self._decide_at:
                    return self._suspected
        return None

    def _select_timeout_s(self) -> float:
        due = self._heartbeat_due if self._suspected is None else min(self._heartbeat_due, self._decide_at)
        return min(max(0.0, due - self._clock.now()), self._limits.heartbeat_s / 2)

    def _is_closed(self) -> bool:
        """Whether the group ended normally, and all other ranks have closed or `CLOSE_S` has passed."""
        if not self._closing:
            return False
        self._close_at = min(self._close_at, self._now + CLOSE_S)
        return self._now >= self._close_at or not any(self._open_peers())

    def _open_peers(self) -> Iterator[Peer]:
        return (peer for peer in self.peers if not peer.connection.ended)

    def _read(self, peer: Peer) -> None:
        try:
            messages = peer.connection.read()
        except FrameError as error:
            peer.connection.ended = f"broke the protocol: {error}"
            messages = []
        peer.last_heard = self._now
        for message in messages:
            self._handle(peer, message)
        if peer.connection.ended:
            self._suspect(PeerFailure.of(peer.identity, ExitCode.PEER_LOST, peer.connection.ended))

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case Payload() if self._leads and peer.inbox.qsize() >= MAX_UNREAD:
                self._suspect(PeerFailure.of(peer.identity, ExitCode.PEER_LOST, "sends more than it was asked for"))
            case Payload():
                peer.inbox.put(message.data)
            case Notice() if self.on_notice is not None:
                self.on_notice(message.data)
            case Heartbeat():
                peer.heartbeat = message
            case Goodbye(failure=PeerFailure() as failure):
                self._suspect(failure, final=not self._leads)
            case Goodbye() if self._leads:  # a worker must not leave by itself
                self._suspect(PeerFailure.of(peer.identity, ExitCode.PEER_LOST, f"left: {message.reason}"))
            case Goodbye():
                self._closing = True
                peer.inbox.put(None)
                peer.connection.finish()
            case _:
                self._suspect(
                    PeerFailure.of(peer.identity, ExitCode.PEER_LOST, f"sent {type(message).__name__} out of turn")
                )

    def _send_heartbeats(self) -> None:
        self._note_own_silence()
        self._heartbeat_sent = boot_time()
        position = self._position
        heartbeat = encode(Heartbeat(position.step, position.since is not None, position.inside_s(self._now)))
        for peer in self._open_peers():
            peer.connection.offer(heartbeat)  # skipped while the engine thread sends: its data shows life too
        self._heartbeat_due = self._now + self._limits.heartbeat_s

    def _note_own_silence(self) -> None:
        """Record a silence of this rank so long that the other ranks may count it as lost.

        Other ranks may serve before this one, so the limit is `silence_s` even before `serving`. They measure from the
        arrival of the last heartbeat, so it is 0.75 of that.
        """
        silent_s = boot_time() - self._heartbeat_sent
        if silent_s > 0.75 * self._limits.silence_s:
            self._own_silence_s, self._own_silence_until = silent_s, self._clock.now() + 2 * self._limits.silence_s

    def _check(self) -> None:
        """Suspect silent peers and a stalled step."""
        for peer in self._open_peers():
            silent_s = self._now - max(peer.last_heard, self._serving_since or 0.0)
            if silent_s > self.silence_s:
                cause = f"has given no sign of life for {silent_s:.1f} s"
                self._suspect(PeerFailure.of(peer.identity, ExitCode.PEER_SILENT, cause))
        beats = [(peer.identity, peer.heartbeat) for peer in self.peers]
        if failure := stalled(self._me, self._position, beats, self._now, grace_s=self._grace_s):
            self._suspect(failure)

    def _suspect(self, failure: PeerFailure, *, final: bool = False) -> None:
        """Record a failure if it has a higher weight than the one recorded so far.

        The loss of a rank's connection never replaces that rank's own report.

        Args:
            final: it is the leader's decision.
        """
        weight = FINAL if final else SYMPTOMS.get(failure.code, CAUSE)
        previous = self._suspected
        if failure.code == ExitCode.PEER_LOST and previous is not None and previous.rank == failure.rank and not final:
            return
        if self._closing or (previous is not None and weight <= self._weight):
            return
        if previous is None:
            self._decide_at = self._now + self._patience_s
        if weight >= CAUSE:
            self._decide_at = self._now
        self._suspected, self._weight = failure, weight

    def _end_group(self, failure: PeerFailure) -> None:
        """Tell the other ranks, then end the process."""
        failure = self._blame_own_silence(failure)
        goodbye = encode(Goodbye(str(failure), failure))
        for peer in self._open_peers():
            peer.connection.offer(goodbye, wait_s=GOODBYE_LOCK_S)
        self._on_failure(failure)
        self._ended.set()
        for peer in self.peers:
            peer.inbox.put(failure)

    def _blame_own_silence(self, failure: PeerFailure) -> PeerFailure:
        """Blame this rank if it was suspended: then the other ranks left or seem silent because of that."""
        self._note_own_silence()  # it may have been suspended since the last heartbeat
        was_silent = self._own_silence_s > 0.75 * self.silence_s
        explains = was_silent and failure.code in (ExitCode.PEER_LOST, ExitCode.PEER_SILENT)
        if self._clock.now() > self._own_silence_until or not (explains or failure.rank == self._me.rank):
            return failure
        cause = (
            f"was suspended for {self._own_silence_s:.1f} s (stopped, asleep, or its interpreter held); then: {failure}"
        )
        return PeerFailure.of(self._me, ExitCode.PEER_SILENT, cause)
