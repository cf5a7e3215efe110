"""Which route takes a request: that of its path, else the first one above it that has its method."""

from __future__ import annotations

import pytest

from phalanx.errors import UnknownPath, WrongMethod
from phalanx.http.http_exchange import Answer, Exchange
from phalanx.http.router import Route, Router


async def answer(_: Exchange) -> Answer:
    return Answer()


ROUTER = Router(
    [
        Route(method, path, answer)
        for method, path in (
            ("GET", "/a/b"), ("GET", "/a/b/{name}"), ("PUT", "/a/{path}"), ("GET", "/a/{path}"), ("POST", "/a/{path}"),
        )
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "route", "rest"),
    [
        ("GET", "/a/b", "/a/b", ""),
        ("HEAD", "/a/b", "/a/b", ""),
        ("POST", "/a/b", "/a/{path}", "b"),
        ("GET", "/a/b/c/d", "/a/b/{name}", "c/d"),
        ("PUT", "/a/b/c", "/a/{path}", "b/c"),
        ("GET", "/a/c", "/a/{path}", "c"),
    ],
)
def test_a_request_goes_to_the_nearest_route_with_its_method(method, path, route, rest):
    found, parameter = ROUTER.find(method, path)
    assert (found.method, found.path, parameter) == ("GET" if method == "HEAD" else method, route, rest)


def test_what_no_route_takes():
    with pytest.raises(UnknownPath, match="Not Found: GET /b"):
        ROUTER.find("GET", "/b")
    with pytest.raises(WrongMethod) as refused:
        ROUTER.find("DELETE", "/a/b")
    assert refused.value.allowed == ("GET", "PUT", "POST")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat", ". Did you mean /v1/chat?"),
        ("/v1/v1/chat", ". Did you mean /v1/chat?"),
        ("/v1/health", ". Did you mean /health?"),
        ("/api/v1/chat", ". Did you mean /v1/chat?"),
        ("/v1/chta", ". Did you mean /v1/chat?"),
        ("/v1/chat/", ". Did you mean /v1/chat?"),
        ("/v1/", ""),
        ("/v1", ""),
        ("/cat", ""),
    ],
)
def test_a_base_url_without_v1_or_with_two_is_noticed(path, hint):
    router = Router([Route("POST", "/v1/chat", answer), Route("GET", "/health", answer), Route("GET", "/", answer)])
    with pytest.raises(UnknownPath) as refused:
        router.find("POST", path)
    assert str(refused.value) == f"Not Found: POST {path}{hint}"
