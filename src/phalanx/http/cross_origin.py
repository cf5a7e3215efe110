"""CORS headers: which web pages of other origins may read answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from phalanx.http.http_exchange import REQUEST_ID

ANY = "*"
METHODS = "GET, HEAD, POST"
SHOWN = f"Retry-After, retry-after-ms, {REQUEST_ID}"
"""Further headers of answers that a page may read."""
MAX_AGE_S = 600  # that a browser remembers a pre-flight


class CrossOrigin:
    """The allowed origins; without any, answers have no CORS headers.

    Args:
        origins: `*` is every one. Within one, `*` matches any name, beginning of a name, or port: `app://*`,
            `https://*.example.com`, `http://localhost:*`.
        flag: that sets them, for errors; "" if there is none.
    """

    def __init__(self, origins: Sequence[str], flag: str = "") -> None:
        self._all = ANY in origins
        self._origins = [re.compile(re.escape(origin).replace(r"\*", "[^/]+")) for origin in origins]
        self._flag = flag

    def headers(self, asked: Mapping[str, str]) -> dict[str, str]:
        """The CORS headers of an answer to a request with these headers, whose names are in lower case."""
        if not self._origins or "origin" not in asked:
            return {}
        return {**self._of(asked["origin"]), "Access-Control-Expose-Headers": SHOWN}

    def preflight(self, method: str, asked: Mapping[str, str]) -> dict[str, str] | None:
        """The headers of the answer to a CORS pre-flight; None if the request is not one."""
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
        """The text of a refused pre-flight, which names the flag that allows its page."""
        origin = asked.get("origin", "")[:200]
        remedy = f" {self._flag} {origin} lets them in." if self._flag else ""
        return f"Disallowed CORS origin: web pages of {origin} may not ask here.{remedy}\n"

    def _of(self, origin: str) -> dict[str, str]:
        if self._all:
            return {"Access-Control-Allow-Origin": ANY}
        is_allowed = any(one.fullmatch(origin) for one in self._origins)
        return {"Vary": "Origin", **({"Access-Control-Allow-Origin": origin} if is_allowed else {})}
