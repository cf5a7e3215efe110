"""Checks API keys, and names the owner of each."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from phalanx.errors import InvalidApiKey

NOT_SENDABLE = "is empty, not printable ASCII, or has blanks around it"


class ApiKeys:
    """The accepted keys. Without any, every request has access."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def owner(self, headers: Mapping[str, str]) -> str:
        """The owner of the key in these headers: a short hash that does not reveal the key; "" if none is needed.

        The key is in `Authorization: Bearer KEY` or in `x-api-key: KEY`. It is compared with every key, each time in
        constant time, so that the delay does not reveal how close a guess is.

        Raises:
            InvalidApiKey: there is no key, or it is not accepted.
        """
        if not self._digests:
            return ""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        given = [key.strip() for key in given if key.strip()]
        # Headers are decoded as latin-1: these are the bytes that the client sent.
        asked = [_digest(key.encode("latin-1")) for key in given]
        matches = [digest for digest in self._digests for other in asked if hmac.compare_digest(digest, other)]
        if not matches:
            seen = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise InvalidApiKey(f"{seen} Send it as 'Authorization: Bearer KEY'.", code="invalid_api_key")
        return _name(matches[0])

    @property
    def owners(self) -> list[str]:
        """All that `owner` may return."""
        return list(map(_name, self._digests)) or [""]

    def may_see_details(self, headers: Mapping[str, str]) -> bool:
        """Whether these headers have a key, or none is needed."""
        try:
            self.owner(headers)
        except InvalidApiKey:
            return False
        return True


def is_same(given: str, key: str) -> bool:
    """Whether a header's value is this key; in constant time, since digests are compared."""
    return hmac.compare_digest(_digest(given.encode("latin-1")), _digest(key.encode()))


def is_sendable(key: str) -> bool:
    """Whether a header can carry this key: printable ASCII without blanks around it."""
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def owner_of(key: str) -> str:
    """The owner that `ApiKeys.owner` gives for a key."""
    return _name(_digest(key.encode()))


def _name(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
