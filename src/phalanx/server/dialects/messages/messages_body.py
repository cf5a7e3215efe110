"""The bodies of `/v1/messages` and `/v1/messages/count_tokens` (Anthropic): names, types and sizes of fields.

Unknown fields are ignored unless they hold content, since clients of this API send new ones every month.
`messages_dialect.py` interprets the fields.
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
    read_dict,
    read_text,
    read_variables,
    text_or,
    unread_list,
)
from phalanx.server.fields.openai_bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, HistoryBody, TolerantBody, about

RECORDS = frozenset(
    "server_tool_use mcp_tool_use mcp_tool_result web_search_tool_result web_fetch_tool_result "
    "tool_search_tool_result code_execution_tool_result bash_code_execution_tool_result "
    "text_editor_code_execution_tool_result redacted_thinking".split()
)
"""Blocks of an answer that only Anthropic's servers can use: tools that they run, and sealed thinking. They are left
out; the results of those tools are in the texts that follow."""


class TextPart(HistoryBody, kw_only=True):
    """A block of the system prompt, or of a call's result."""

    type: Annotated[str, about('"text"; of a result "tool_reference" too.')]
    text: str | None = None
    tool_name: Annotated[str | None, about("Of a reference: the tool that was found. The model reads its name.")] = None


class ContentBlock(HistoryBody, kw_only=True):
    """A block of a message."""

    type: Annotated[
        str, about("text, tool_use, tool_result or thinking. Records of tools that Anthropic ran are left out.")
    ]
    text: str | None = None
    thinking: Annotated[str | None, about("Reasoning of an earlier answer; its signature is not checked.")] = None
    id: Annotated[str | None, about("Of a call.")] = None
    name: Annotated[str | None, about("Of the called tool.")] = None
    input: Annotated[dict[str, Any] | None, about("The arguments of a call.")] = None
    tool_use_id: Annotated[str | None, about("Of a result: the call it answers.")] = None
    content: Annotated[str | list[TextPart] | None, about("Of a result.")] = None
    is_error: Annotated[bool | None, about("The model reads `Error: ` before the result.")] = None


class MessageBody(HistoryBody, kw_only=True):
    """A message of the conversation."""

    role: Annotated[str, about("user, assistant or system.")]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)]


class MessagesTool(TolerantBody, kw_only=True):
    """An entry of `tools`."""

    type: Annotated[str | None, about('"custom", or absent. Others are left out: Anthropic runs them.')] = None
    name: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, about("JSON schema of the arguments, an object.")] = None


class ToolChoice(TolerantBody, kw_only=True):
    """`tool_choice`"""

    type: Annotated[str, about("auto, any, tool or none.")]
    name: Annotated[str | None, about("Of the type tool.")] = None
    disable_parallel_tool_use: Annotated[bool | None, about("The answer ends with its first call.")] = None


class ThinkingBody(TolerantBody, kw_only=True):
    """`thinking`"""

    type: Annotated[str, about("enabled, adaptive or disabled.")]
    budget_tokens: Annotated[int | None, about("Handed to the chat template as `thinking_budget`.")] = None
    display: Annotated[str | None, about('With "omitted", blocks of thinking have no text.')] = None


class OutputFormat(TolerantBody, kw_only=True):
    """What the answer looks like."""

    type: Annotated[str, about("Only json_schema.")]
    schema: Annotated[dict[str, Any] | None, about("A JSON schema that the answer matches.")] = None


class OutputConfig(TolerantBody, kw_only=True):
    """`output_config`"""

    effort: Annotated[str | None, about("Handed to the chat template as `reasoning_effort`.")] = None
    format: OutputFormat | None = None


class MessagesBody(TolerantBody, kw_only=True):
    """`POST /v1/messages`; without `max_tokens`, `POST /v1/messages/count_tokens`"""

    messages: Annotated[list[MessageBody], Meta(max_length=MAX_MESSAGES)]
    model: Annotated[str | None, about("A served model's name; the first one when left out.")] = None
    max_tokens: Annotated[int | None, about("Most output tokens; lowered to what there is room for; -1: that.")] = None
    system: Annotated[str | list[TextPart] | None, about("A system message before the others.")] = None
    stream: bool | None = None
    temperature: Annotated[float | None, about("0 is greedy.")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, about("0 or -1 is off.")] = None
    stop_sequences: Annotated[list[str] | None, about("Up to 16; the answer ends before the first.")] = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, about("The older place of output_config.format.")] = None
    mcp_servers: Annotated[list[Any] | None, about("Only an empty list.")] = None
    timeout: Annotated[float | None, about('Seconds; afterwards the answer ends with "max_tokens". Ours.')] = None
    cache_salt: Annotated[str | None, about("Cached prefixes are shared only between requests with the same salt.")] = (
        None
    )


READERS: dict[tuple[type, str], Reader] = {}
_block = object_or_record(ContentBlock, RECORDS, READERS)
READERS.update(
    {
        (TextPart, "text"): read_text,
        (ContentBlock, "text"): read_text,
        (ContentBlock, "thinking"): read_text,
        (ContentBlock, "input"): read_variables,
        (ContentBlock, "content"): text_or(list_of(TextPart, MAX_PARTS, READERS)),
        (MessageBody, "content"): text_or(list_by(_block, MAX_PARTS)),
        (MessagesTool, "description"): read_text,
        (MessagesTool, "input_schema"): read_variables,
        (OutputFormat, "schema"): at_most(SCHEMA_BYTES, read_dict),
        (OutputConfig, "format"): object_of(OutputFormat, READERS),
        (MessagesBody, "messages"): list_of(MessageBody, MAX_MESSAGES, READERS),
        (MessagesBody, "system"): text_or(list_of(TextPart, MAX_PARTS, READERS)),
        (MessagesBody, "tools"): at_most(TOOLS_BYTES, list_of(MessagesTool, MAX_TOOLS, READERS)),
        (MessagesBody, "output_config"): object_of(OutputConfig, READERS),
        (MessagesBody, "output_format"): object_of(OutputFormat, READERS),
        (MessagesBody, "mcp_servers"): unread_list,
    }
)
