"""From the bytes of a body to the typed body, and how the large fields of OpenAI's bodies are read.

`json_fields.py` reads field by field, in short calls; other dialects bring readers of their own. Does not know HTTP,
nor what fields mean (`validate.py`).
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable
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
    of_type,
    read_arguments,
    read_dict,
    read_items,
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

    A byte order mark before the object is passed over: clients of Windows write it.

    Args:
        max_ids: of a list of token ids; the context.
        readers: of the large fields; None: of OpenAI's.

    Raises:
        InvalidRequest: it is no JSON object, or has a field that is unknown, missing, repeated, too large or of a wrong
            type; names the field.
    """
    ids: dict[tuple[type, str], Reader] = {
        (CompletionBody, "prompt"): partial(_prompts, max_ids=max_ids),
        (DetokenizeBody, "tokens"): partial(_ids, max_ids=max_ids),
    }
    return read_object(data.removeprefix(BOM_UTF8), kind, "", {**(LARGE if readers is None else readers), **ids})


# -- fields that may be large --------------------------------------------------------------------------------------


def _of_type(kind: type[B], types: tuple[str, ...], detail: str) -> Callable[[bytes, str], B]:
    return lambda data, path: of_type(kind, types, detail, LARGE)(data, path)


def _messages(data: bytes, path: str) -> list[ChatMessage]:
    items = read_items(data, MAX_MESSAGES, path)
    return [read_object(item, ChatMessage, f"{path}[{i}]", LARGE) for i, item in enumerate(items)]


def _content(data: bytes, path: str) -> str | list[ContentPart]:
    if data[:1] != b"[":
        return read_text(data, path)
    items = read_items(data, MAX_PARTS, path)
    return [_part(item, f"{path}[{i}]") for i, item in enumerate(items)]


def _prompts(data: bytes, path: str, *, max_ids: int) -> str | list[str] | list[int] | list[list[int]]:
    """The first item tells which kind of list it is."""
    if data[:1] != b"[":
        return read_text(data, path)
    first = re.match(rb"\[\s*(.)", data, re.DOTALL)
    match first and first[1]:
        case b'"':
            return [read_text(item, f"{path}[{i}]") for i, item in enumerate(read_items(data, MAX_PROMPTS, path))]
        case b"[":
            items = enumerate(read_items(data, MAX_PROMPTS, path))
            return [_ids(item, f"{path}[{i}]", max_ids=max_ids) for i, item in items]
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


def _tool_calls(data: bytes, path: str) -> list[ToolCallBody]:
    items = enumerate(read_items(data, MAX_CALLS, path))
    return [_tool_call(item, f"{path}[{i}]") for i, item in items]


def _schema_or_text(data: bytes, path: str) -> dict[str, Any] | str:
    schema: dict[str, Any] | str = decode(data, dict[str, Any] | str, path)
    return schema


def _tools(data: bytes, path: str) -> list[ToolBody]:
    items = enumerate(read_items(data, MAX_TOOLS, path))
    return [_tool(item, f"{path}[{i}]") for i, item in items]


_part = _of_type(ContentPart, ("text",), ONLY_TEXT)
_tool_call = _of_type(ToolCallBody, ("function",), ONLY_FUNCTIONS)
_tool = _of_type(ToolBody, ("function",), ONLY_FUNCTIONS)


def _object_of(kind: type[Body]) -> Reader:
    """Reads an object of known fields, for the names of its unknown ones."""
    return lambda data, path: read_object(data, kind, path, LARGE)


LARGE: Readers = {
    (ChatBody, "messages"): _messages,
    (ChatBody, "chat_template_kwargs"): read_variables,
    (TokenizeBody, "messages"): _messages,
    (TokenizeBody, "chat_template_kwargs"): read_variables,
    (TokenizeBody, "tools"): at_most(TOOLS_BYTES, _tools),
    (TokenizeBody, "prompt"): read_text,
    (ChatMessage, "content"): _content,
    (ChatMessage, "reasoning_content"): read_text,
    (ChatMessage, "reasoning"): read_text,
    (ContentPart, "text"): read_text,
    **{(ChatMessage, name): unread for name in (*INERT_IN_HISTORY, "function_call")},
    (ChatMessage, "tool_calls"): _tool_calls,
    (ToolCallBody, "function"): _object_of(CalledFunctionBody),
    (ToolCallBody, "provider_specific_fields"): unread,
    (CalledFunctionBody, "arguments"): read_arguments,
    (CalledFunctionBody, "parsed_arguments"): unread,
    (ChatBody, "tools"): at_most(TOOLS_BYTES, _tools),
    (ToolBody, "function"): _object_of(FunctionBody),
    (FunctionBody, "description"): read_text,
    (FunctionBody, "parameters"): read_variables,
    (ChatBody, "functions"): unread_list,
    (ChatBody, "prediction"): unread,
    (ChatBody, "thinking"): _object_of(ThinkingOptions),
    (ChatBody, "reasoning"): _object_of(ReasoningOptions),
    (SamplingBody, "usage"): _object_of(UsageOptions),
    (SamplingBody, "stream_options"): _object_of(StreamOptions),
    (SamplingBody, "response_format"): _of_type(
        ResponseFormatBody, ("text", "json_object", "json", "json_schema"), ANSWER_FORMATS
    ),
    **{(ResponseFormatBody, name): at_most(SCHEMA_BYTES, read_dict) for name in ("schema", "value")},
    (ResponseFormatBody, "json_schema"): _object_of(JsonSchemaFormat),
    (JsonSchemaFormat, "schema"): at_most(SCHEMA_BYTES, read_dict),
    (SamplingBody, "structured_outputs"): _object_of(StructuredOutputs),
    (StructuredOutputs, "json"): at_most(SCHEMA_BYTES, _schema_or_text),
    (SamplingBody, "guided_json"): at_most(SCHEMA_BYTES, _schema_or_text),
}
