"""Parsed requests: frozen, with every default filled in. The server schedules only these.

Does not know the JSON bodies.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from phalanx.types import Sampling


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """Sampling parameters for fields that a request leaves out: generation_config.json's, else OpenAI's (as vLLM)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Served(Struct, frozen=True, kw_only=True):
    """The served model as the API shows it, and the API's limits."""

    names: tuple[str, ...]  # the first one is the default
    max_n: int  # choices per request
    defaults: GenerationDefaults
    eos_ids: frozenset[int]
    template_kwargs: Mapping[str, object]


class Options(Struct, frozen=True, kw_only=True):
    """The options of a request, the same for chat and text completions."""

    model: str
    n: int
    stream: bool
    include_usage: bool
    timing: bool
    speculation: bool  # report accepted and rejected draft tokens in `usage`
    most_drafts: int | None  # drafted tokens per step, at most; None: the engine decides
    sampling: Sampling  # of choice 0, with the client's seed
    seeded: bool  # False: the server draws a seed
    max_tokens: int | None  # None: as many as the context has room for
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
