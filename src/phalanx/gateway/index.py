"""Replicas in the order in which least_load takes them, kept while they change: a decision among a thousand costs about
as much as one among ten. Pure.

Replicas that serve the same models are a pool. Its heap has those with room, the least busy first; what a change has
made wrong stays in the heap until it comes to the top. A replica whose circuit is not closed may get requests depending
on the time: those are looked at one by one.

`note` must be called after each change of a replica. Does not know policies, nor requests that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from phalanx.gateway.asks import Ask
from phalanx.gateway.replica import Replica, is_served

SPARE = 64  # entries that a heap may have beside twice as many as it has replicas with room

_Entry = tuple[bool, float, int, int, Replica]
"""In doubt, load, last grant, number of the replica, replica: sorted as `policies.least_loaded` sorts. No two replicas
have one number, so that replicas themselves are not compared."""


class ReplicaIndex:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._numbers: dict[Replica, int] = {}  # in the order in which they came
        self._came = 0
        self._pools: dict[frozenset[str] | None, _Pool] = {}
        self._pool_of: dict[Replica, _Pool] = {}

    def add(self, replica: Replica) -> None:
        """One more replica. Changes state."""
        self._came += 1
        self._numbers[replica] = self._came
        self.note(replica)

    def drop(self, replica: Replica) -> None:
        """One replica less. Changes state."""
        del self._numbers[replica]
        self._leave_pool(replica)

    def note(self, replica: Replica) -> None:
        """Something about a replica has changed; one that was dropped is passed over. Changes state."""
        number = self._numbers.get(replica)
        if number is None:
            return
        pool = self._pool_of.get(replica)
        if pool is None or pool.models != replica.models:
            self._leave_pool(replica)
            pool = self._pools.setdefault(replica.models, _Pool(replica.models))
            self._pool_of[replica] = pool
        pool.note(replica, number)

    def has_able(self, ask: Ask, now: float) -> bool:
        """Whether there is a replica that may get this request, room or not: none that has failed it."""
        return any(pool.has_able(ask.tried, now) for pool in self._serving(ask))

    def ready(self, ask: Ask, now: float) -> Ready | None:
        """The replicas that can take this request now; None if there is none."""
        entries = [entry for pool in self._serving(ask) if (entry := pool.first(ask.tried, now)) is not None]
        return Ready(min(entries)[-1], self._numbers, ask, now) if entries else None

    def _leave_pool(self, replica: Replica) -> None:
        if (pool := self._pool_of.pop(replica, None)) is not None:
            pool.drop(replica)
            if not pool:
                del self._pools[pool.models]

    def _serving(self, ask: Ask) -> Iterator[_Pool]:
        return (pool for pool in self._pools.values() if is_served(ask.model, pool.models))


class Ready:
    """The candidates of one decision; good until something changes."""

    def __init__(self, least: Replica, replicas: Collection[Replica], ask: Ask, now: float) -> None:
        self._least = least
        self._replicas = replicas
        self._ask = ask
        self._now = now

    def least(self) -> Replica:
        """The least busy one."""
        return self._least

    def __iter__(self) -> Iterator[Replica]:
        """All of them, in the order in which they came."""
        ask, now = self._ask, self._now
        for replica in self._replicas:
            if replica.has_room and replica.serves(ask.model) and replica.is_available(now):
                if replica.name not in ask.tried:
                    yield replica


class _Pool:
    """Replicas that serve the same models."""

    def __init__(self, models: frozenset[str] | None) -> None:
        self.models = models
        self._numbers: dict[Replica, int] = {}
        self._able: set[str] = set()  # may get requests, room or not; their circuit is closed
        self._on_trial: dict[Replica, None] = {}  # may get requests when their circuit lets them
        self._right: dict[Replica, _Entry] = {}  # of those of `_able` with room
        self._heap: list[_Entry] = []  # all of `_right`, and entries that once were

    def __len__(self) -> int:
        return len(self._numbers)

    def note(self, replica: Replica, number: int) -> None:
        """A replica is new here, or has changed."""
        self._numbers[replica] = number
        is_able = replica.health.state == "up" and not replica.is_draining
        if is_able and replica.breaker.is_closed:
            self._able.add(replica.name)
            self._on_trial.pop(replica, None)
            self._set_entry(replica, _entry(replica, number) if replica.has_room else None)
            return
        self._able.discard(replica.name)
        self._set_entry(replica, None)
        if is_able:
            self._on_trial[replica] = None
        else:
            self._on_trial.pop(replica, None)

    def drop(self, replica: Replica) -> None:
        """A replica is no longer here."""
        del self._numbers[replica]
        self._able.discard(replica.name)
        self._on_trial.pop(replica, None)
        self._set_entry(replica, None)

    def has_able(self, tried: Collection[str], now: float) -> bool:
        """See `ReplicaIndex`."""
        if len(self._able) > sum(name in self._able for name in tried):
            return True
        return any(self._trials(tried, now))

    def first(self, tried: Collection[str], now: float) -> _Entry | None:
        """Of the least busy one that can take a request now."""
        entries = [_entry(replica, self._numbers[replica]) for replica in self._trials(tried, now) if replica.has_room]
        if (top := self._top(tried)) is not None:
            entries.append(top)
        return min(entries, default=None)

    def _trials(self, tried: Collection[str], now: float) -> Iterator[Replica]:
        return (one for one in self._on_trial if one.breaker.allows(now) and one.name not in tried)

    def _top(self, tried: Collection[str]) -> _Entry | None:
        """The first entry that is right and of none that was tried."""
        heap, passed = self._heap, []
        while heap:
            entry = heap[0]
            if self._right.get(entry[-1]) is not entry:
                heapq.heappop(heap)
            elif entry[-1].name in tried:
                passed.append(heapq.heappop(heap))
            else:
                break
        found = heap[0] if heap else None
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _set_entry(self, replica: Replica, entry: _Entry | None) -> None:
        if entry is None:
            self._right.pop(replica, None)
        elif self._right.get(replica) != entry:
            self._right[replica] = entry
            heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._right) + SPARE:
            self._heap = list(self._right.values())
            heapq.heapify(self._heap)


def _entry(replica: Replica, number: int) -> _Entry:
    return replica.in_doubt, replica.load, replica.last_granted, number, replica
