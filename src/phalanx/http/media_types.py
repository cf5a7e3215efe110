"""Recognises requests with JSON that a web page of another origin could not send.

Across origins a browser sends JSON only after a pre-flight. It sends a body without a type, or as a form, at once, but
with a header that names the page's origin. So a request without a type, or with a program's default, and without such a
header comes from a program: curl and litellm's two clients for Ollama send such ones. A body that is not JSON is
refused when it is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import WrongMediaType

BROWSERS_OWN = ("origin", "sec-fetch-site")
"""A browser sends one of these with every POST across origins. A page can neither set nor drop them."""
UNDECLARED = ("", "application/octet-stream", "application/x-www-form-urlencoded")
"""The second is aiohttp's default, the third that of `curl -d`."""


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether the body is declared as JSON, or undeclared by a client that is not a browser.

    Args:
        headers: names in lower case, or a multidict.
    """
    media_type = _media_type(headers)
    if media_type in UNDECLARED:
        return not any(name in headers for name in BROWSERS_OWN)
    return media_type == "application/json" or media_type.endswith("+json")


def require_json(headers: Mapping[str, str]) -> None:
    """Refuse requests without JSON.

    Raises:
        WrongMediaType: the Content-Type is not JSON, or undeclared in what may be a browser's request.
    """
    if not is_json(headers):
        found = _media_type(headers)[:80] or "missing"
        raise WrongMediaType(f"Content-Type is {found!r}; it must be application/json.")


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()
