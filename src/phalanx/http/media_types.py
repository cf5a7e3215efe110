"""Which requests carry JSON that no web page of another origin could send.

A browser sends JSON across origins only after a pre-flight, other types at once. It also sends a body without a type at
once, but not without saying where the page is from. Clients that leave the type out, or send what HTTP libraries put
in its place, and say nothing of a page, are programs: litellm's two for Ollama.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import WrongMediaType

BROWSERS_OWN = ("origin", "sec-fetch-site")
"""A browser sends one of these with every POST across origins. A page can neither set nor drop them."""
UNDECLARED = ("", "application/octet-stream")
"""The second is what aiohttp sends with bytes of which the program says no type."""


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether the body is declared as JSON, or undeclared by a client that is not a browser. Names of headers in any
    case.
    """
    media_type = _media_type(headers)
    if media_type in UNDECLARED:
        return not any(name in headers for name in BROWSERS_OWN)
    return media_type == "application/json" or media_type.endswith("+json")


def require_json(headers: Mapping[str, str]) -> None:
    """Refuse other requests.

    Raises:
        WrongMediaType: the Content-Type is not JSON, or undeclared in what may be a browser's request.
    """
    if not is_json(headers):
        found = _media_type(headers)[:80] or "missing"
        raise WrongMediaType(f"Content-Type is {found!r}; it must be application/json.")


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()
