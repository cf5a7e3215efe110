"""Ranks of one group as the engine sees them: everybody's values at start, plans while serving.

The leader's end and the workers' end of the control channel, with typed messages instead of bytes. While a group
starts, `share` gives every rank the values of all ranks, so that all decide the same from the same data. Does not know
what plans mean, nor how a lost rank is noticed (`dist/channel.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from phalanx.dist.channel import LeaderChannel, WorkerChannel
from phalanx.errors import EngineError, EngineUnavailable, ExitCode
from phalanx.sched.plan import Order, Report
from phalanx.types import RankStats

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class Link(Protocol):
    """Either end."""

    rank: int
    size: int

    def share(self, value: T) -> list[T]:
        """The values of all ranks, in rank order; every rank calls this at the same point."""

    def serving(self) -> None:
        """Start-up is over: silence and standing still are judged strictly from now on."""


class SingleRank:
    """A group of one: nobody to talk to."""

    rank = 0
    size = 1

    def share(self, value: T) -> list[T]:
        return [value]

    def serving(self) -> None:
        """Nothing to watch."""

    def send(self, order: Order) -> None:
        """Nobody to send to."""

    def enter(self, step: int, limit_s: float) -> None:
        """Nobody watches."""

    def leave(self, step: int) -> None:
        """Nobody watches."""

    def report(self, own: RankStats) -> list[RankStats]:
        return [own]

    def close(self) -> None:
        """Nothing is open."""

    def fail(self, code: ExitCode, reason: str) -> None:
        """Nobody to tell."""


class LeaderLink:
    """Rank 0's end."""

    rank = 0

    def __init__(self, channel: LeaderChannel, size: int) -> None:
        self.size = size
        self._channel = channel
        self._stats = msgspec.msgpack.Decoder(RankStats)

    def share(self, value: T) -> list[T]:
        payloads = [_encode(value), *self._channel.collect(None)]
        self._channel.broadcast(_encode(payloads))
        return _decode_all(payloads, type(value))

    def serving(self) -> None:
        self._channel.serving()

    def send(self, order: Order) -> None:
        """Hand an order to every worker; returns when it is on its way."""
        self._channel.broadcast(_encode(order))

    def enter(self, step: int, limit_s: float) -> None:
        """The engine thread begins a step."""
        self._channel.enter(step, limit_s)

    def leave(self, step: int) -> None:
        """The engine thread has ended a step."""
        self._channel.leave(step)

    def report(self, own: RankStats) -> list[RankStats]:
        """Every rank's figures; answered between two steps."""
        self.send(Order(Report()))
        return [own, *(self._stats.decode(payload) for payload in self._channel.collect(None))]

    def close(self) -> None:
        """The group ends in order."""
        self._channel.close("the group ends")

    def fail(self, code: ExitCode, reason: str) -> None:
        """Tell the other ranks why this one goes."""
        self._channel.fail(code, reason)


class WorkerLink:
    """Another rank's end."""

    def __init__(self, channel: WorkerChannel, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._channel = channel
        self._orders = msgspec.msgpack.Decoder(Order)
        self._lists = msgspec.msgpack.Decoder(list[bytes])

    def share(self, value: T) -> list[T]:
        self._channel.send(_encode(value))
        payload = self._channel.receive()
        if payload is None:
            raise EngineUnavailable("The leader ended the group while it was starting.")
        return _decode_all(self._lists.decode(payload), type(value))

    def serving(self) -> None:
        self._channel.serving()

    def receive(self) -> Order | None:
        """The next order; None when the leader ended the group. Blocks without computing.

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
        """The engine thread begins a step."""
        self._channel.enter(step, limit_s)

    def leave(self, step: int) -> None:
        """The engine thread has ended a step."""
        self._channel.leave(step)

    def answer(self, stats: RankStats) -> None:
        """The answer to `Report`."""
        self._channel.send(_encode(stats))

    def close(self) -> None:
        """This rank leaves in order."""
        self._channel.close("the group ends")

    def fail(self, code: ExitCode, reason: str) -> None:
        """Tell the leader why this rank goes."""
        self._channel.fail(code, reason)


def _decode_all(payloads: Sequence[bytes], kind: type[T]) -> list[T]:
    decoder = msgspec.msgpack.Decoder(kind)
    return [decoder.decode(payload) for payload in payloads]
