"""The page for browsers: files of the package, sent with a policy that lets nothing else in.

Without a build step and without anything from elsewhere; the page asks for a key itself, so its files need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from phalanx.errors import UnknownPath
from phalanx.http.http_exchange import GREETING, Answer, Exchange

FILES = Path(__file__).parent / "page"
PATH = "/page/{file}"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer server's page is another one
}


async def root(exchange: Exchange) -> Answer:
    """The page, for browsers; for programs, which look here whether there is a server, one line."""
    if _wants_page(exchange.headers):
        answer = files()["index.html"]
        return Answer(answer.body, media_type=answer.media_type, headers={**answer.headers, "Vary": "Accept"})
    return GREETING


async def page_file(exchange: Exchange) -> Answer:
    """A file of the page."""
    if (answer := files().get(exchange.rest)) is None:
        raise UnknownPath(f"The page has no file {exchange.rest[:80]!r}.")
    return answer


@cache
def files() -> Mapping[str, Answer]:
    """Name of each file -> its answer."""
    found = sorted(file for file in FILES.iterdir() if file.suffix in TYPES)
    return {file.name: Answer(file.read_bytes(), media_type=TYPES[file.suffix], headers=HEADERS) for file in found}


def _wants_page(headers: Mapping[str, str]) -> bool:
    return "text/html" in headers.get("accept", "").lower()
