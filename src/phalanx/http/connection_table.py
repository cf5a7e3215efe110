"""The slots of a listener's connections: limits in all and per address, and which connection a new one displaces.

A connection is *busy* while it has a request with an accepted key that is not answered yet, else it is *idle*. At a
limit, a new connection displaces the one that has been idle longest, of the address that has the most; busy ones are
never displaced. If every connection is busy, a new one takes a slot of the reserve, which answers /health and refuses
the rest. Listeners between hosts hold unauthenticated connections in such a table, all idle: a stranger's displace
each other.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

CONNECTIONS = 1024
"""Connections, unless set: many times the requests that can run or wait, and what most systems let one process open."""
RESERVE = 32
"""Connections beyond the limit, which get /health or a 503: a few load balancers and people at the same moment."""
HEALTH_PATHS = ("/health", "/ping")  # that a slot of the reserve answers
KEEP_ALIVE_S = 75  # longer than clients' pools keep an idle connection; else they send into one that is closing
IPV6_SUBSCRIBER = 64  # prefix bits: providers give each subscriber such a network, so it counts as one address


class ConnectionLimits(Struct, frozen=True):
    """Most connections at the same time, the reserve not counted."""

    total: int
    per_address: int


def limits_for(total: int | None, per_address: int | None, requests: int) -> ConnectionLimits:
    """The limits by the settings.

    Args:
        total: None is 1,024, or twice `requests`.
        per_address: None is half of all.
        requests: number that can run or wait.
    """
    total = total or max(CONNECTIONS, 2 * requests)
    return ConnectionLimits(total, min(total, per_address or -(-total // 2)))


class ConnectionSlot:
    """One connection's slot in the table.

    Args:
        reserved: the slot belongs to the reserve.
        close: closes the connection at once; the acceptor sets it, then the connection itself.
    """

    def __init__(self, address: str, *, reserved: bool, close: Callable[[], object]) -> None:
        self.address = address
        self.reserved = reserved
        self.close = close
        self.is_held = True
        """False once the table removed it, which may be before its connection is made."""


def group_of(address: str) -> str:
    """The unit of the limit per address: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 6:
        mapped = parsed.ipv4_mapped
        return str(mapped or ipaddress.ip_network((parsed, IPV6_SUBSCRIBER), strict=False))
    return str(parsed)


class ConnectionTable:
    """See the module's docstring. Used by one thread at a time."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.displaced = 0  # connections closed for newer ones, so far
        self.refused = 0  # connections for which there was no slot, so far
        self._held: Counter[str] = Counter()  # address -> slots, the reserve not counted
        self._idle: dict[str, dict[ConnectionSlot, None]] = {}  # address -> idle slots, the longest idle first
        self._reserved: dict[ConnectionSlot, None] = {}  # slots of the reserve
        self._reserve_idle: dict[ConnectionSlot, None] = {}

    @property
    def held(self) -> int:
        """Number of connections, the reserve not counted."""
        return self._held.total()

    def admit(self, address: str, close: Callable[[], None]) -> ConnectionSlot | None:
        """A slot for a new connection, which is idle; None if even the reserve is full. May close an idle connection.

        Args:
            address: for clients of `group_of`; a host's own, since hosts share a network.
        """
        if self._held[address] >= self.limits.per_address:
            has_room = self._displace(address)
        elif self.held >= self.limits.total:
            has_room = self._displace(max(self._idle, key=self._held.__getitem__, default=""))
        else:
            has_room = True
        if has_room:
            self._held[address] += 1
            slot = ConnectionSlot(address, reserved=False, close=close)
        elif len(self._reserved) < RESERVE or self._close_first(self._reserve_idle):
            slot = ConnectionSlot(address, reserved=True, close=close)
            self._reserved[slot] = None
        else:
            self.refused += 1
            return None
        self.mark_idle(slot)
        return slot

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """The connection waits for a request. Changes nothing if it did already."""
        self._idle_like(slot).setdefault(slot)

    def mark_busy(self, slot: ConnectionSlot) -> None:
        """A request with an accepted key has arrived."""
        self._unmark_idle(slot)

    def remove(self, slot: ConnectionSlot) -> None:
        """The connection is closed. Calling it again does nothing."""
        self._unmark_idle(slot)
        if slot.reserved:
            self._reserved.pop(slot, None)
        elif slot.is_held:
            self._held[slot.address] -= 1
            if not self._held[slot.address]:
                del self._held[slot.address]
        slot.is_held = False

    def _displace(self, address: str) -> bool:
        """Close this address's longest idle connection; False if none is idle."""
        return self._close_first(self._idle.get(address, {}))

    def _close_first(self, slots: dict[ConnectionSlot, None]) -> bool:
        first = next(iter(slots), None)
        if first is None:
            return False
        self.displaced += 1
        close = first.close
        self.remove(first)
        close()
        return True

    def _idle_like(self, slot: ConnectionSlot) -> dict[ConnectionSlot, None]:
        return self._reserve_idle if slot.reserved else self._idle.setdefault(slot.address, {})

    def _unmark_idle(self, slot: ConnectionSlot) -> None:
        self._idle_like(slot).pop(slot, None)
        if not slot.reserved and not self._idle[slot.address]:
            del self._idle[slot.address]


class Deadlines(Struct, frozen=True):
    """How long a client may keep a connection waiting, in seconds, and how much it must send or read meanwhile."""

    header_s: float = 10.0
    """From the connection, or the first byte of a later request, to the whole header: a few hundred bytes, which any
    line carries in one round trip. TLS' handshake has as long."""
    body_s: float = 15.0
    """A request's body must end or bring `progress_bytes` in every such span: several lost packets in a row."""
    read_s: float = 30.0
    """The client must read all of an answer that waits for it, or `progress_bytes`, in every such span."""
    progress_bytes: int = 64 << 10
    """64 KiB in 15 s is a line of 35 kbit/s, less than any mobile network's slowest."""


class TransferProgress:
    """Whether a transfer advances: by at least `least` bytes in every span of `span_s` seconds."""

    def __init__(self, span_s: float, least: int) -> None:
        self._span_s = span_s
        self._least = least
        self._since: float | None = None  # begin of the span; None: nothing is under way
        self._bytes = 0  # total at that time

    def reset(self) -> None:
        """Nothing is under way."""
        self._since = None

    def is_stalled(self, total: int, now: float) -> bool:
        """Whether the span is over without progress. To be called again and again while a transfer is under way.

        Args:
            total: bytes so far; never falls.
        """
        if self._since is None or total - self._bytes >= self._least:
            self._since, self._bytes = now, total
        return now - self._since > self._span_s
