"""Finds the handler of a request in a table of paths and methods, which /openapi.json describes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from difflib import get_close_matches

from msgspec import Struct

from phalanx.errors import UnknownPath, WrongMethod
from phalanx.http.http_exchange import Exchange, Reply
from phalanx.http.openapi import Operation

MAX_COMPARED = 64  # characters of a path that is compared with others: no API's path is longer

Handler = Callable[[Exchange], Awaitable[Reply]]


class Route(Struct, frozen=True):
    """The handler of a method at a path."""

    method: str
    path: str  # {NAME} at its end matches one or more parts of a request's path
    handler: Handler
    guard: Callable[[Exchange], None] | None = None  # called first; raises an error for requests that it refuses
    body: type[Struct] | None = None  # of the JSON that the handler reads

    def described(self) -> Operation:
        """Its operation in /openapi.json; the summary is the first line of the handler's docstring."""
        summary = (self.handler.__doc__ or "").strip().partition("\n")[0]
        return Operation(self.method, self.path, summary, self.body, self.guard is not None)


class Router:
    """The routes of one server."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._at: dict[str, dict[str, Route]] = {}  # path -> method -> route
        self._below: dict[str, dict[str, Route]] = {}  # the part of a path before its parameter -> method -> route
        self.routes: list[Route] = []
        for route in routes:
            self.add(route)

    def add(self, route: Route) -> None:
        """Add a route."""
        self.routes.append(route)
        begin, brace, _ = route.path.partition("{")
        (self._below if brace else self._at).setdefault(begin, {})[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """The route of a request, and the value of its parameter. HEAD is answered wherever GET is.

        Raises:
            UnknownPath, WrongMethod: no route matches.
        """
        wanted = "GET" if method == "HEAD" else method
        allowed: dict[str, None] = {}
        for begin, found in self._that_match(path):
            if wanted in found:
                return found[wanted], path.removeprefix(begin)
            allowed |= dict.fromkeys(found)
        if not allowed:
            raise UnknownPath(f"Not Found: {method} {path}{self._meant(path)}")
        takes = " or ".join(allowed)
        raise WrongMethod(f"Method Not Allowed: {method} {path}. It takes {takes}.", allowed=tuple(allowed))

    def _meant(self, path: str) -> str:
        """A hint where the client's base URL lacks /v1, or has it once too often, or a path is mistyped."""
        near = get_close_matches(path[:MAX_COMPARED], self._at, n=1, cutoff=0.85)
        exact = (f"/v1{path}", path.removeprefix("/v1"), path.removeprefix("/api"))
        meant = next((other for other in (*exact, *near) if other in self._at), "/")
        return "" if meant == "/" else f". Did you mean {meant}?"

    def _that_match(self, path: str) -> Iterator[tuple[str, dict[str, Route]]]:
        """(part before the parameter, method -> route) of the path itself, then of the paths above it in the order in
        which they were added."""
        if path in self._at:
            yield path, self._at[path]
        for begin, found in self._below.items():
            if path.startswith(begin):
                yield begin, found
