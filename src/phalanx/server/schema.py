"""The JSON bodies that clients send, as pydantic models: names and types of fields.

They describe the API in OpenAPI and refuse values of wrong types. Undeclared fields are kept, so that `validate.py` can
refuse them by name. Does not know what values mean, nor which of them the server supports (`validate.py`).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

INERT = "Accepted for compatibility; does not change the answer."
LATER = "Not supported yet: anything but its neutral value is answered 400."


class Body(BaseModel):
    """Strict types ("5" is not 5); unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="One more chunk with `usage` and no choices, at the end.")
    include_obfuscation: bool | None = Field(None, description="Only false: no padding is ever added.")


class ContentPart(Body):
    type: str = Field(description='Only "text".')
    text: str | None = None


class ChatMessage(Body):
    role: str = Field(description="system, developer, user or assistant.")
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = Field(None, description=INERT)
    tool_calls: list[Any] | None = Field(None, description=LATER)


class SamplingBody(Body):
    """The fields that chat and text completions share."""

    model: str | None = Field(None, description="A served model's name; the first one when left out.")
    max_tokens: int | None = Field(None, description="Most output tokens; all the context has room for by default.")
    n: int | None = Field(None, description="Number of choices per prompt.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, description="Any integer (taken modulo 2**64). The same seed gives the same tokens.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 is off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id (as a string) -> -100..100.")
    stop: str | list[str] | None = Field(None, description="Up to 16 strings; the answer ends before the first.")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    timeout: float | None = Field(None, description='Seconds; afterwards the answer ends with "length". Ours.')
    timing: bool | None = Field(None, description="Adds `timing` (seconds) beside `usage`. Ours.")
    num_speculative_tokens: int | None = Field(
        None, description="Tokens drafted for this request in a step, at most; 0: none. Changes speed only. Ours."
    )
    speculation: bool | None = Field(
        None, description="Adds `completion_tokens_details` to `usage`: predicted tokens, accepted and rejected. Ours."
    )
    user: str | None = Field(None, description=INERT)
    metadata: dict[str, Any] | None = Field(None, description=INERT)
    store: bool | None = Field(None, description=INERT)
    service_tier: str | None = Field(None, description=INERT)
    safety_identifier: str | None = Field(None, description=INERT)
    prompt_cache_key: str | None = Field(None, description=INERT)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`"""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="0..20; needs logprobs.")
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = Field(None, description=INERT)
    modalities: list[str] | None = Field(None, description='Only ["text"].')
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"}.')
    tools: list[Any] | None = Field(None, description=LATER)
    tool_choice: str | dict[str, Any] | None = Field(None, description=LATER)
    functions: list[Any] | None = Field(None, description=LATER)
    function_call: str | dict[str, Any] | None = Field(None, description=LATER)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`"""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = Field(None, description="The prompt (and its logprobs) come before the answer.")
    logprobs: int | None = Field(None, description="0..20 most likely tokens beside the chosen one.")
    best_of: int | None = Field(None, description="Only the same number as n.")
    suffix: str | None = Field(None, description=LATER)


class TokenizeBody(Body):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: list[int]
