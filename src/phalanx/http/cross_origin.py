"""Which web pages of other origins may read answers (CORS): the headers that browsers look for. Knows no routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from phalanx.http.http_exchange import REQUEST_ID

ANY = "*"
METHODS = "GET, HEAD, POST"
SHOWN = f"Retry-After, retry-after-ms, {REQUEST_ID}"
"""Headers of answers that a page may read, beside those that every page may."""
MAX_AGE_S = 600  # that a browser remembers a pre-flight


class CrossOrigin:
    """The origins whose pages are let in; without any, no answer has headers about origins.

    Args:
        origins: `*` is every one. Within one, `*` stands for any name, begin of a name, or port: `app://*`,
            `https://*.example.com`, `http://localhost:*`.
        flag: that sets them; "" where there is none.
    """

    def __init__(self, origins: Sequence[str], flag: str = "") -> None:
        self._all = ANY in origins
        self._origins = [re.compile(re.escape(origin).replace(r"\*", "[^/]+")) for origin in origins]
        self._flag = flag

    def headers(self, asked: Mapping[str, str]) -> dict[str, str]:
        """What an answer has more, to a request with these headers; names in lower case."""
        if not self._origins or "origin" not in asked:
            return {}
        return {**self._of(asked["origin"]), "Access-Control-Expose-Headers": SHOWN}

    def preflight(self, method: str, asked: Mapping[str, str]) -> dict[str, str] | None:
        """The headers of the answer to a browser that asks before it sends a page's request; None if it does not."""
        is_preflight = method == "OPTIONS" and "access-control-request-method" in asked
        if not is_preflight or not (self._origins or self._flag):
            return None
        if not self._origins:
            return {}
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted := asked.get("access-control-request-headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return {**self._of(asked.get("origin", "")), **headers}

    def refusal(self, asked: Mapping[str, str]) -> str:
        """What a refused pre-flight says: which flag lets its page in."""
        origin = asked.get("origin", "")[:200]
        remedy = f" {self._flag} {origin} lets them in." if self._flag else ""
        return f"Disallowed CORS origin: web pages of {origin} may not ask here.{remedy}\n"

    def _of(self, origin: str) -> dict[str, str]:
        if self._all:
            return {"Access-Control-Allow-Origin": ANY}
        is_let_in = any(one.fullmatch(origin) for one in self._origins)
        return {"Vary": "Origin", **({"Access-Control-Allow-Origin": origin} if is_let_in else {})}
