"""`/v1/messages` and `/v1/messages/count_tokens` (Anthropic): parses their bodies into chat requests.

`messages_format.py` writes the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.dialects.messages.messages_body import (
    READERS,
    RECORDS,
    ContentBlock,
    MessageBody,
    MessagesBody,
    MessagesTool,
    TextPart,
    ThinkingBody,
    ToolChoice,
)
from phalanx.server.dialects.messages.messages_format import MessagesFormat, Thinking
from phalanx.server.fields.openai_bodies import SamplingBody
from phalanx.server.fields.refusals import count, invalid, token_limit, unsupported
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.requests.conversation import CallsSoFar
from phalanx.server.requests.offered_tools import AllowedTools, choose_tools, define, shown_tools
from phalanx.server.requests.parsed import AnswerGrammar, ApiModel, ChatRequest, Conversation, Options
from phalanx.server.requests.sampling_fields import parse_options, parse_stop_strings
from phalanx.server.requests.structured import answer_of_schema

BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of Claude Code's that changes with every request: with it, no two prompts share a prefix."""
EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts that templates do not know -> the nearest that they know."""
REFERENCE = "tool_reference"
"""A part of the result of Claude Code's search for tools: a found tool, which is among the request's tools."""
ERROR = "Error: "
"""Put before the result of a call that failed."""


def parse_messages(body: MessagesBody, served: ApiModel) -> ParsedBody:
    """Parse a request for an answer.

    Raises:
        InvalidRequest: names the field.
    """
    if body.max_tokens is None:
        message = "Missing required parameter: 'max_tokens'."
        raise InvalidRequest(message, param="max_tokens", code="missing_required_parameter")
    return parse_counted(body, served)


def parse_counted(body: MessagesBody, served: ApiModel) -> ParsedBody:
    """As `parse_messages`, for a request whose prompt alone matters.

    Raises:
        InvalidRequest: names the field.
    """
    if body.mcp_servers:
        raise unsupported("mcp_servers", "this server calls no tools itself")
    thinking = _thinking(body.thinking)
    defined = _definitions(body.tools or [])
    tools = choose_tools(defined, _choice(body.tool_choice), served)
    variables = _variables(body, served, thinking)
    if tools is not None:
        variables["tools"] = shown_tools(defined)
    messages = _conversation(body)
    continues = messages[-1]["role"] == "assistant"
    if continues and (messages[-1].get("tool_calls") or not messages[-1]["content"]):
        raise invalid("messages", "messages ends with an answer without text to continue; send the message after it.")
    conversation = Conversation(
        messages=messages,
        template_kwargs=variables,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        is_as_sent=False,
    )
    request = ChatRequest(options=_options(body, served), conversation=conversation, tools=tools)
    return ParsedBody(request, partial(MessagesFormat, thinking=thinking))


MESSAGES = Dialect(
    body=MessagesBody,
    readers=READERS,
    parse=parse_messages,
    field="messages",
    id_prefix="msg_",
    longest_silence_s=5.0,  # clients give up after some 10 s, and tokens without text may come in between
)
COUNTED_MESSAGES = replace(MESSAGES, parse=parse_counted)


def count_body(n_tokens: int) -> dict[str, Any]:
    """The answer of `/v1/messages/count_tokens`."""
    return {"input_tokens": n_tokens}


# -- options ---------------------------------------------------------------------------------------------------------


def _options(body: MessagesBody, served: ApiModel) -> Options:
    """A `max_tokens` beyond the context is lowered, as Anthropic does; clients send the same one with every prompt."""
    sampling = SamplingBody(
        model=body.model,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        timeout=body.timeout,
        cache_salt=body.cache_salt,
    )
    options = parse_options(sampling, served, token_limit("max_tokens", body.max_tokens), None)
    return replace(
        options,
        continuous_usage=True,  # a stream begins with the tokens of the prompt
        clamp_max_tokens=True,
        stop_strings=parse_stop_strings(body.stop_sequences, "stop_sequences"),
        answer=_answer(body),
    )


def _answer(body: MessagesBody) -> AnswerGrammar | None:
    configured = None if body.output_config is None else body.output_config.format
    field, form = ("output_format", body.output_format) if configured is None else ("output_config.format", configured)
    if form is None:
        return None
    if form.type != "json_schema" or form.schema is None:
        raise invalid(field, f"{field} must have the type json_schema and a schema.")
    return answer_of_schema(field, f"{field}.schema", form.schema)


def _thinking(thinking: ThinkingBody | None) -> Thinking:
    """Only a client that sends `thinking` expects blocks of thinking."""
    if thinking is None or thinking.type == "disabled":
        return "hidden"
    if thinking.type not in ("enabled", "adaptive"):
        known = "enabled, adaptive or disabled"
        raise invalid("thinking.type", f"thinking.type is {thinking.type[:40]!r}; it must be {known}.")
    return "omitted" if thinking.display == "omitted" else "shown"


def _variables(body: MessagesBody, served: ApiModel, thinking: Thinking) -> dict[str, Any]:
    """The template's variables. Without `thinking` the model does not think, unless the server's settings say so."""
    variables: dict[str, Any] = {"enable_thinking": False} if thinking == "hidden" else {}
    variables.update(served.template_kwargs)
    if body.thinking is not None:
        if body.thinking.type != "adaptive":
            variables["enable_thinking"] = body.thinking.type == "enabled"
        if (budget := count("thinking.budget_tokens", body.thinking.budget_tokens, least=1)) is not None:
            variables["thinking_budget"] = budget
    if body.output_config is not None and (effort := body.output_config.effort) is not None:
        variables["reasoning_effort"] = EFFORTS.get(effort, effort)
    return variables


# -- tools -----------------------------------------------------------------------------------------------------------


def _definitions(tools: Sequence[MessagesTool]) -> list[ToolDefinition]:
    """The tools that the client itself runs. Others are left out, unless there are only such."""
    foreign = [i for i, tool in enumerate(tools) if tool.type not in (None, "custom")]
    if tools and len(foreign) == len(tools):
        detail = f"{str(tools[0].type)[:40]!r}; this server runs no tools, send some with an input_schema"
        raise unsupported("tools[0].type", detail)
    return [_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools) if i not in foreign]


def _definition(tool: MessagesTool, where: str) -> ToolDefinition:
    if tool.name is None:
        raise invalid(f"{where}.name", f"{where}.name is missing.")
    return define(tool.name, tool.description, tool.input_schema, (f"{where}.name", f"{where}.input_schema"))


def _choice(choice: ToolChoice | None) -> AllowedTools:
    if choice is None:
        return AllowedTools()
    if choice.type not in ("auto", "any", "tool", "none"):
        message = f"tool_choice.type is {choice.type[:40]!r}; it must be auto, any, tool or none."
        raise invalid("tool_choice.type", message)
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice.name", "tool_choice.name goes with the type tool, and only with that.")
    return AllowedTools(
        may=choice.type != "none",
        must=choice.type in ("any", "tool"),
        name=choice.name,
        parallel=not choice.disable_parallel_tool_use and choice.name is None,
    )


# -- messages --------------------------------------------------------------------------------------------------------


def _conversation(body: MessagesBody) -> list[dict[str, Any]]:
    """The messages as templates take them. A system message stays where it is."""
    if not body.messages:
        raise invalid("messages", "messages is empty; send at least one.")
    found: list[dict[str, Any]] = []
    if system := _system(body.system):
        found.append({"role": "system", "content": system})
    calls = CallsSoFar()
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if message.role == "assistant":
            found.append(_assistant(message, where))
            calls.answer(found[-1].get("tool_calls", ()))
        elif message.role in ("user", "system"):
            found += _user(message, where, calls)
        else:
            known = "user, assistant, system"
            raise invalid(f"{where}.role", f"{where}.role is {message.role[:40]!r}; known are {known}.")
    return found


def _system(system: str | list[TextPart] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return _joined([part for part in system if not (part.text or "").startswith(BILLING)], "system")


def _user(message: MessageBody, where: str, calls: CallsSoFar) -> Iterator[dict[str, Any]]:
    """A user's texts and the results of calls, in their order."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    if not message.content:
        raise invalid(f"{where}.content", f"{where}.content is an empty list.")
    texts: list[str] = []
    for i, block in enumerate(message.content):
        field = f"{where}.content[{i}]"
        if block.type == "tool_result" and message.role == "user":
            if texts:
                yield {"role": message.role, "content": "\n".join(texts)}
                texts = []
            yield _result(block, field, calls)
        else:
            texts.append(_text(block, field))
    if texts:
        yield {"role": message.role, "content": "\n".join(texts)}


