"""Parses the bytes of a body into a typed body, with readers for the large fields of OpenAI's bodies.

`json_fields.py` reads field by field, in short calls; other dialects have readers of their own. `validate.py`
interprets the fields.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from functools import partial
from typing import Any, TypeVar

from phalanx.errors import InvalidRequest
from phalanx.server.fields.json_fields import (
    SCHEMA_BYTES,
    TOOLS_BYTES,
    Reader,
    Readers,
    at_most,
    decode,
    list_by,
    list_of,
    object_of,
    of_type,
    read_arguments,
    read_dict,
    read_object,
    read_text,
    read_variables,
    unread,
    unread_list,
)
from phalanx.server.fields.openai_bodies import (
    INERT_IN_HISTORY,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_TOOLS,
    Body,
    CalledFunctionBody,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    DetokenizeBody,
    FunctionBody,
    JsonSchemaFormat,
    ReasoningOptions,
    ResponseFormatBody,
    SamplingBody,
    StreamOptions,
    StructuredOutputs,
    ThinkingOptions,
    TokenizeBody,
    ToolBody,
    ToolCallBody,
    UsageOptions,
)
from phalanx.server.fields.refusals import ANSWER_FORMATS, ONLY_FUNCTIONS, ONLY_TEXT

IDS_BYTES = 1 << 18  # token ids converted in one call, in 2 ms

B = TypeVar("B", bound=Body)


def parse_body(data: bytes, kind: type[B], max_ids: int, readers: Readers | None = None) -> B:
    """The JSON object `data` as `kind`. null counts as absent. A list of prompts has items of one type.

    A byte order mark before the object, from clients on Windows, is ignored.

    Args:
        max_ids: of a list of token ids; the context.
        readers: of the large fields; None: of OpenAI's.

    Raises:
        InvalidRequest: it is not a JSON object, or has a field that is unknown, missing, repeated, too large or of a
            wrong type; names the field.
    """
    ids: dict[tuple[type, str], Reader] = {
        (CompletionBody, "prompt"): partial(_prompts, max_ids=max_ids),
        (DetokenizeBody, "tokens"): partial(_ids, max_ids=max_ids),
    }
    return read_object(data.removeprefix(BOM_UTF8), kind, "", {**(LARGE if readers is None else readers), **ids})


# -- fields that may be large --------------------------------------------------------------------------------------


def _content(data: bytes, path: str) -> str | list[ContentPart]:
    if data[:1] != b"[":
        return read_text(data, path)
    return list_by(_part, MAX_PARTS)(data, path)


def _prompts(data: bytes, path: str, *, max_ids: int) -> str | list[str] | list[int] | list[list[int]]:
    """The first item decides the kind of the list."""
    if data[:1] != b"[":
        return read_text(data, path)
    first = re.match(rb"\[\s*(.)", data, re.DOTALL)
    match first and first[1]:
        case b'"':
            return list_by(read_text, MAX_PROMPTS)(data, path)
        case b"[":
            return list_by(partial(_ids, max_ids=max_ids), MAX_PROMPTS)(data, path)
    return _ids(data, path, max_ids=max_ids)


def _ids(data: bytes, path: str, *, max_ids: int) -> list[int]:
    """A list of integers, counted and then converted in pieces."""
    if data[:1] == b"[" and (n_ids := data.count(b",") + 1) > max_ids:
        message = f"This model's maximum context length is {max_ids} tokens. However, {path} has {n_ids} items."
        raise InvalidRequest(message, param=path, code="context_length_exceeded")
    if data[:1] != b"[" or len(data) <= IDS_BYTES:
        ids: list[int] = decode(data, list[int], path)
        return ids
    ids = []
    start, end = 1, len(data) - 1
    while start < end:
        cut = end if end - start <= IDS_BYTES else data.rfind(b",", start, start + IDS_BYTES)
        if cut < 0:
            raise InvalidRequest(f"{path} has something longer than {IDS_BYTES} bytes between two commas.", param=path)
        ids += decode(b"[" + data[start:cut] + b"]", list[int], path, first=len(ids))
        start = cut + 1
    return ids


def _schema_or_text(data: bytes, path: str) -> dict[str, Any] | str:
    schema: dict[str, Any] | str = decode(data, dict[str, Any] | str, path)
    return schema


LARGE: dict[tuple[type, str], Reader] = {}  # filled below: readers of objects look their fields up in it
_part = of_type(ContentPart, ("text",), ONLY_TEXT, LARGE)
_tool_call = of_type(ToolCallBody, ("function",), ONLY_FUNCTIONS, LARGE)
_tool = of_type(ToolBody, ("function",), ONLY_FUNCTIONS, LARGE)
_format = of_type(ResponseFormatBody, ("text", "json_object", "json", "json_schema"), ANSWER_FORMATS, LARGE)
_messages = list_of(ChatMessage, MAX_MESSAGES, LARGE)
_tools = at_most(TOOLS_BYTES, list_by(_tool, MAX_TOOLS))

_large: Readers = {
    (ChatBody, "messages"): _messages,
    (ChatBody, "chat_template_kwargs"): read_variables,
    (TokenizeBody, "messages"): _messages,
    (TokenizeBody, "chat_template_kwargs"): read_variables,
    (TokenizeBody, "tools"): _tools,
    (TokenizeBody, "prompt"): read_text,
    (ChatMessage, "content"): _content,
    (ChatMessage, "reasoning_content"): read_text,
    (ChatMessage, "reasoning"): read_text,
    (ContentPart, "text"): read_text,
    **{(ChatMessage, name): unread for name in (*INERT_IN_HISTORY, "function_call")},
    (ChatMessage, "tool_calls"): list_by(_tool_call, MAX_CALLS),
    (ToolCallBody, "function"): object_of(CalledFunctionBody, LARGE),
    (ToolCallBody, "provider_specific_fields"): unread,
    (CalledFunctionBody, "arguments"): read_arguments,
    (CalledFunctionBody, "parsed_arguments"): unread,
    (ChatBody, "tools"): _tools,
    (ToolBody, "function"): object_of(FunctionBody, LARGE),
    (FunctionBody, "description"): read_text,
    (FunctionBody, "parameters"): read_variables,
    (ChatBody, "functions"): unread_list,
    (ChatBody, "prediction"): unread,
    (ChatBody, "thinking"): object_of(ThinkingOptions, LARGE),
    (ChatBody, "reasoning"): object_of(ReasoningOptions, LARGE),
    (SamplingBody, "usage"): object_of(UsageOptions, LARGE),
    (SamplingBody, "stream_options"): object_of(StreamOptions, LARGE),
    (SamplingBody, "response_format"): _format,
    **{(ResponseFormatBody, name): at_most(SCHEMA_BYTES, read_dict) for name in ("schema", "value")},
    (ResponseFormatBody, "json_schema"): object_of(JsonSchemaFormat, LARGE),
    (JsonSchemaFormat, "schema"): at_most(SCHEMA_BYTES, read_dict),
    (SamplingBody, "structured_outputs"): object_of(StructuredOutputs, LARGE),
    (StructuredOutputs, "json"): at_most(SCHEMA_BYTES, _schema_or_text),
    (SamplingBody, "guided_json"): at_most(SCHEMA_BYTES, _schema_or_text),
}
LARGE.update(_large)
