"""`SamplingParams`: how an answer is drawn, with vLLM's names. The flags of `phalanx generate` come from it.

Only carries the values. `server/requests/sampling_fields.py` decides what they mean and which of them are out of range.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from phalanx.config import Count, Flag, Size

Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class StructuredOutputsParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The format of an answer: one of json, regex, choice, grammar and json_object."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    """An expression that matches the whole answer; it has no look-around."""
    choice: list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A grammar in Lark, or in llama.cpp's GBNF."""
    json_object: bool | None = None
    """The answer is a JSON object."""
    whitespace_pattern: str | None = None
    """Of JSON: an expression for what may stand between two of its tokens."""
    disable_any_whitespace: bool | None = None
    """Of JSON: nothing stands between two of its tokens."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None stands for the default of `phalanx serve`: the model's generation_config.json, else OpenAI's.

    Unlike vLLM's, `max_tokens` is not 16 by default, but what the context has room for.
    """

    n: int = 1
    """Number of answers per prompt."""
    max_tokens: Annotated[Count | None, Flag(default="what the context has room for")] = None
    """Output tokens, at most."""
    temperature: Annotated[Size | None, Flag("Sampling", default="the model's")] = None
    """Divides the logits; 0 is greedy."""
    top_p: Annotated[Share | None, Flag("Sampling", default="the model's")] = None
    """Draws from the likeliest tokens that have this probability together; 1 is all."""
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, Flag("Sampling", default="the model's")] = None
    """Draws from so many of the likeliest tokens; 0 or -1 is all."""
    min_p: Annotated[Share | None, Flag("Sampling", default="the model's")] = None
    """Least probability, as a share of the likeliest token's; 0 is off."""
    seed: Annotated[int | None, Flag("Sampling", default="drawn for each prompt")] = None
    """The same seed gives the same tokens."""
    stop: Annotated[str | list[str] | None, Flag()] = None
    """End before this text; may be repeated."""
    stop_token_ids: list[int] | None = None
    """The answer ends with the first of these tokens."""
    repetition_penalty: float | None = None
    """Above 1: makes tokens of the prompt and the answer less likely."""
    presence_penalty: float | None = None
    """Above 0: makes tokens of the answer less likely."""
    frequency_penalty: float | None = None
    """Above 0: makes tokens of the answer less likely each time they occur."""
    logit_bias: dict[int, float] | None = None
    """Token id -> bias of its logit."""
    min_tokens: int | None = None
    """Before so many tokens, no stop token and no stop text ends the answer."""
    ignore_eos: bool | None = None
    """The model's end token does not end the answer."""
    include_stop_str_in_output: bool | None = None
    """The text that ended the answer is part of it."""
    skip_special_tokens: bool | None = None
    """Special tokens have no text; None is yes."""
    logprobs: int | None = None
    """Log-probability of every output token and of so many of the most likely ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """The answer's format; None: any text."""

    def fields(self) -> dict[str, Any]:
        """The set values as fields that chat and completions share; without log-probabilities."""
        given: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return {name: value for name, value in given.items() if name not in ("logprobs", "prompt_logprobs")}
