"""The JSON body of `/v1/responses`: names, types and sizes of its fields.

Unknown fields of the body are refused by name. Those of items and tools are ignored unless they hold content: clients
send back unchanged fields of other servers and tools. `responses_dialect.py` interprets the fields.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from phalanx.server.fields.json_fields import (
    SCHEMA_BYTES,
    TOOLS_BYTES,
    Reader,
    at_most,
    list_by,
    list_of,
    object_of,
    object_or_record,
    of_type,
    read_arguments,
    read_dict,
    read_text,
    read_variables,
    text_or,
    unread,
    unread_list,
)
from phalanx.server.fields.openai_bodies import (
    INERT,
    LATER,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    HistoryBody,
    ReasoningOptions,
    ThinkingOptions,
    TolerantBody,
    about,
)
from phalanx.server.fields.refusals import ONLY_TEXT

RECORDS = frozenset(
    "code_interpreter_call computer_call computer_call_output file_search_call image_generation_call "
    "mcp_approval_request mcp_approval_response mcp_call mcp_list_tools tool_search_call tool_search_output "
    "web_search_call".split()
)
"""Items about tools that other servers run. The model cannot call them here; their results are in the messages."""
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class InputPart(HistoryBody, kw_only=True):
    """A part of a message, of a call's output or of reasoning."""

    type: Annotated[str, about("input_text, output_text, refusal, or of reasoning: reasoning_text, summary_text.")]
    text: str | None = None
    refusal: str | None = None


class InputItem(HistoryBody, kw_only=True):
    """An item of the input."""

    type: Annotated[
        str | None,
        about(
            "message (when left out), reasoning, function_call, function_call_output, custom_tool_call or "
            "custom_tool_call_output. Records of tools that OpenAI runs itself are left out."
        ),
    ] = None
    role: Annotated[str | None, about("Of a message: system, developer, user or assistant.")] = None
    content: str | list[InputPart] | None = None
    summary: Annotated[list[InputPart] | None, about("Of reasoning.")] = None
    encrypted_content: Annotated[str | None, about("Of reasoning: only what this server wrote.")] = None
    call_id: str | None = None
    name: Annotated[str | None, about("Of a called tool.")] = None
    namespace: Annotated[str | None, about("Of a called tool.")] = None
    arguments: Annotated[str | dict[str, Any] | None, about("Of a called function: JSON.")] = None
    input: Annotated[str | None, about("Of a called custom tool.")] = None
    output: Annotated[str | list[InputPart] | None, about("Of a call.")] = None


class CustomFormat(TolerantBody, kw_only=True):
    """`format` of a custom tool: of the text that it takes. Described to the model; calls need not obey it."""

    syntax: Annotated[str | None, about("lark or regex.")] = None
    definition: str | None = None