def _result(block: ContentBlock, where: str, calls: CallsSoFar) -> dict[str, Any]:
    if not block.tool_use_id:
        raise invalid(f"{where}.tool_use_id", f"{where}.tool_use_id is missing; which call does it answer?")
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(content, f"{where}.content", REFERENCE)
    answered = calls.result(block.tool_use_id, f"{where}.tool_use_id")
    return {"role": "tool", "content": f"{ERROR}{text}" if block.is_error else text, **answered}


def _assistant(message: MessageBody, where: str) -> dict[str, Any]:
    """Joins the blocks of an answer without gaps, as this server cut them. Signatures are not checked."""
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        field = f"{where}.content[{i}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case kind if kind in RECORDS:
                pass
            case "tool_use":
                calls.append(_call(block, field))
            case _:
                texts.append(_text(block, field))
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        answer["reasoning_content"] = "".join(thoughts)
    return {**answer, "tool_calls": calls} if calls else answer


def _call(block: ContentBlock, where: str) -> dict[str, Any]:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise invalid(f"{where}.{name}", f"{where}.{name} is missing.")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}


def _joined(parts: Sequence[TextPart], where: str, named: str = "") -> str:
    """The texts of the parts; for parts of the type `named`, the names of tools."""
    return "\n".join(
        part.tool_name if part.tool_name and part.type == named else _text(part, f"{where}[{i}]")
        for i, part in enumerate(parts)
    )


def _text(block: ContentBlock | TextPart, where: str) -> str:
    if block.type != "text":
        raise unsupported(f"{where}.type", f"{block.type[:40]!r}; this model reads text only")
    if block.text is None:
        raise invalid(f"{where}.text", f"{where}.text is missing.")
    return block.text
