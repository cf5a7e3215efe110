"""The JSON bodies that clients send: names, types and sizes of fields. `requests/body_parsing.py` reads them.

They also describe the API in OpenAPI. `validate.py` interprets the values.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

INERT = "Accepted for compatibility; does not change the answer."
LATER = "Not supported yet: anything but its neutral value is answered 400."
INERT_IN_HISTORY = ("annotations", "parsed", "provider_specific_fields", "reasoning_details", "thinking_blocks")
"""Fields of messages that clients got from servers and send back. They repeat the content of other fields."""
MAX_MESSAGES = 4096  # OpenAI takes 2,048
MAX_PARTS = 4096  # of one message's content
MAX_PROMPTS = 1024  # --max-prompts allows no more
MAX_TOOLS = 512  # OpenAI takes 128; clients that join several tool servers send more
MAX_CALLS = 256  # of one message


class Body(Struct, forbid_unknown_fields=True):
    """Types are strict ("5" is not 5), and null counts as absent."""


class TolerantBody(Body, forbid_unknown_fields=False):
    """Unknown fields are ignored, for dialects whose clients send new ones every month."""


class HistoryBody(TolerantBody):
    """A piece of a conversation. Unknown fields are ignored unless they hold an image, sound or file."""


def about(text: str) -> Meta:
    """The description of a body's field in `/openapi.json`."""
    return Meta(description=text)


PROMPT = Meta(
    extra_json_schema={
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "maxItems": MAX_PROMPTS},
        ]
    }
)


class StreamOptions(Body, kw_only=True):
    """`stream_options`"""

    include_usage: Annotated[bool | None, about("One more chunk with `usage` and no choices, at the end.")] = None
    continuous_usage_stats: Annotated[bool | None, about("The `usage` so far in every chunk.")] = None
    include_obfuscation: Annotated[bool | None, about("Only false: no padding is ever added.")] = None


class ContentPart(HistoryBody, kw_only=True):
    """A part of a message's content."""

    type: Annotated[str, about('Only "text".')]
    text: str | None = None


class FunctionBody(TolerantBody, kw_only=True):
    """A function that may be called."""

    name: Annotated[str, about("1 to 128 of A-Z, a-z, 0-9, `_`, `-`, `.`")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, about("JSON schema of the arguments, an object.")] = None
    strict: Annotated[
        bool | None, about("Calls that have to be made obey the schema anyway; others are as the model writes them.")
    ] = None


class ToolBody(TolerantBody, kw_only=True):
    """An entry of `tools`."""

    type: Annotated[str, about('Only "function".')]
    function: FunctionBody


class CalledFunctionBody(HistoryBody, kw_only=True):
    """The function that a call in the history names, and its arguments."""

    name: str
    arguments: Annotated[
        str | dict[str, Any] | None, about("A JSON object, as text or as it is; empty for no arguments.")
    ] = None
    parsed_arguments: Annotated[Any, about(INERT)] = None


class ToolCallBody(HistoryBody, kw_only=True):
    """A call in the history."""

    id: str
    function: CalledFunctionBody
    type: Annotated[str | None, about('Only "function".')] = None
    provider_specific_fields: Annotated[Any, about(INERT)] = None


