"""The error that ends a stream at a gateway says what a server's error at that path says, in the stream's own form."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import EngineError, PhalanxError, Quarantined
from phalanx.gateway.relay.api_kinds import dialect_of, error_event
from phalanx.http.application import error_answer
from phalanx.http.error_responses import STATUS, error_body, public_failure

PATHS = ("/v1/messages", "/api/chat", "/api/tags", "/v1/chat/completions", "/v1/completions", "/v1/responses")


def error_of(kind: type[PhalanxError]) -> PhalanxError:
    try:
        return kind("no")
    except TypeError:
        return kind("no", retry_after=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_a_stream_ends_with_the_error_that_the_server_names(path, kind):
    body = error_body(public_failure(error_of(kind)), path)
    said = error_event(dialect_of(path), body, number=3)
    if path.startswith("/api/"):
        assert json.loads(said) == body and said.endswith(b"}\n")
        return
    event, _, rest = said.partition(b"\n\n")
    name, _, data = event.rpartition(b"data: ")
    assert name == (b"" if "completions" in path else b"event: error\n")
    assert rest == (b"data: [DONE]\n\n" if "completions" in path else b"")
    if path == "/v1/responses":
        flat = {"type": "error", "code": body["error"]["code"], "message": "no", "param": None, "sequence_number": 3}
        assert json.loads(data) == flat
    else:
        assert json.loads(data) == body


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_crashes_engines_is_not_to_be_repeated_in_any_dialect(path):
    for error, said in ((Quarantined("no"), "false"), (EngineError("no"), None)):
        answer = error_answer(error, path)
        assert (answer.status, answer.headers.get("x-should-retry")) == (500, said)
