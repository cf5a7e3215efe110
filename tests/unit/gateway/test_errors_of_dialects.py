"""A gateway's errors are those that a server would give in its place."""

from __future__ import annotations

import pytest

from phalanx.errors import EngineError, PhalanxError, Quarantined
from phalanx.gateway.relay.api_kinds import dialect_of, error_object
from phalanx.http.error_responses import STATUS, error_body, public_failure
from phalanx.server.access import error_response

PATHS = ("/v1/messages", "/api/chat", "/api/tags", "/v1/chat/completions", "/v1/completions", "/v1/responses")


def error_of(kind: type[PhalanxError]) -> PhalanxError:
    try:
        return kind("no")
    except TypeError:
        return kind("no", retry_after=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_errors_are_named_as_the_server_names_them(path, kind):
    error = error_of(kind)
    assert error_object(dialect_of(path), error) == error_body(public_failure(error), path)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_crashes_engines_is_not_to_be_repeated_in_any_dialect(path):
    for error, said in ((Quarantined("no"), "false"), (EngineError("no"), None)):
        answer = error_response(error, path)
        assert (answer.status_code, answer.headers.get("x-should-retry")) == (500, said)
