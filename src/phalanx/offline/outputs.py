"""Outputs of `phalanx.LLM`, with vLLM's names. Plain data."""

from __future__ import annotations

from msgspec import Struct


class Logprob(Struct, frozen=True):
    """A token's natural-log probability under the raw model distribution (before penalties and temperature)."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str


class CompletionOutput(Struct, frozen=True, kw_only=True):
    """One answer to a prompt."""

    index: int
    """Of the prompt's `n` answers."""
    text: str
    token_ids: list[int]
    """The stop token included."""
    finish_reason: str
    """`stop` (a stop token or text) or `length`."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: the token itself and the most likely ones; None where `logprobs` was not asked for."""


class RequestOutput(Struct, frozen=True, kw_only=True):
    """All answers to one prompt."""

    request_id: str
    prompt: str | None
    """The text as given, or as the chat template made it; None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, None for the first one; None where `prompt_logprobs` was not asked for."""
    outputs: list[CompletionOutput]
    usage: dict[str, object]
    """Numbers of tokens, as OpenAI's `usage`."""
    timing: dict[str, float]
    """Seconds of the first answer: queue, prefill, ttft, tpot."""
