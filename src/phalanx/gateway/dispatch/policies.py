"""Policies that choose among the replicas that can take a request.

    least_load           the fewest requests relative to limit and weight; equal ones take turns
    round_robin          in turn, in proportion to weights
    power_of_two         the less busy of two random ones
    cache_aware          where the conversation's prefix is cached, unless that replica is much busier; else least_load
    consistent_hashing   by the session or the prompt's beginning; an added or removed replica moves only its share

Every policy prefers healthy replicas. `affinity.py` reads the requests' bodies.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.replica import Replica

SESSIONS = 50_000  # that cache_aware remembers; a session is a name of a few bytes
BLOCKS = 500_000  # of prompts that it remembers: 128 MB of text at 256 bytes each

K = TypeVar("K")
RandomBelow = Callable[[int], int]
"""A random number from 0 to n - 1."""
Order = tuple[bool, float, int]
"""Degraded, the policy's own number, last grant: the smallest goes first."""


def by_load(replica: Replica) -> Order:
    """The least busy one first; of equal ones, the one granted a request longest ago."""
    return replica.is_degraded, replica.load, replica.last_granted


class Policy(ABC):
    """Chooses a replica for each request."""

    @abstractmethod
    def choose(self, request: DispatchRequest, among: Sequence[Replica]) -> Replica:
        """Return the replica for this request. Changes nothing.

        Args:
            among: those that can take it now, in the order in which they were added; never empty.
        """

    def granted(self, request: DispatchRequest, replica: Replica) -> None:  # noqa: B027  # most policies keep nothing
        """The request goes to this replica; the policy may remember it."""

    def forget(self, name: str) -> None:  # noqa: B027
        """This replica was removed, or has lost its cache."""


def prefer_healthy(among: Sequence[Replica]) -> Sequence[Replica]:
    """The healthy ones; if there are none, all."""
    return [replica for replica in among if not replica.is_degraded] or among


class LeastLoad(Policy):
    """See the module's docstring."""

    def choose(self, request: DispatchRequest, among: Sequence[Replica]) -> Replica:
        return min(among, key=by_load)


def by_turn(replica: Replica) -> Order:
    """The order of `RoundRobin`."""
    return replica.is_degraded, replica.turn, replica.last_granted


class RoundRobin(Policy):
    """Stride scheduling: each grant advances a replica by 1 / weight, and the least advanced one gets the next."""

    def __init__(self) -> None:
        self._now = 0.0  # the last turn granted; a new replica continues from here after its first

    def choose(self, request: DispatchRequest, among: Sequence[Replica]) -> Replica:
        return min(among, key=by_turn)

    def granted(self, request: DispatchRequest, replica: Replica) -> None:
        self._now = max(replica.turn, self._now)
        replica.turn = self._now + 1 / replica.spec.weight


class PowerOfTwo(Policy):
    """See the module's docstring."""

    def __init__(self, below: RandomBelow) -> None:
        self._below = below

    def choose(self, request: DispatchRequest, among: Sequence[Replica]) -> Replica:
        healthy = prefer_healthy(among)
        n = len(healthy)
        first = self._below(n)
        second = (first + 1 + self._below(n - 1)) % n if n > 1 else first
        return min(healthy[first], healthy[second], key=by_load)


class ConsistentHashing(Policy):
    """Rendezvous hashing: every replica has a score for a key, scaled by its weight, and the highest wins."""

    def choose(self, request: DispatchRequest, among: Sequence[Replica]) -> Replica:
        key = request.affinity.key
        if not key:
            return min(among, key=by_load)
        return max(prefer_healthy(among), key=lambda replica: _score(key, replica))


def _score(key: str, replica: Replica) -> float:
    digest = hashlib.blake2b(f"{replica.name}\0{key}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -replica.spec.weight / math.log(share)


class CacheAware(Policy):
    """See the module's docstring.

    Args:
        threshold: least fraction of a prompt that a replica must have seen.
        more, times: a replica that has `more` requests more than the least busy one, and `times` as many, is too busy.
    """

    def __init__(self, *, threshold: float, more: int, times: float) -> None:
        self._threshold = threshold
        self._more = more
        self._times = times
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session -> replica; the least recent first
        self._blocks: OrderedDict[int, str] = OrderedDict()  # block with all before it -> replica

    def choose(self, request: DispatchRequest, among: Sequence[Replica]) -> Replica:
        name, first = self._home(request), min(among, key=by_load)
        home = next((replica for replica in among if replica.name == name), None)
        if home is None or home.is_degraded > first.is_degraded or self._is_too_busy(home, first):
            return first
        return home

    def granted(self, request: DispatchRequest, replica: Replica) -> None:
        if request.affinity.session:
            _remember(self._sessions, request.affinity.session, replica.name, SESSIONS)
        for block in request.affinity.blocks:
            _remember(self._blocks, block, replica.name, BLOCKS)

    def forget(self, name: str) -> None:
        self._sessions = OrderedDict((key, of) for key, of in self._sessions.items() if of != name)
        self._blocks = OrderedDict((key, of) for key, of in self._blocks.items() if of != name)

    def _home(self, request: DispatchRequest) -> str | None:
        """The replica that has this conversation, if one is known."""
        if (name := self._sessions.get(request.affinity.session)) is not None:
            return name
        blocks = request.affinity.blocks
        for i in range(len(blocks) - 1, -1, -1):
            if (name := self._blocks.get(blocks[i])) is not None:
                return name if (i + 1) / len(blocks) >= self._threshold else None
        return None

    def _is_too_busy(self, home: Replica, first: Replica) -> bool:
        return home.busy - first.busy > self._more and home.busy > self._times * first.busy


def _remember(memory: OrderedDict[K, str], key: K, name: str, most: int) -> None:
    memory[key] = name
    memory.move_to_end(key)
    if len(memory) > most:
        memory.popitem(last=False)
