"""Which of the replicas that can take a request gets it.

    least_load           the fewest requests against its limit and weight; equal ones by turns
    round_robin          by turns, in proportion to weights
    power_of_two         the less busy one of two at random
    cache_aware          where the conversation's prefix is, unless that replica is much busier; else least_load
    consistent_hashing   by the session or the prompt's beginning; a replica that comes or goes moves only its share

Every policy prefers replicas that are not in doubt. consistent_hashing looks at every replica, the others do not
(`index.py`). Does not know requests' bodies: `affinity.py` reads those.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from phalanx.gateway.dispatch_request import DispatchRequest
from phalanx.gateway.replica import Replica

SESSIONS = 50_000  # that cache_aware remembers; a session is a name of a few bytes
BLOCKS = 500_000  # of prompts, that it remembers: 128 MB of text at 256 bytes each

K = TypeVar("K")
RandomBelow = Callable[[int], int]
"""A random number from 0 to n - 1."""
Order = tuple[bool, float, int]
"""In doubt, the policy's own number, last grant: the smallest comes first."""


class Candidates(Protocol):
    """Replicas that can take a request now; never none."""

    def __iter__(self) -> Iterator[Replica]: ...

    def first(self) -> Replica:
        """The first one in the policy's order."""

    def named(self, name: str) -> Replica | None:
        """The one with this name, if it is among them."""

    def two(self, below: RandomBelow) -> tuple[Replica, Replica]:
        """Two at random of those that are not in doubt; one twice, where there is no other."""


def by_load(replica: Replica) -> Order:
    """The least busy one first; of equal ones, that which has waited longest for a request."""
    return replica.in_doubt, replica.load, replica.last_granted


class Policy(ABC):
    """The seam."""

    order: Callable[[Replica], Order] = staticmethod(by_load)
    """Of candidates. What it looks at of a replica changes with a grant, or with what `ReplicaIndex.note` is told."""

    @abstractmethod
    def choose(self, request: DispatchRequest, among: Candidates) -> Replica:
        """The replica that gets this request. Changes nothing."""

    def granted(self, request: DispatchRequest, replica: Replica) -> None:  # noqa: B027  # most policies remember nothing
        """The request goes to this replica; the policy may remember it."""

    def forget(self, name: str) -> None:  # noqa: B027
        """This replica is gone, or has lost what it knew."""


def undoubted(among: Iterable[Replica]) -> Sequence[Replica]:
    """Those that are not in doubt, if there are any."""
    everyone = list(among)
    return [replica for replica in everyone if not replica.in_doubt] or everyone


class Listed(list[Replica]):
    """Candidates that are known one by one."""

    def __init__(self, among: Iterable[Replica], order: Callable[[Replica], Order]) -> None:
        super().__init__(among)
        self._order = order

    def first(self) -> Replica:
        return min(self, key=self._order)

    def named(self, name: str) -> Replica | None:
        return next((replica for replica in self if replica.name == name), None)

    def two(self, below: RandomBelow) -> tuple[Replica, Replica]:
        sound = undoubted(self)
        first, second = two_below(len(sound), below)
        return sound[first], sound[second]


def two_below(n: int, below: RandomBelow) -> tuple[int, int]:
    """Two different random numbers from 0 to n - 1; 0 twice where n is 1."""
    first = below(n)
    return first, (first + 1 + below(n - 1)) % n if n > 1 else first


class LeastLoad(Policy):
    """See the module's docstring."""

    def choose(self, request: DispatchRequest, among: Candidates) -> Replica:
        return among.first()


def by_turn(replica: Replica) -> Order:
    """The order of `RoundRobin`."""
    return replica.in_doubt, replica.turn, replica.last_granted


class RoundRobin(Policy):
    """Stride scheduling: each turn moves a replica 1 / weight further, and the one that is least far gets the next."""

    order = staticmethod(by_turn)

    def __init__(self) -> None:
        self._now = 0.0  # the turn that was last given; newcomers go on from here after their first, not from 0

    def choose(self, request: DispatchRequest, among: Candidates) -> Replica:
        return among.first()

    def granted(self, request: DispatchRequest, replica: Replica) -> None:
        self._now = max(replica.turn, self._now)
        replica.turn = self._now + 1 / replica.spec.weight


class PowerOfTwo(Policy):
    """See the module's docstring."""

    def __init__(self, below: RandomBelow) -> None:
        self._below = below

    def choose(self, request: DispatchRequest, among: Candidates) -> Replica:
        return min(among.two(self._below), key=by_load)


class ConsistentHashing(Policy):
    """Rendezvous hashing: every replica has a number for a key, in proportion to its weight, and the highest wins."""

    def choose(self, request: DispatchRequest, among: Candidates) -> Replica:
        key = request.affinity.key
        if not key:
            return among.first()
        return max(undoubted(among), key=lambda replica: _score(key, replica))


def _score(key: str, replica: Replica) -> float:
    digest = hashlib.blake2b(f"{replica.name}\0{key}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -replica.spec.weight / math.log(share)


class CacheAware(Policy):
    """See the module's docstring.

    Args:
        threshold: least part of a prompt that a replica must have had.
        more, times: a replica that has `more` requests more than the least busy one, and `times` as many, is too busy.
    """

    def __init__(self, *, threshold: float, more: int, times: float) -> None:
        self._threshold = threshold
        self._more = more
        self._times = times
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session -> replica; the least recent first
        self._blocks: OrderedDict[int, str] = OrderedDict()  # block with all before it -> replica

    def choose(self, request: DispatchRequest, among: Candidates) -> Replica:
        name, first = self._home(request), among.first()
        home = among.named(name) if name is not None else None
        if home is None or home.in_doubt > first.in_doubt or self._is_too_busy(home, first):
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
