"""Requests for embeddings and scores: their paths, and the error that says what to do.

Their clients name an embedding model, so an error about its name alone would mislead people.
"""

from __future__ import annotations

from phalanx.errors import InvalidRequest

BARE_PATHS = ("/embeddings", "/embed", "/rerank", "/score", "/pooling", "/classify")
"""Those of vLLM's and Hugging Face's servers outside of /v1."""
VECTOR_PATHS = (
    *("/v1/embeddings", "/v1/embed", "/v2/embed", "/api/embed", "/api/embeddings"),
    *("/v1/rerank", "/v2/rerank", "/v1/score"),
    *BARE_PATHS,
)
"""Those of OpenAI's, Cohere's, Ollama's, Jina's and vLLM's APIs."""


def no_vectors(reason: str) -> InvalidRequest:
    """The refusal.

    Args:
        reason: what is served, as a sentence.
    """
    remedy = (
        "phalanx makes no embeddings and ranks nothing yet; models for that are to come in a later version. Until "
        "then, give the client another server for its embeddings."
    )
    return InvalidRequest(f"{reason} {remedy}", param="model", code="unsupported_value")
