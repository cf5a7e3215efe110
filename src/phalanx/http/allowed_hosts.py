"""Host allow list of an HTTP process: protection against DNS rebinding.

A web page can point a name of its own at this server, and send requests from a browser of this network. The Host header
shows that name, so only the server's own names are accepted. So are addresses: a page cannot change where one leads.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

ANY = "*"


class AllowedHosts:
    """The names in a Host header that this server answers to, besides every address.

    Args:
        bound: the address or name at which the server listens.
        more: further names; `*.example.com` matches all names below it, and `*` every name.
    """

    def __init__(self, bound: str, more: Sequence[str] = ()) -> None:
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        names = {name.lower().rstrip(".") for name in ("localhost", bound, own, short, f"{short}.local", *more)}
        self._all = ANY in more
        self._names = frozenset(name for name in names if name and not name.startswith(ANY))
        self._below = tuple(name[1:] for name in names if name.startswith("*."))

    def accept(self, header: str) -> bool:
        """Whether a Host header is accepted."""
        name = name_of(header)
        return self._all or name in self._names or name.endswith(self._below) or _is_address(name)


def name_of(header: str) -> str:
    """The name or address in a Host header, without port and brackets, in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
