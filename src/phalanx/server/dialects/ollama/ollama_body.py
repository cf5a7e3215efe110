"""The bodies of `/api/chat` and `/api/generate` (Ollama), and how their large fields are read.

Unknown fields and options are ignored, as Ollama does, except content in messages: clients send fields of other
versions, and settings of the machine, for which a server has flags. `ollama_dialect.py` interprets the fields.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from phalanx.server.fields.json_fields import (
    SCHEMA_BYTES,
    TOOLS_BYTES,
    Reader,
    at_most,
    list_of,
    object_of,
    read_dict,
    read_text,
    read_variables,
    text_or,
    unread_list,
)
from phalanx.server.fields.openai_bodies import (
    INERT,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    HistoryBody,
    TolerantBody,
    about,
)

Number = int | float
"""Of an option that is a whole number: Ollama accepts 128.0 for 128."""


class OllamaCalled(HistoryBody, kw_only=True):
    """The function that a call in the history names, and its arguments."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(HistoryBody, kw_only=True):
    """A call in the history."""

    id: str | None = None
    function: OllamaCalled


class OllamaMessage(HistoryBody, kw_only=True):
    """A message of a chat."""

    role: Annotated[str, about("system, user, assistant or tool.")]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any] | None, about("Only an empty list.")] = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: Annotated[str | None, about("Of a tool's message: the function.")] = None
    tool_call_id: Annotated[str | None, about("Of a tool's message: the call it answers.")] = None


class OllamaFunction(TolerantBody, kw_only=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, about("JSON schema of the arguments, an object.")] = None


class OllamaTool(TolerantBody, kw_only=True):
    """An entry of `tools`."""

    type: Annotated[str | None, about('Only "function".')] = None
    function: OllamaFunction


class OllamaOptions(TolerantBody, kw_only=True):
    """`options`: those that this server knows."""

    temperature: float | None = None
    top_k: Number | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[Number | None, about("-1; 0 turns repeat_penalty off.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[Number | None, about("A negative one is random.")] = None
    stop: str | list[str] | None = None
    num_predict: Annotated[Number | None, about("Most output tokens; 0 or less: what there is room for.")] = None
    mirostat: Annotated[Number | None, about("Only 0.")] = None
    typical_p: Annotated[float | None, about("Only 1.")] = None
    tfs_z: Annotated[float | None, about("Only 1.")] = None


class OllamaBody(TolerantBody, kw_only=True):
    """The fields that chat and generate share."""

    model: str
    stream: Annotated[bool | None, about("true when left out.")] = None
    format: Annotated[str | dict[str, Any] | None, about('"json", or a JSON schema.')] = None
    options: OllamaOptions | None = None
    think: Annotated[bool | str | None, about("Or how much: low, medium, high.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, about("0..20; needs logprobs.")] = None
    keep_alive: Annotated[
        Any, about("The model stays loaded. Without a prompt, 0 is answered as if it had been unloaded.")
    ] = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """`POST /api/chat`"""

    messages: Annotated[
        Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None,
        about("Without any, the answer says that the model is loaded."),
    ] = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """`POST /api/generate`"""

    prompt: Annotated[str | None, about("Without one, the answer says that the model is loaded.")] = None
    system: str | None = None
    raw: Annotated[bool | None, about("The prompt is not put into the chat template.")] = None
    suffix: Annotated[str | None, about("Only an empty text.")] = None
    template: Annotated[str | None, about("Only an empty text.")] = None
    context: Annotated[list[int] | None, about("Only an empty list.")] = None
    images: Annotated[list[Any] | None, about("Only an empty list.")] = None


class OllamaModelBody(TolerantBody, kw_only=True):
    """`POST /api/show`, `DELETE /api/delete`"""

    model: str | None = None
    name: Annotated[str | None, about("The older name of model.")] = None


class OllamaPullBody(OllamaModelBody, kw_only=True):
    """`POST /api/pull`"""

    stream: Annotated[bool | None, about("true when left out.")] = None
    insecure: Annotated[Any, about(f"{INERT} The hub's address is the server's HF_ENDPOINT.")] = None


READERS: dict[tuple[type, str], Reader] = {}
READERS.update(
    {
        (OllamaCalled, "arguments"): read_variables,
        (OllamaCall, "function"): object_of(OllamaCalled, READERS),
        (OllamaMessage, "content"): read_text,
        (OllamaMessage, "thinking"): read_text,
        (OllamaMessage, "images"): unread_list,
        (OllamaMessage, "tool_calls"): list_of(OllamaCall, MAX_CALLS, READERS),
        (OllamaFunction, "description"): read_text,
        (OllamaFunction, "parameters"): read_variables,
        (OllamaTool, "function"): object_of(OllamaFunction, READERS),
        (OllamaBody, "format"): at_most(SCHEMA_BYTES, text_or(read_dict)),
        (OllamaBody, "options"): object_of(OllamaOptions, READERS),
        (OllamaChatBody, "messages"): list_of(OllamaMessage, MAX_MESSAGES, READERS),
        (OllamaChatBody, "tools"): at_most(TOOLS_BYTES, list_of(OllamaTool, MAX_TOOLS, READERS)),
        (OllamaGenerateBody, "prompt"): read_text,
        (OllamaGenerateBody, "system"): read_text,
        (OllamaGenerateBody, "suffix"): read_text,
        (OllamaGenerateBody, "template"): read_text,
        (OllamaGenerateBody, "context"): unread_list,
        (OllamaGenerateBody, "images"): unread_list,
    }
)
