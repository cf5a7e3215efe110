"""The control channel (`dist/channel.py`) with typed messages instead of bytes: the leader's end and the workers' ends.

While a group starts, `share` gives every rank the values of all ranks, so that all decide the same from the same data.
Later the link carries plans.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from phalanx.dist.channel import LeaderChannel, WorkerChannel
from phalanx.errors import EngineError, EngineUnavailable, ExitCode
from phalanx.sched.plan import DiskOutcome, Order, RankReport
from phalanx.types import LinkStats, RankStats

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class Link(Protocol):
    """The methods that both ends and a single rank have."""

    rank: int
    size: int
    host: str
    """Name of this rank's host, the same in every message."""

    def share(self, value: T) -> list[T]:
        """The values of all ranks, in rank order; every rank calls this at the same point."""

    def links(self) -> list[LinkStats]:
        """This end's figures of its control connections."""

    def serving(self) -> None:
        """End the start: from now on the watchdog ends the group if a rank is silent or stuck."""


class SingleRank:
    """The link of a single rank: sends nothing and watches nothing."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def share(self, value: T) -> list[T]:
        return [value]

    def links(self) -> list[LinkStats]:
        return []

    def serving(self) -> None:
        """Does nothing."""

    def send(self, order: Order) -> None:
        """Does nothing."""

    def enter(self, step: int, limit_s: float) -> None:
        """Does nothing."""

    def leave(self, step: int) -> None:
        """Does nothing."""

    def request_reports(self) -> None:
        """Does nothing."""

    def take_reports(self, *, wait: bool) -> list[RankStats] | None:
        return []

    def listen(self, take: Callable[[DiskOutcome], object]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def fail(self, code: ExitCode, reason: str) -> None:
        """Does nothing."""


class LeaderLink:
    """Rank 0's end."""

    rank = 0

    def __init__(self, channel: LeaderChannel, size: int, host: str) -> None:
        self.size = size
        self.host = host
        self._channel = channel
        self._stats = msgspec.msgpack.Decoder(RankStats)

    def share(self, value: T) -> list[T]:
        payloads = [_encode(value), *self._channel.collect(None)]
        self._channel.broadcast(_encode(payloads))
        return _decode_all(payloads, type(value))

    def links(self) -> list[LinkStats]:
        return self._channel.links()

    def serving(self) -> None:
        self._channel.serving()

    def send(self, order: Order) -> None:
        """Send an order to every worker, without waiting for an answer."""
        self._channel.broadcast(_encode(order))

    def enter(self, step: int, limit_s: float) -> None:
        """The engine thread begins a step, which the watchdog expects to end within the limit."""
        self._channel.enter(step, limit_s)

    def leave(self, step: int) -> None:
        """The engine thread has ended a step."""
        self._channel.leave(step)

    def request_reports(self) -> None:
        """Ask every worker for its figures, which it sends when it has executed all plans sent before."""
        self.send(Order(RankReport()))

    def take_reports(self, *, wait: bool) -> list[RankStats] | None:
        """The figures that were asked for, in rank order. None if some are not here and `wait` is false."""
        if not (wait or self._channel.all_answered):
            return None
        return [self._stats.decode(payload) for payload in self._channel.collect(None)]

    def listen(self, take: Callable[[DiskOutcome], object]) -> None:
        """Have what workers `notify` handed over, on a thread."""
        decoder = msgspec.msgpack.Decoder(DiskOutcome)
        self._channel.listen(lambda data: take(decoder.decode(data)))

    def close(self) -> None:
        """End the group normally."""
        self._channel.close("the group ends")

    def fail(self, code: ExitCode, reason: str) -> None:
        """Tell the other ranks why this one ends."""
        self._channel.fail(code, reason)


class WorkerLink:
    """A worker's end."""

    def __init__(self, channel: WorkerChannel, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self._channel = channel
        self._orders = msgspec.msgpack.Decoder(Order)
        self._lists = msgspec.msgpack.Decoder(list[bytes])

    def share(self, value: T) -> list[T]:
        self._channel.send(_encode(value))
        payload = self._channel.receive()
        if payload is None:
            raise EngineUnavailable("The leader ended the group while it was starting.")
        return _decode_all(self._lists.decode(payload), type(value))

    def links(self) -> list[LinkStats]:
        return self._channel.links()

    def serving(self) -> None:
        self._channel.serving()

    def receive(self) -> Order | None:
        """The next order; None when the leader ended the group. Blocks until there is one.

        Raises:
            EngineError: the leader speaks another protocol.
        """
        payload = self._channel.receive()
        if payload is None:
            return None
        try:
            return self._orders.decode(payload)
        except msgspec.MsgspecError as error:
            raise EngineError(f"Unreadable order from the leader: {error}.") from error

    def enter(self, step: int, limit_s: float) -> None:
        """The engine thread begins a step, which the watchdog expects to end within the limit."""
        self._channel.enter(step, limit_s)

    def leave(self, step: int) -> None:
        """The engine thread has ended a step."""
        self._channel.leave(step)

    def answer(self, stats: RankStats) -> None:
        """Answer a `RankReport`."""
        self._channel.send(_encode(stats))

    def notify(self, outcome: DiskOutcome) -> None:
        """Tell the leader unasked; any thread may call this."""
        self._channel.notify(_encode(outcome))

    def close(self) -> None:
        """Leave the group normally."""
        self._channel.close("the group ends")

    def fail(self, code: ExitCode, reason: str) -> None:
        """Tell the leader why this rank ends."""
        self._channel.fail(code, reason)


def _decode_all(payloads: Sequence[bytes], kind: type[T]) -> list[T]:
    decoder = msgspec.msgpack.Decoder(kind)
    return [decoder.decode(payload) for payload in payloads]
