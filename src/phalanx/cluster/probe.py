"""Asks a phalanx server on this host for its /health."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import msgspec

from phalanx.tls.trust import trust_only

HEALTH_S = 2.0  # a healthy server answers in milliseconds


def ask_health(host: str, port: int, *, key: str | None = None, certificate: Path | None = None) -> dict[str, Any]:
    """The answer's body; empty if nothing answers, or something else than phalanx does.

    Args:
        key: API key; without one, a server that has keys shows no details.
        certificate: the server's, if it speaks TLS; no other is accepted.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection: http.client.HTTPConnection | None = None
    try:
        if certificate is None:
            connection = http.client.HTTPConnection(host, port, timeout=HEALTH_S)
        else:
            context = trust_only(certificate)
            connection = http.client.HTTPSConnection(host, port, timeout=HEALTH_S, context=context)
        connection.request("GET", "/health", headers=headers)
        return msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeError):
        return {}
    finally:
        if connection is not None:
            connection.close()
