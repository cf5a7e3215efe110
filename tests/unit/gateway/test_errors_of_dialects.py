"""A gateway's errors are those that a server would give in its place."""

from __future__ import annotations

import pytest

from phalanx.errors import PhalanxError
from phalanx.gateway.dialects import error_object
from phalanx.gateway.statuses import STATUS, status_of
from phalanx.server.answers import Failure
from phalanx.server.dialects import messages_format, ollama_format, openai_objects

WRITERS = {
    "messages": messages_format.error_body,
    "ollama": ollama_format.error_body,
    "chat": openai_objects.error_body,
    "responses": openai_objects.error_body,
}


def error_of(kind: type[PhalanxError]) -> PhalanxError:
    try:
        return kind("no")
    except TypeError:
        return kind("no", retry_after=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("dialect", WRITERS)
@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_errors_are_named_as_the_server_names_them(dialect, kind):
    error = error_of(kind)
    status = status_of(error)
    code = getattr(error, "code", None) or status.code
    failure = Failure(status=status.status, type=status.type, message="no", code=code)
    assert error_object(dialect, error) == WRITERS[dialect](failure)
