"""Requests after parsing: frozen, complete, every default filled in. Only these can be scheduled.

Does not know the JSON they came from.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from phalanx.types import Sampling


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """Sampling where the client says nothing: the model's generation_config.json, else OpenAI's (as vLLM)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Served(Struct, frozen=True, kw_only=True):
    """What this server serves and allows."""

    names: tuple[str, ...]
    max_n: int
    defaults: GenerationDefaults
    eos_ids: frozenset[int]
    template_kwargs: Mapping[str, object]


class Options(Struct, frozen=True, kw_only=True):
    """What chat and text completions share."""

    model: str
    n: int
    stream: bool
    include_usage: bool
    timing: bool
    speculation: bool  # count drafts in `usage`
    most_drafts: int | None  # in a step; None: as the engine thinks best
    sampling: Sampling  # of choice 0, with the client's seed
    seeded: bool  # False: the server draws a seed
    max_tokens: int | None  # None: what the context has room for
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    timeout_s: float | None


class Conversation(Struct, frozen=True, kw_only=True):
    """Messages and how to render them."""

    messages: list[dict[str, str]]
    template_kwargs: dict[str, object]
    add_generation_prompt: bool
    continue_final_message: bool


class ChatRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`"""

    options: Options
    conversation: Conversation


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/completions`"""

    options: Options
    prompts: tuple[str | list[int], ...]
    echo: bool


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """`POST /tokenize`"""

    source: str | Conversation
    add_special_tokens: bool
    with_texts: bool
