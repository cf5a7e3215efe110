"""Events as bytes: whatever a text holds, a client that splits lines finds one event."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.server.answers.event_framing import event


@given(st.text())
@example("\x1c\x85\u2028\u2029\r\n")
def test_an_event_is_one_line_for_every_client(text: str) -> None:
    data = event({"text": text})
    line, *rest = data.decode().splitlines()
    assert rest == [""] and json.loads(line.removeprefix("data: ")) == {"text": text}
