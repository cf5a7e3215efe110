"""Log-probabilities of tokens as JSON, the same in OpenAI's chats and responses and in Ollama's answers."""

from __future__ import annotations

from typing import Any

from phalanx.server.answers import ScoredToken, TokenText

LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write


def finite(logprob: float) -> float:
    """A log-probability that JSON can write."""
    return max(logprob, LEAST_LOGPROB)


def scored_json(entry: ScoredToken) -> dict[str, Any]:
    """A token with the most likely ones at its place."""
    return {**_token_json(entry.token), "top_logprobs": [_token_json(piece) for piece in entry.top]}


def _token_json(piece: TokenText) -> dict[str, Any]:
    return {"token": piece.text, "logprob": finite(piece.logprob), "bytes": list(piece.data)}
