"""The interface through which `endpoints/generating.py` streams and collects the answers of every dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from phalanx.http.error_responses import Failure
from phalanx.server.answers.deltas import Delta, Usage


class AnswerFormat(Protocol):
    """Writes one answer; it may keep state from one call to the next. All bytes are whole events of a stream."""

    media_type: str  # of a stream
    next_number: int  # of the next event, in dialects that number them

    @property
    def keep_alive(self) -> bytes:
        """Bytes that keep a stream's client waiting."""

    def opening(self, n_choices: int, so_far: Usage | None) -> bytes:
        """The stream's first events; may be empty.

        Args:
            so_far: the usage, if the client wants it in every event.
        """

    def events(self, deltas: Sequence[Delta], so_far: Usage | None) -> bytes:
        """The events of these deltas, which come in order for each choice."""

    def closing(self, usage: Usage, timing: Mapping[str, float] | None) -> bytes:
        """The stream's last events, after every choice has ended."""

    def failure(self, failure: Failure) -> bytes:
        """The stream's last events, after an error."""

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
        """The body of an answer that is not streamed; each delta is a complete choice."""
