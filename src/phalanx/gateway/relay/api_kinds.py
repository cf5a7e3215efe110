"""The APIs that pass through the gateway: how a stream of each ends, also with an error.

chat         OpenAI's chat and text completions: events, then `data: [DONE]`
responses    OpenAI's responses: events with names and numbers, the last one response.completed or its like
messages     Anthropic's messages: events with names, the last one message_stop
ollama       lines of JSON, the last one with "done": true
ollama_more  other paths below /api: errors are Ollama's, streams are not parsed
other        all other paths: streams are not parsed, and end with the HTTP body
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Dialect = Literal["chat", "responses", "messages", "ollama", "ollama_more", "other"]

OPAQUE = frozenset(("ollama_more", "other"))
"""Dialects whose streams are not parsed."""
RESPONSES_ENDS = frozenset(("response.completed", "response.failed", "response.incomplete", "error"))
MESSAGES_ENDS = frozenset(("message_stop", "error"))
"""Types of the last event, in the two dialects that name them."""


def dialect_of(path: str) -> Dialect:
    """The dialect of a path without a slash at its end."""
    if path.startswith("/api/"):
        return "ollama" if path in ("/api/chat", "/api/generate") else "ollama_more"
    if path in ("/v1/chat/completions", "/v1/completions"):
        return "chat"
    if path.startswith("/v1/messages"):
        return "messages"
    return "responses" if path == "/v1/responses" else "other"


def error_event(dialect: Dialect, body: dict[str, Any], *, number: int) -> bytes:
    """An error as the end of a stream that has begun.

    Args:
        body: the error as the body of an answer.
        number: of the next event, in dialects that number them.
    """
    if dialect in ("ollama", "ollama_more"):
        return msgspec.json.encode(body) + b"\n"
    if dialect == "responses":
        details = body["error"]
        body = {"type": "error", "code": details["code"], "message": details["message"], "param": None}
        body["sequence_number"] = number
    named = b"event: error\n" if dialect in ("responses", "messages") else b""
    done = b"data: [DONE]\n\n" if dialect == "chat" else b""
    return named + b"data: " + msgspec.json.encode(body) + b"\n\n" + done
