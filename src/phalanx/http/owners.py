"""The header by which a gateway names the client of a request to a phalanx server, signed with its admin key.

A server behind a gateway sees one API key, the gateway's. The header OWNER names the gateway's client:
`DIGEST.SIGNATURE`, both keyed with the server's admin key, which itself is not sent. So a client is the same owner on
every server with this admin key and after a gateway's restart, its key is not revealed, and clients cannot forge it.
"""

from __future__ import annotations

import hashlib
import hmac

from phalanx.errors import AdminKeyRefused

OWNER = "x-phalanx-owner"
DIGITS = 32  # hexadecimal, of digest and signature each


def owner_header(owner: str, admin_key: str) -> str:
    """The value of OWNER for a server.

    Args:
        owner: of a client's API key at the gateway; see `ApiKeys.owner`.
        admin_key: the server's.
    """
    digest = _keyed(admin_key, "owner", owner)
    return f"{digest}.{_keyed(admin_key, 'signature', digest)}"


def owner_on_server(own: str, header: str | None, admin_key: str | None) -> str:
    """The owner of a request on a server: of its own API key, and behind a gateway of both keys together.

    Args:
        own: owner of the request's own API key.
        header: the value of OWNER; None if there is none.
        admin_key: the server's; None if it has none.

    Raises:
        AdminKeyRefused: the header was not made with this server's admin key.
    """
    if header is None:
        return own
    if admin_key is None:
        raise AdminKeyRefused(f"{OWNER}: this server has no --admin-key, so it takes no gateway's word for an owner.")
    digest, _, signature = header.partition(".")
    if not hmac.compare_digest(signature.encode(), _keyed(admin_key, "signature", digest).encode()):
        raise AdminKeyRefused(f"{OWNER} is not made with this server's --admin-key.")
    return f"{own}.{digest}"


def _keyed(key: str, purpose: str, text: str) -> str:
    return hmac.new(key.encode(), f"{purpose} {text}".encode(), hashlib.sha256).hexdigest()[:DIGITS]
