"""The watchdog of a rank: a thread that reads the control connections, shows life, and ends the process when the group
cannot go on.

It does not need the engine thread, which may be blocked in a collective for ever: the two share only single assignments
and queues. A failure has symptoms first (a connection ends, a collective raises) and often a better explanation right
behind (the Goodbye of the rank that knows), so a symptom is judged only after a moment. The leader judges for all;
workers judge the leader, and a little later what the leader should have judged. Does not know payloads, nor what a step
computes.
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

from phalanx.dist.awake_clock import AwakeClock, with_sleep
from phalanx.dist.handshake import Member
from phalanx.dist.peers import Goodbye, Heartbeat, Identity, Limits, Message, Payload, PeerFailure, encode
from phalanx.dist.stall import Position, stalled
from phalanx.errors import ExitCode, FrameError, PeerLost

SYMPTOMS = {ExitCode.CRASH: 0, ExitCode.PEER_LOST: 1}
"""Codes that say what was seen and not why, and how much they tell; what tells more takes their place for a moment."""
CAUSE = 2  # what other codes tell
FINAL = 3  # what the leader says, to a worker

LEADER_PATIENCE_S = 0.1
WORKER_PATIENCE_S = 0.3  # more, so that the leader's verdict is there first
GOODBYE_LOCK_S = 0.05  # for a connection on which the engine thread is sending
LAST_WORDS_S = 0.5  # for stderr to take a line
CLOSE_S = 1.0  # for the others to take the last words and leave
REPORT_S = 5.0  # that the engine thread leaves the watchdog to judge; it needs a fraction


class Peer:
    """Another rank, as the watchdog sees it."""

    def __init__(self, member: Member, now: float) -> None:
        self.identity = member.identity
        self.connection = member.connection
        self.early = member.early
        self.heard = now
        self.beat = Heartbeat()
        self.inbox: queue.SimpleQueue[bytes | PeerFailure | None] = queue.SimpleQueue()
        """Payloads; None after an orderly goodbye; the failure after any other end."""


def last_words(line: str) -> None:
    """A line on stderr past all buffers and locks. A pipe that nobody empties does not keep the process alive."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(LAST_WORDS_S * 1000):
        os.write(2, line.encode()[: select.PIPE_BUF - 1] + b"\n")


def ending(me: Identity) -> Callable[[PeerFailure], NoReturn]:
    """The usual end: one line on stderr, then the process is gone, whatever its other threads are doing."""

    def end(failure: PeerFailure) -> NoReturn:
        last_words(f"{me} ends with status {int(failure.code)} ({failure.code.name}): {failure}")
        os._exit(failure.code)

    return end


