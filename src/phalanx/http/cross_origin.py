"""Which web pages of other origins may read answers (CORS): the headers that browsers look for. Knows no routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.http.http_exchange import REQUEST_ID

ANY = "*"
METHODS = "GET, HEAD, POST"
SHOWN = f"Retry-After, retry-after-ms, {REQUEST_ID}"
"""Headers of answers that a page may read, beside those that every page may."""
MAX_AGE_S = 600  # that a browser remembers a pre-flight


class CrossOrigin:
    """The origins whose pages are let in; without any, no answer says anything of origins."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, asked: Mapping[str, str]) -> dict[str, str]:
        """What an answer has more, to a request with these headers; names in lower case."""
        if not self._origins or "origin" not in asked:
            return {}
        return {**self._of(asked["origin"]), "Access-Control-Expose-Headers": SHOWN}

    def preflight(self, method: str, asked: Mapping[str, str]) -> dict[str, str] | None:
        """The headers of the answer to a browser that asks before it sends a page's request; None if it does not."""
        if not self._origins or method != "OPTIONS" or "access-control-request-method" not in asked:
            return None
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted := asked.get("access-control-request-headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return {**self._of(asked.get("origin", "")), **headers}

    def _of(self, origin: str) -> dict[str, str]:
        if ANY in self._origins:
            return {"Access-Control-Allow-Origin": ANY}
        return {"Vary": "Origin", **({"Access-Control-Allow-Origin": origin} if origin in self._origins else {})}
