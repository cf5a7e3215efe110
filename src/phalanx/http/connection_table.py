"""Which connections the server holds: how many in all and from one address, and which makes way for a new one.

A connection is *busy* while it has a request whose key was accepted and that is not answered yet, else it is *idle*. At
a limit, a new connection displaces the one that has been idle longest, of the address that has the most; busy ones are
never displaced. Where every connection is busy, a new one takes a place of the reserve, which answers /health and
refuses the rest. Between hosts, connections that have not shown who they are wait in such a table, all idle: those of a
stranger displace each other. Does not know sockets, HTTP or time.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

CONNECTIONS = 1024
"""Connections, unless set: many times the requests that can run or wait, and what most systems let one process open."""
RESERVE = 32
"""Connections beyond the limit, for /health and for saying 503: a few load balancers and people at the same moment."""
HEALTH_PATHS = ("/health", "/ping")  # what a place of the reserve answers
KEEP_ALIVE_S = 75  # longer than clients' pools keep an idle connection; else they send into one that is closing
IPV6_SUBSCRIBER = 64  # prefix bits: providers give one subscriber this much, so that it counts as one address


class ConnectionLimits(Struct, frozen=True):
    """Most connections at the same time, the reserve not counted."""

    total: int
    per_address: int


def limits_for(total: int | None, per_address: int | None, requests: int) -> ConnectionLimits:
    """The limits that settings ask for.

    Args:
        total: None is 1,024, or twice `requests`.
        per_address: None is half of all.
        requests: that can run or wait.
    """
    total = total or max(CONNECTIONS, 2 * requests)
    return ConnectionLimits(total, min(total, per_address or -(-total // 2)))


class ConnectionPlace:
    """One connection's place in the table.

    Args:
        reserved: the place is one of the reserve.
        close: closes the connection at once; the acceptor sets it, then the connection itself.
    """

    def __init__(self, address: str, *, reserved: bool, close: Callable[[], object]) -> None:
        self.address = address
        self.reserved = reserved
        self.close = close
        self.is_held = True
        """Until the table removes it, which may be before its connection is made."""


def group_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 network of an IPv6 address."""
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
        self.refused = 0  # connections for which there was no place, so far
        self._held: Counter[str] = Counter()  # address -> places, the reserve not counted
        self._idle: dict[str, dict[ConnectionPlace, None]] = {}  # address -> idle places, the longest first
        self._reserved: dict[ConnectionPlace, None] = {}  # places of the reserve
        self._reserve_idle: dict[ConnectionPlace, None] = {}

    @property
    def held(self) -> int:
        """Number of connections, the reserve not counted."""
        return self._held.total()

    def admit(self, address: str, close: Callable[[], None]) -> ConnectionPlace | None:
        """A place for a new connection, which is idle; None where even the reserve is taken. Changes state.

        May close an idle connection.

        Args:
            address: what the limit counts: a client has that of `group_of`; a host its own, for hosts share a network.
        """
        if self._held[address] >= self.limits.per_address:
            has_room = self._displace(address)
        elif self.held >= self.limits.total:
            has_room = self._displace(max(self._idle, key=self._held.__getitem__, default=""))
        else:
            has_room = True
        if has_room:
            self._held[address] += 1
            place = ConnectionPlace(address, reserved=False, close=close)
        elif len(self._reserved) < RESERVE or self._close_first(self._reserve_idle):
            place = ConnectionPlace(address, reserved=True, close=close)
            self._reserved[place] = None
        else:
            self.refused += 1
            return None
        self.mark_idle(place)
        return place

    def mark_idle(self, place: ConnectionPlace) -> None:
        """The connection waits for a request from now on. Changes nothing if it did already."""
        self._idle_like(place).setdefault(place)

    def mark_busy(self, place: ConnectionPlace) -> None:
        """A request has arrived, and its key is accepted."""
        self._unmark_idle(place)

    def remove(self, place: ConnectionPlace) -> None:
        """The connection is closed. Calling it twice does nothing."""
        self._unmark_idle(place)
        if place.reserved:
            self._reserved.pop(place, None)
        elif place.is_held:
            self._held[place.address] -= 1
            if not self._held[place.address]:
                del self._held[place.address]
        place.is_held = False

    def _displace(self, address: str) -> bool:
        """Close the connection of this address that has been idle longest; False if none is idle."""
        return self._close_first(self._idle.get(address, {}))

    def _close_first(self, places: dict[ConnectionPlace, None]) -> bool:
        first = next(iter(places), None)
        if first is None:
            return False
        self.displaced += 1
        close = first.close
        self.remove(first)
        close()
        return True

    def _idle_like(self, place: ConnectionPlace) -> dict[ConnectionPlace, None]:
        return self._reserve_idle if place.reserved else self._idle.setdefault(place.address, {})

    def _unmark_idle(self, place: ConnectionPlace) -> None:
        self._idle_like(place).pop(place, None)
        if not place.reserved and not self._idle[place.address]:
            del self._idle[place.address]


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
