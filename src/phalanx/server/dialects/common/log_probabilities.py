"""Log-probabilities of tokens as JSON, the same in OpenAI's chats and responses and in Ollama's answers."""

from __future__ import annotations

from typing import Any

from phalanx.server.answers.deltas import ScoredToken, TokenText
from phalanx.server.fields.json_pieces import finite


def scored_json(entry: ScoredToken) -> dict[str, Any]:
    """A token with the most likely ones at its position."""
    return {**_token_json(entry.token), "top_logprobs": [_token_json(piece) for piece in entry.top]}


def _token_json(piece: TokenText) -> dict[str, Any]:
    return {"token": piece.text, "logprob": finite(piece.logprob), "bytes": list(piece.data)}