class ChatMessage(HistoryBody, kw_only=True):
    """A message of a chat."""

    role: Annotated[str, about("system, developer, user, assistant or tool.")]
    content: Annotated[
        str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None,
        about("Only an assistant's message may be without."),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[str | None, about("The content of an assistant's message that has none.")] = None
    annotations: Annotated[Any, about(INERT)] = None
    parsed: Annotated[Any, about(INERT)] = None
    provider_specific_fields: Annotated[Any, about(INERT)] = None
    reasoning_details: Annotated[Any, about(INERT)] = None
    thinking_blocks: Annotated[Any, about(INERT)] = None
    tool_calls: Annotated[
        Annotated[list[ToolCallBody], Meta(max_length=MAX_CALLS)] | None, about("Of an assistant's message.")
    ] = None
    tool_call_id: Annotated[str | None, about("Of a tool's message: the call it answers.")] = None
    function_call: Annotated[Any, about("Only null: a call belongs into tool_calls.")] = None


class JsonSchemaFormat(Body, kw_only=True):
    """`response_format.json_schema`"""

    name: Annotated[str, about("Accepted for compatibility; the model is not shown it.")]
    schema: Annotated[dict[str, Any], about("A JSON schema that the answer matches.")]
    description: Annotated[str | None, about(INERT)] = None
    strict: Annotated[bool | None, about("Accepted for compatibility; the answer always matches the schema.")] = None


class ResponseFormatBody(Body, kw_only=True):
    """`response_format`"""

    type: Annotated[str, about("text, json_object (also called json) or json_schema.")]
    json_schema: JsonSchemaFormat | None = None
    schema: Annotated[dict[str, Any] | None, about("Of json_object: a JSON schema, as llama.cpp takes it.")] = None
    value: Annotated[dict[str, Any] | None, about("Of json_object: the same, by TGI's name.")] = None


class StructuredOutputs(Body, kw_only=True):
    """`structured_outputs`, with vLLM's names: one of json, regex, choice, grammar and json_object."""

    json: Annotated[dict[str, Any] | str | None, about("A JSON schema, or its text.")] = None
    regex: Annotated[str | None, about("Matches the whole answer; no look-around.")] = None
    choice: Annotated[list[str] | None, about("The answer is one of these texts.")] = None
    grammar: Annotated[str | None, about("Lark, or llama.cpp's GBNF.")] = None
    json_object: Annotated[bool | None, about("The answer is a JSON object.")] = None
    whitespace_pattern: Annotated[str | None, about("Of JSON: what may stand between two of its tokens.")] = None
    disable_any_whitespace: Annotated[bool | None, about("Of JSON: nothing stands between two of its tokens.")] = None
    disable_fallback: Annotated[bool | None, about(INERT)] = None
    disable_additional_properties: Annotated[bool | None, about("Only false.")] = None
    structural_tag: Annotated[str | None, about(LATER)] = None


class ThinkingOptions(Body, kw_only=True):
    """`thinking`, as Anthropic's, DeepSeek's and GLM's APIs have it."""

    type: Annotated[str, about("enabled, disabled, adaptive or auto. The template's `enable_thinking`.")]
    budget_tokens: Annotated[int | None, about("Handed to the chat template as `thinking_budget`.")] = None


class ReasoningOptions(Body, kw_only=True):
    """`reasoning`, as OpenRouter's and OpenAI's APIs have it."""

    effort: Annotated[str | None, about('For the chat template; "none" also sets its `enable_thinking` to false.')] = (
        None
    )
    enabled: Annotated[bool | None, about("The chat template's `enable_thinking`.")] = None
    max_tokens: Annotated[int | None, about("Handed to the chat template as `thinking_budget`.")] = None
    exclude: Annotated[bool | None, about("The answer leaves reasoning out; /v1/responses takes only false.")] = None
    summary: Annotated[
        str | None, about("/v1/responses: reasoning is the item's summary. A chat has all reasoning, and no summary.")
    ] = None


class UsageOptions(Body, kw_only=True):
    """`usage`, as OpenRouter's API has it."""

    include: Annotated[bool | None, about("As stream_options.include_usage. Whole answers always have `usage`.")] = None


class SamplingBody(Body, kw_only=True):
    """The fields that chat and text completions share."""

    model: Annotated[str | None, about("A served model's name; the first one when left out.")] = None
    max_tokens: Annotated[
        int | None,
        about("Most output tokens; -1: what there is room for. Without it, so in a chat, and 16 of a completion."),
    ] = None
    n: Annotated[int | None, about("Number of choices per prompt.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    seed: Annotated[int | None, about("Any integer (taken modulo 2**64). The same seed gives the same tokens.")] = None
    temperature: Annotated[float | None, about("0 is greedy.")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, about("0 or -1 is off.")] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, about("Token id (as a string) -> -100..100.")] = None
    stop: Annotated[str | list[str] | None, about("Up to 16 strings; the answer ends before the first.")] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    timeout: Annotated[float | None, about('Seconds; afterwards the answer ends with "length". Ours.')] = None
    timing: Annotated[bool | None, about("Adds `timing` (seconds) beside `usage`. Ours.")] = None
    num_speculative_tokens: Annotated[
        int | None, about("Tokens drafted for this request in a step, at most; 0: none. Changes speed only. Ours.")
    ] = None
    speculation: Annotated[
        bool | None,
        about("Adds `completion_tokens_details` to `usage`: predicted tokens, accepted and rejected. Ours."),
    ] = None
    response_format: Annotated[ResponseFormatBody | None, about("What the answer looks like.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, about("What the answer looks like, as in vLLM.")] = None
    guided_json: Annotated[dict[str, Any] | str | None, about("structured_outputs.json, by its older name.")] = None
    guided_regex: Annotated[str | None, about("structured_outputs.regex, by its older name.")] = None
    guided_choice: Annotated[list[str] | None, about("structured_outputs.choice, by its older name.")] = None
    guided_grammar: Annotated[str | None, about("structured_outputs.grammar, by its older name.")] = None
    user: Annotated[str | None, about(INERT)] = None
    metadata: Annotated[dict[str, Any] | None, about(INERT)] = None
    store: Annotated[bool | None, about(INERT)] = None
    service_tier: Annotated[str | None, about(INERT)] = None
    safety_identifier: Annotated[str | None, about(INERT)] = None
    prompt_cache_key: Annotated[str | None, about(INERT)] = None
    prompt_cache_retention: Annotated[str | None, about(INERT)] = None
    cache_salt: Annotated[str | None, about("Cached prefixes are shared only between requests with the same salt.")] = (
        None
    )
    best_of: Annotated[int | None, about("Only the same number as n.")] = None
    use_beam_search: Annotated[bool | None, about("Only false.")] = None
    length_penalty: Annotated[float | None, about("Only 1.")] = None
    bad_words: Annotated[list[str] | None, about("Only an empty list.")] = None
    priority: Annotated[int | None, about("Only 0.")] = None
    no_stop_trim: Annotated[bool | None, about("Only false.")] = None
    separate_reasoning: Annotated[bool | None, about("Only true.")] = None
    stream_reasoning: Annotated[bool | None, about("Only true.")] = None
    include_reasoning: Annotated[bool | None, about("Only true.")] = None
    return_hidden_states: Annotated[bool | None, about("Only false.")] = None


class ChatBody(SamplingBody, kw_only=True):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, about("The newer name of max_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, about("0..20; needs logprobs.")] = None
    reasoning_effort: Annotated[
        str | None, about('Handed to the chat template; "none" also sets its `enable_thinking` to false.')
    ] = None
    thinking: ThinkingOptions | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: Annotated[bool | None, about("Handed to the chat template.")] = None
    thinking_budget: Annotated[int | None, about("Handed to the chat template; few look at it.")] = None
    prediction: Annotated[Any, about(INERT)] = None
    safe_prompt: Annotated[bool | None, about("Accepted for compatibility; nothing is put before the prompt.")] = None
    verbosity: Annotated[str | None, about("Handed to the chat template.")] = None
    echo: Annotated[bool | None, about("Only false.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: Annotated[bool | None, about("false: the answer ends with its first call.")] = None
    modalities: Annotated[list[str] | None, about('Only ["text"].')] = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        about(
            '"auto", "required" or "any", {"type": "function", "function": {"name": ...}}, or "none": they are not '
            "shown."
        ),
    ] = None
    functions: Annotated[list[Any] | None, about(LATER)] = None
    function_call: Annotated[str | dict[str, Any] | None, about(LATER)] = None


class CompletionBody(SamplingBody, kw_only=True):
    """`POST /v1/completions`"""

    prompt: Annotated[str | list[str | int | list[int]], PROMPT]  # a list's items are of one kind
    echo: Annotated[bool | None, about("The prompt (and its logprobs) come before the answer.")] = None
    logprobs: Annotated[int | None, about("0..20 most likely tokens beside the chosen one.")] = None
    suffix: Annotated[str | None, about(LATER)] = None


class TokenizeBody(Body, kw_only=True):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: list[int]
