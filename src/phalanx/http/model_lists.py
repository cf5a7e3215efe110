"""Names and lists of models in the formats of several APIs.

Lists are built from OpenAI's entries, also those of other servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Card = Mapping[str, Any]
"""An entry of OpenAI's /v1/models."""

TAG = ":latest"
"""Ollama's clients add it to a model's name, or leave it out."""
LM_STUDIO = "/api/v0/models"
"""LM Studio's list, from which its clients read a model's context."""
LAST_TIME = 1 << 37  # seconds; datetime ends in the year 9999

FORMS: Sequence[Callable[[str], str]] = (
    lambda name: name,
    lambda name: name.removesuffix(TAG),
    lambda name: name.casefold().removesuffix(TAG),
)
"""Two names mean the same model if they are equal in one of these; the first form in which a name is found counts."""


def name_meant(asked: str, names: Iterable[str]) -> str | None:
    """The one of these names that a client means; it may add or leave out Ollama's tag, or use another case."""
    known = tuple(names)
    return next((name for form in FORMS for name in known if form(name) == form(asked)), None)


def model_list(cards: Sequence[Card], headers: Mapping[str, str], query: Mapping[str, str]) -> dict[str, Any]:
    """The body of /v1/models.

    Args:
        headers, query: the request's; they show which API's client asks.
    """
    body: dict[str, Any] = {"object": "list", "data": [model_card(card, headers) for card in cards]}
    if "anthropic-version" in headers:
        ids = [card["id"] for card in cards]
        body |= {"has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    if "client_version" in query:  # Codex; a description would replace its own instructions
        body["models"] = []
    return body


def model_card(card: Card, headers: Mapping[str, str]) -> dict[str, Any]:
    """The body of /v1/models/{name}, with the further fields of the client's API."""
    if "anthropic-version" in headers:
        return {**card, "type": "model", "display_name": card["id"], "created_at": _created(card)}
    if headers.get("user-agent", "").startswith("mistral-client"):
        able = {"completion_chat": True, "completion_fim": False, "function_calling": _calls_tools(card)}
        able |= {"fine_tuning": False, "vision": False}
        context = card.get("max_model_len")
        more = {"max_context_length": context} if context else {}
        return {**card, "type": "base", "name": card["id"], "capabilities": able, **more}
    return dict(card)


def lm_studio_list(cards: Iterable[Card]) -> dict[str, Any]:
    """The body of /api/v0/models."""
    return {"object": "list", "data": [lm_studio_card(card) for card in cards]}


def lm_studio_card(card: Card) -> dict[str, Any]:
    """The body of /api/v0/models/{name}."""
    context = card.get("max_model_len")
    return {
        "id": card["id"],
        "object": "model",
        "type": "llm",
        "publisher": card.get("owned_by") or "",
        "compatibility_type": "mlx",  # or "gguf": LM Studio knows no other
        "state": "loaded",
        "max_context_length": context,
        "loaded_context_length": context,
        "capabilities": ["tool_use"] if _calls_tools(card) else [],
    }


def _calls_tools(card: Card) -> bool:
    """phalanx's servers name their model's format of calls; others do not, and most can call tools."""
    return card.get("tool_call_parser", "") is not None


def _created(card: Card) -> datetime:
    created = card.get("created")
    return datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < LAST_TIME else 0, UTC)