class Watchdog:
    """One thread over a rank's control connections. Methods are for the engine thread.

    Args:
        leads: this rank judges for all.
        on_failure: ends the process, as `ending` does. Where it returns instead (tests), calls of the engine thread
            raise `PeerLost`.
    """

    def __init__(
        self,
        me: Identity,
        limits: Limits,
        on_failure: Callable[[PeerFailure], object],
        *,
        leads: bool,
    ) -> None:
        self.turns = 0
        """Of the loop, so far; an idle group takes a few a second."""
        self._me = me
        self._limits = limits
        self._on_failure = on_failure
        self._leads = leads
        self._clock = AwakeClock(limits.beat_s)
        self.peers: tuple[Peer, ...] = ()
        self._patience_s = LEADER_PATIENCE_S if leads else WORKER_PATIENCE_S
        self._grace_s = 0.0 if leads else limits.stall_grace_s
        # Written by the engine thread, by single assignments.
        self._position = Position()
        self._serving_since: float | None = None
        self._reported: PeerFailure | None = None
        self._closing = False  # the watchdog thread sets it as well
        # The watchdog thread's own.
        self._now = self._clock.now()
        self._beat_at = self._now
        self._leave_at = float("inf")
        self._suspect: PeerFailure | None = None
        self._weight = 0  # of the suspicion
        self._verdict_at = 0.0
        self._beaten = with_sleep()  # when the last beat was sent, in seconds that include sleep
        self._silent_s = 0.0
        self._silent_until = 0.0  # awake seconds up to which that explains what is found
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    # -- for the engine thread -------------------------------------------------------------------------------------

    def start(self, members: Iterable[Member]) -> None:
        """Watch over the connections to `members`: all other ranks for the leader, the leader for a worker."""
        self._clock.turn()
        self._beaten = with_sleep()
        self.peers = tuple(Peer(member, self._clock.now()) for member in members)
        self._thread.start()

    def serving(self) -> None:
        """From now on `silence_s` applies. To be called when no rank will hold its interpreter's lock for long."""
        self._serving_since = self._clock.now()

    def enter(self, step: int, limit_s: float) -> None:
        """The engine thread is in `step`, which should take `limit_s` at most."""
        self._position = Position(step, self._clock.now(), limit_s)

    def leave(self, step: int) -> None:
        """The engine thread is out of `step`."""
        self._position = Position(step)

    @property
    def silence_s(self) -> float:
        """Seconds without a byte from a peer after which it is lost, now."""
        return self._limits.loading_silence_s if self._serving_since is None else self._limits.silence_s

    def fail(self, failure: PeerFailure) -> NoReturn:
        """The engine thread cannot go on: every rank is told, and the process ends.

        Raises:
            PeerLost: where `on_failure` does not end the process.
        """
        self._reported = failure
        if not self._over.wait(REPORT_S):
            self._on_failure(failure)
        raise PeerLost(f"{failure}.")

    def send(self, peer: Peer, data: bytes) -> None:
        """Send a frame; a peer that does not take it is a failure."""
        try:
            peer.connection.send(data, self.silence_s)
        except TimeoutError as error:
            self.fail(PeerFailure.of(peer.identity, ExitCode.PEER_SILENT, f"takes no data: {error}"))
        except OSError as error:
            self.fail(
                PeerFailure.of(peer.identity, ExitCode.PEER_LOST, f"cannot be sent to: {error.strerror or error}")
            )

    def close(self, reason: str) -> None:
        """Leave in order: last words to all, at most `CLOSE_S` for them to leave as well, then close."""
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
                self._over.set()
            else:
                self._end(failure)
        finally:
            if not self._over.is_set():  # an error of ours, or of `on_failure`: nobody watches any more
                traceback.print_exc()
                ending(self._me)(failure or PeerFailure.of(self._me, ExitCode.CRASH, "lost its watchdog by an error"))

    def _watch(self) -> PeerFailure | None:
        """Turn until there is a verdict; None when the group has ended in order."""
        with selectors.DefaultSelector() as selector:
            for peer in self.peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
                for message in peer.early:
                    self._handle(peer, message)
            while not self._left():
                events = selector.select(self._select_timeout_s())
                self.turns += 1
                slept_s = self._clock.turn()
                self._now = self._clock.now()
                for key, _ in events:
                    self._read(key.data)
                    if key.data.connection.ended:
                        selector.unregister(key.data.connection)
                if self._now >= self._beat_at:
                    self._beat()
                if self._reported is not None:
                    self._accuse(self._reported)
                if not slept_s:  # else first read all that came meanwhile
                    self._judge()
                if self._suspect is not None and self._now >= self._verdict_at:
                    return self._suspect
        return None

    def _select_timeout_s(self) -> float:
        due = self._beat_at if self._suspect is None else min(self._beat_at, self._verdict_at)
        return min(max(0.0, due - self._clock.now()), self._limits.beat_s / 2)

    def _left(self) -> bool:
        """The group ends in order, and the others have closed their ends or had the time to."""
        if not self._closing:
            return False
        self._leave_at = min(self._leave_at, self._now + CLOSE_S)
        return self._now >= self._leave_at or not any(self._open())

    def _open(self) -> Iterator[Peer]:
        return (peer for peer in self.peers if not peer.connection.ended)

    def _read(self, peer: Peer) -> None:
        try:
            messages = peer.connection.read()
        except FrameError as error:
            peer.connection.ended = f"broke the protocol: {error}"
            messages = []
        peer.heard = self._now
        for message in messages:
            self._handle(peer, message)
        if peer.connection.ended:
            self._accuse(PeerFailure.of(peer.identity, ExitCode.PEER_LOST, peer.connection.ended))

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case Payload():
                peer.inbox.put(message.data)
            case Heartbeat():
                peer.beat = message
            case Goodbye(failure=PeerFailure() as failure):
                self._accuse(failure, final=not self._leads)
            case Goodbye() if self._leads:  # nobody asked it to
                self._accuse(PeerFailure.of(peer.identity, ExitCode.PEER_LOST, f"left: {message.reason}"))
            case Goodbye():
                self._closing = True
                peer.inbox.put(None)
                peer.connection.finish()
            case _:
                self._accuse(
                    PeerFailure.of(peer.identity, ExitCode.PEER_LOST, f"sent {type(message).__name__} out of turn")
                )

    def _beat(self) -> None:
        self._admit()
        self._beaten = with_sleep()
        position = self._position
        beat = encode(Heartbeat(position.step, position.since is not None, position.inside_s(self._now)))
        for peer in self._open():
            peer.connection.offer(beat)  # where the engine thread is sending, that is the sign of life
        self._beat_at = self._now + self._limits.beat_s

    def _admit(self) -> None:
        """Take note of it when this rank was silent for so long that the others may have given it up.

        They count from when they took the last beat, and may be serving before this rank knows that all are.
        """
        silent_s = with_sleep() - self._beaten
        if silent_s > 0.75 * self._limits.silence_s:
            self._silent_s, self._silent_until = silent_s, self._clock.now() + 2 * self._limits.silence_s

    def _judge(self) -> None:
        """Who is silent, and is the own engine thread stuck?"""
        for peer in self._open():
            silent_s = self._now - max(peer.heard, self._serving_since or 0.0)
            if silent_s > self.silence_s:
                cause = f"has given no sign of life for {silent_s:.1f} s"
                self._accuse(PeerFailure.of(peer.identity, ExitCode.PEER_SILENT, cause))
        beats = [(peer.identity, peer.beat) for peer in self.peers]
        if failure := stalled(self._me, self._position, beats, self._now, grace_s=self._grace_s):
            self._accuse(failure)

    def _accuse(self, failure: PeerFailure, *, final: bool = False) -> None:
        """Take note of a failure; what tells more replaces what tells less. That a rank is gone tells less than its own
        last words.

        Args:
            final: the leader has judged.
        """
        weight = FINAL if final else SYMPTOMS.get(failure.code, CAUSE)
        known = self._suspect
        if failure.code == ExitCode.PEER_LOST and known is not None and known.rank == failure.rank and not final:
            return
        if self._closing or (known is not None and weight <= self._weight):
            return
        if known is None:
            self._verdict_at = self._now + self._patience_s
        if weight >= CAUSE:
            self._verdict_at = self._now
        self._suspect, self._weight = failure, weight

    def _end(self, failure: PeerFailure) -> None:
        """Tell the others, then end the process."""
        failure = self._own_up(failure)
        goodbye = encode(Goodbye(str(failure), failure))
        for peer in self._open():
            peer.connection.offer(goodbye, wait_s=GOODBYE_LOCK_S)
        self._on_failure(failure)
        self._over.set()
        for peer in self.peers:
            peer.inbox.put(failure)

    def _own_up(self, failure: PeerFailure) -> PeerFailure:
        """A rank that was suspended is why the others left, or seem silent."""
        self._admit()  # it may have been suspended in this very turn
        gone = failure.code in (ExitCode.PEER_LOST, ExitCode.PEER_SILENT) and self._silent_s > 0.75 * self.silence_s
        if self._clock.now() > self._silent_until or not (gone or failure.rank == self._me.rank):
            return failure
        cause = f"was suspended for {self._silent_s:.1f} s (stopped, asleep, or its interpreter held); then: {failure}"
        return PeerFailure.of(self._me, ExitCode.PEER_SILENT, cause)