class OfferedFunction(TolerantBody, kw_only=True):
    """A tool. Those of other types than function, custom and namespace run elsewhere, and are not offered."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, about("Of a function: JSON schema of its arguments.")] = None
    strict: Annotated[bool | None, about("Calls that have to be made obey the schema anyway.")] = None
    format: Annotated[CustomFormat | None, about("Of a custom tool.")] = None


class OfferedTool(OfferedFunction, kw_only=True):
    """A tool, or a namespace of several."""

    tools: Annotated[list[OfferedFunction] | None, about("Of a namespace: its tools.")] = None


class ResponseReasoning(TolerantBody, ReasoningOptions, kw_only=True):
    """`reasoning`"""

    generate_summary: Annotated[str | None, about("The older name of summary.")] = None


class TextFormat(Body, kw_only=True):
    """`text.format`"""

    type: Annotated[str, about("text, json_object or json_schema.")]
    name: Annotated[str | None, about("Accepted for compatibility; the model is not shown it.")] = None
    schema: Annotated[dict[str, Any] | None, about("A JSON schema that the answer matches.")] = None
    description: Annotated[str | None, about(INERT)] = None
    strict: Annotated[bool | None, about("Accepted for compatibility; the answer always matches the schema.")] = None


class TextOptions(Body, kw_only=True):
    """`text`"""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, about("Handed to the chat template.")] = None


class EventOptions(Body, kw_only=True):
    """`stream_options`"""

    include_obfuscation: Annotated[bool | None, about("Only false: no padding is ever added.")] = None


class ResponsesBody(Body, kw_only=True):
    """`POST /v1/responses`. Nothing is stored: every request brings the whole conversation."""

    input: Annotated[str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)], about("A text, or items.")]
    model: Annotated[str | None, about("A served model's name; the first one when left out.")] = None
    instructions: Annotated[str | None, about("A system message before the input.")] = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    max_output_tokens: Annotated[int | None, about("Without it, or with -1, as many as there is room for.")] = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        about('none, auto, required or any, {"type": "function", "name": ...} or {"type": "allowed_tools", ...}.'),
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("false: the answer ends with its first call.")] = None
    text: Annotated[TextOptions | None, about("What the answer looks like.")] = None
    reasoning: ResponseReasoning | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: Annotated[bool | None, about("Handed to the chat template.")] = None
    thinking_budget: Annotated[int | None, about("Handed to the chat template; few look at it.")] = None
    include: Annotated[
        list[str] | None,
        about(
            '"reasoning.encrypted_content": reasoning in a form that may be sent back. '
            '"message.output_text.logprobs". Others name parts of items that no answer here has.'
        ),
    ] = None
    top_logprobs: Annotated[int | None, about("0..20; more than 0 includes log-probabilities.")] = None
    temperature: Annotated[float | None, about("0 is greedy.")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, about("0 or -1 is off.")] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int | None, about("Any integer (taken modulo 2**64). The same seed gives the same tokens.")] = None
    stop: Annotated[str | list[str] | None, about("Up to 16 strings; the answer ends before the first.")] = None
    timeout: Annotated[float | None, about("Seconds; afterwards the response is incomplete. Ours.")] = None
    timing: Annotated[bool | None, about("Adds `timing` (seconds) beside `usage`. Ours.")] = None
    num_speculative_tokens: Annotated[int | None, about("Tokens drafted in a step, at most. Ours.")] = None
    cache_salt: Annotated[str | None, about("Cached prefixes are shared only between requests with the same salt.")] = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None
    metadata: Annotated[dict[str, Any] | None, about("Repeated in the response.")] = None
    truncation: Annotated[
        str | None, about('"disabled" or "auto": a prompt that is longer than the context is refused with both.')
    ] = None
    store: Annotated[bool | None, about("Nothing is stored; the response says so.")] = None
    previous_response_id: Annotated[str | None, about(LATER)] = None
    conversation: Annotated[Any, about(LATER)] = None
    background: Annotated[bool | None, about("Only false.")] = None
    prompt: Annotated[Any, about(LATER)] = None
    context_management: Annotated[list[Any] | None, about(LATER)] = None
    moderation: Annotated[Any, about(LATER)] = None
    max_tool_calls: Annotated[int | None, about("Of tools that the server runs; here are none.")] = None
    user: Annotated[str | None, about(INERT)] = None
    safety_identifier: Annotated[str | None, about(INERT)] = None
    service_tier: Annotated[str | None, about(INERT)] = None
    prompt_cache_key: Annotated[str | None, about(INERT)] = None
    prompt_cache_retention: Annotated[str | None, about(INERT)] = None
    prompt_cache_options: Annotated[Any, about(INERT)] = None
    client_metadata: Annotated[Any, about(INERT)] = None
    access_programs: Annotated[Any, about(INERT)] = None
    prediction: Annotated[Any, about(INERT)] = None
    safe_prompt: Annotated[bool | None, about("Accepted for compatibility; nothing is put before the prompt.")] = None
    usage: Annotated[Any, about("Accepted for compatibility; the response always has it.")] = None


READERS: dict[tuple[type, str], Reader] = {}
"""How the large fields are read."""

_parts = list_by(of_type(InputPart, TEXT_PARTS, ONLY_TEXT, READERS), MAX_PARTS)
_item = object_or_record(InputItem, RECORDS, READERS)
READERS.update(
    {
        (ResponsesBody, "input"): text_or(list_by(_item, MAX_MESSAGES)),
        (ResponsesBody, "instructions"): read_text,
        (ResponsesBody, "tools"): at_most(TOOLS_BYTES, list_of(OfferedTool, MAX_TOOLS, READERS)),
        (ResponsesBody, "text"): object_of(TextOptions, READERS),
        (ResponsesBody, "reasoning"): object_of(ResponseReasoning, READERS),
        (ResponsesBody, "thinking"): object_of(ThinkingOptions, READERS),
        (ResponsesBody, "stream_options"): object_of(EventOptions, READERS),
        (ResponsesBody, "chat_template_kwargs"): read_variables,
        (ResponsesBody, "context_management"): unread_list,
        (InputPart, "text"): read_text,
        (InputPart, "refusal"): read_text,
        (InputItem, "content"): text_or(_parts),
        (InputItem, "summary"): _parts,
        (InputItem, "encrypted_content"): read_text,
        (InputItem, "arguments"): read_arguments,
        (InputItem, "input"): read_text,
        (InputItem, "output"): text_or(_parts),
        (OfferedFunction, "description"): read_text,
        (OfferedFunction, "parameters"): read_variables,
        (OfferedFunction, "format"): object_of(CustomFormat, READERS),
        (CustomFormat, "definition"): read_text,
        (OfferedTool, "tools"): list_of(OfferedFunction, MAX_TOOLS, READERS),
        (TextOptions, "format"): object_of(TextFormat, READERS),
        (TextFormat, "schema"): at_most(SCHEMA_BYTES, read_dict),
    }
)
READERS.update(
    {
        (ResponsesBody, name): unread
        for name in (
            "conversation", "prompt", "moderation", "prompt_cache_options", "client_metadata", "access_programs",
            "prediction", "usage",
        )
    }
)  # fmt: skip
