"""Replicas in the policy's order, kept while they change: a decision among a thousand costs about as much as one among
ten.

Replicas that serve the same models are a pool. Its heap has those with room, in that order; what a change has made
wrong stays in the heap until it comes to the top. A replica whose circuit is not closed may get requests depending on
the time: those are looked at one by one.

`note` must be called after each change of a replica. Does not know policies, nor requests that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from phalanx.gateway.dispatch_request import DispatchRequest
from phalanx.gateway.policies import Listed, Order, RandomBelow, two_below
from phalanx.gateway.replica import Replica, is_served

SPARE = 64  # entries that a heap may have beside twice as many as it has replicas with room

_Entry = tuple[bool, float, int, int, Replica]
"""The policy's order, number of the replica, replica. No two replicas have one number, so that replicas themselves are
not compared."""


class ReplicaIndex:
    """See the module's docstring."""

    def __init__(self, order: Callable[[Replica], Order]) -> None:
        self._order = order
        self._numbers: dict[Replica, int] = {}  # in the order in which they came
        self._by_name: dict[str, Replica] = {}
        self._came = 0
        self._pools: dict[frozenset[str] | None, _Pool] = {}
        self._pool_of: dict[Replica, _Pool] = {}

    def add(self, replica: Replica) -> None:
        """One more replica. Changes state."""
        self._came += 1
        self._numbers[replica] = self._came
        self._by_name[replica.name] = replica
        self.note(replica)

    def drop(self, replica: Replica) -> None:
        """One replica less. Changes state."""
        del self._numbers[replica], self._by_name[replica.name]
        self._leave_pool(replica)

    def note(self, replica: Replica) -> None:
        """Something about a replica has changed; one that was dropped is passed over. Changes state."""
        number = self._numbers.get(replica)
        if number is None:
            return
        pool = self._pool_of.get(replica)
        if pool is None or pool.models != replica.models:
            self._leave_pool(replica)
            pool = self._pools.setdefault(replica.models, _Pool(replica.models, self._order))
            self._pool_of[replica] = pool
        pool.note(replica, number)

    def has_able(self, request: DispatchRequest, now: float) -> bool:
        """Whether there is a replica that may get this request, room or not: none that has failed it."""
        return any(pool.has_able(request.tried, now) for pool in self._serving(request))

    def ready(self, request: DispatchRequest, now: float) -> Ready | None:
        """The replicas that can take this request now; None if there is none."""
        pools = list(self._serving(request))
        entries = [entry for pool in pools if (entry := pool.first(request.tried, now)) is not None]
        sound = [pool.sound for pool in pools]
        return Ready(min(entries)[-1], self._by_name, sound, self._order, request, now) if entries else None

    def _leave_pool(self, replica: Replica) -> None:
        if (pool := self._pool_of.pop(replica, None)) is not None:
            pool.drop(replica)
            if not pool:
                del self._pools[pool.models]

    def _serving(self, request: DispatchRequest) -> Iterator[_Pool]:
        return (pool for pool in self._pools.values() if is_served(request.model, pool.models))


class Ready:
    """The `Candidates` of one decision; good until something changes."""

    def __init__(
        self,
        first: Replica,
        replicas: Mapping[str, Replica],
        sound: Sequence[Sequence[Replica]],
        order: Callable[[Replica], Order],
        request: DispatchRequest,
        now: float,
    ) -> None:
        self._first = first
        self._replicas = replicas
        self._sound = sound
        self._order = order
        self._request = request
        self._now = now

    def __iter__(self) -> Iterator[Replica]:
        """All of them, in the order in which they came."""
        return (replica for replica in self._replicas.values() if self._is_one(replica))

    def first(self) -> Replica:
        """See `Candidates`."""
        return self._first

    def named(self, name: str) -> Replica | None:
        """See `Candidates`."""
        replica = self._replicas.get(name)
        return replica if replica is not None and self._is_one(replica) else None

    def two(self, below: RandomBelow) -> tuple[Replica, Replica]:
        """See `Candidates`."""
        n = sum(map(len, self._sound))
        if self._request.tried or not n:  # rare
            return Listed(self, self._order).two(below)
        first, second = two_below(n, below)
        return self._sound_at(first), self._sound_at(second)

    def _sound_at(self, at: int) -> Replica:
        for of_pool in self._sound:
            if at < len(of_pool):
                return of_pool[at]
            at -= len(of_pool)
        raise IndexError(at)

    def _is_one(self, replica: Replica) -> bool:
        request = self._request
        return (
            replica.has_room
            and replica.serves(request.model)
            and replica.is_available(self._now)
            and replica.name not in request.tried
        )


class _Pool:
    """Replicas that serve the same models."""

    def __init__(self, models: frozenset[str] | None, order: Callable[[Replica], Order]) -> None:
        self.models = models
        self.sound: list[Replica] = []  # those of `_right` that are not in doubt, in any order
        self._places: dict[Replica, int] = {}  # in `sound`
        self._order = order
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
            self._set_entry(replica, self._entry(replica, number) if replica.has_room else None)
            return
        self._able.discard(replica.name)
        self._set_entry(replica, None)
        if is_able:
            self._on_trial[replica] = None
        else:
            self._on_trial.pop(replica, None)

    def drop(self, replica: Replica) -> None:
        """A replica leaves the pool."""
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
        """The entry of the first replica, in the policy's order, that can take a request now."""
        entries = [
            self._entry(replica, self._numbers[replica]) for replica in self._trials(tried, now) if replica.has_room
        ]
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
        self._set_sound(replica, entry is not None and not replica.in_doubt)
        if entry is None:
            self._right.pop(replica, None)
        elif self._right.get(replica) != entry:
            self._right[replica] = entry
            heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._right) + SPARE:
            self._heap = list(self._right.values())
            heapq.heapify(self._heap)

    def _set_sound(self, replica: Replica, is_sound: bool) -> None:
        if is_sound == (replica in self._places):
            return
        if is_sound:
            self._places[replica] = len(self.sound)
            self.sound.append(replica)
            return
        at, last = self._places.pop(replica), self.sound.pop()  # the last one fills the gap
        if last is not replica:
            self.sound[at], self._places[last] = last, at

    def _entry(self, replica: Replica, number: int) -> _Entry:
        return *self._order(replica), number, replica
