"""`/v1/responses` (OpenAI): parses its bodies into chat requests.

Stateless: nothing is stored, so a request that refers to something stored is refused. `responses_format.py` writes the
answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from msgspec.structs import replace

from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.dialects.responses.responses_body import (
    READERS,
    OfferedFunction,
    OfferedTool,
    ResponseReasoning,
    ResponsesBody,
    TextFormat,
    TextOptions,
)
from phalanx.server.dialects.responses.responses_format import ID_PREFIX, ResponseOptions, ResponsesFormat
from phalanx.server.dialects.responses.responses_input import parse_input, shown_name
from phalanx.server.dialects.responses.responses_items import CUSTOM_INPUT, ToolItem
from phalanx.server.fields.openai_bodies import MAX_TOOLS, Body, SamplingBody, StreamOptions
from phalanx.server.fields.refusals import ANSWER_FORMATS, foreign_type, in_range, invalid, token_limit, unsupported
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.requests.offered_tools import AllowedTools, choose_tools, define, shown_tools
from phalanx.server.requests.parsed import AnswerGrammar, ApiModel, ChatRequest, Conversation, Options, ToolUse
from phalanx.server.requests.sampling_fields import MAX_TOP_LOGPROBS, parse_options
from phalanx.server.requests.structured import answer_of_schema
from phalanx.server.requests.thinking_fields import thinking_variables
from phalanx.server.requests.validate import template_variables

SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "timeout", "timing", "num_speculative_tokens", "cache_salt",
)  # fmt: skip
"""Fields with the same meaning in every dialect of OpenAI's."""
NEUTRAL: Mapping[str, tuple[object, str]] = {
    "previous_response_id": (
        None,
        "no response is stored; set store: false in the client, so that it sends the whole conversation as input",
    ),
    "conversation": (None, "no conversation is stored; send it as input"),
    "prompt": (None, "no prompt is stored; send instructions and input"),
    "background": (False, "only false"),
    "context_management": ([], "the client shortens the conversation"),
    "moderation": (None, ""),
}
"""Unsupported fields that would change the answer -> the value that does not, and what to do instead."""
TRUNCATIONS = ("disabled", "auto")
"""A prompt that is too long is refused with both: with "auto" OpenAI's server leaves out what does not fit."""
ECHOED = (
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "max_output_tokens", "max_tool_calls", "user",
)  # fmt: skip
"""Fields that the response repeats unchanged."""
ECHOED_CHARS = 1 << 16  # of instructions, and of tools; a stream would repeat longer ones three times
CLIENTS_OWN = ("function", "custom", "namespace")
"""Types of tools that the client runs. Tools of other types run on other servers, and the model does not see them."""
FIELD = "input"
SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def parse_responses(body: ResponsesBody, served: ApiModel) -> ParsedBody:
    """Parse a request for a response.

    Raises:
        InvalidRequest: names the field.
    """
    for field, (neutral, detail) in NEUTRAL.items():
        if getattr(body, field) not in (None, neutral):
            raise unsupported(field, detail)
    if body.truncation not in (None, *TRUNCATIONS):
        raise invalid("truncation", f"truncation is {body.truncation[:40]!r}; it must be {' or '.join(TRUNCATIONS)}.")
    named = list(islice(_named(body.tools or (), "tools"), MAX_TOOLS + 1))
    if len(named) > MAX_TOOLS:
        raise invalid("tools", f"tools has more than {MAX_TOOLS} functions, with those of namespaces.")
    offered = {shown_name(tool.name, tool.namespace): tool for _, tool in named}
    definitions = [definition for definition, _ in named]
    tools = _choose(body, definitions, offered, served)
    options = _options(body, served)
    text, reasoning = body.text or TextOptions(), body.reasoning or ResponseReasoning()
    if reasoning.exclude:
        raise unsupported("reasoning.exclude", "only false: leave the items of the type reasoning out")
    thinking = thinking_variables(
        thinking=body.thinking, reasoning=reasoning, enabled=body.enable_thinking, budget=body.thinking_budget
    )
    variables = template_variables(body.chat_template_kwargs, thinking, text.verbosity)
    if tools is not None:
        variables["tools"] = shown_tools(definitions)
    request = ChatRequest(
        options=options,
        conversation=Conversation(
            messages=parse_input(body.instructions, body.input),
            template_kwargs={**served.template_kwargs, **variables},
            add_generation_prompt=True,
            continue_final_message=False,
            field=FIELD,
            is_as_sent=False,
        ),
        tools=tools,
    )
    response_options = ResponseOptions(
        echoed=_echoed(body, options, tools),
        tools=offered,
        summary=(reasoning.summary or reasoning.generate_summary) is not None,
        sealed=SEALED in (body.include or ()),
    )
    return ParsedBody(request, partial(ResponsesFormat, options=response_options))


RESPONSES = Dialect(
    body=ResponsesBody,
    readers=READERS,
    parse=parse_responses,
    field=FIELD,
    id_prefix=ID_PREFIX,
    longest_silence_s=60.0,  # Codex gives up after five minutes
)


def input_tokens_body(n_tokens: int) -> dict[str, Any]:
    """The answer of `/v1/responses/input_tokens`."""
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


# -- options ---------------------------------------------------------------------------------------------------------


def _options(body: ResponsesBody, served: ApiModel) -> Options:
    padding = None if body.stream_options is None else body.stream_options.include_obfuscation
    sampling = SamplingBody(
        **{name: getattr(body, name) for name in SHARED},
        stream_options=None if body.stream_options is None else StreamOptions(include_obfuscation=padding),
    )
    max_tokens = token_limit("max_output_tokens", body.max_output_tokens)
    top = int(in_range("top_logprobs", body.top_logprobs or 0, 0, MAX_TOP_LOGPROBS))
    scored = top > 0 or LOGPROBS in (body.include or ())
    options = parse_options(sampling, served, max_tokens, top if scored else None)
    answer = None if body.text is None else _answer(body.text.format)
    return replace(options, max_tokens_field="max_output_tokens", answer=answer)


def _answer(form: TextFormat | None) -> AnswerGrammar | None:
    field = "text.format"
    if form is None:
        return None
    if form.type not in ("text", "json_object", "json_schema"):
        raise foreign_type(field, form.type, ANSWER_FORMATS)
    if (form.type == "json_schema") != (form.schema is not None):
        wrong = "is missing; it goes with" if form.schema is None else "does not go with"
        raise invalid(f"{field}.schema", f"{field}.schema {wrong} the type {form.type}.")
    if form.schema is not None:
        return answer_of_schema(field, f"{field}.schema", form.schema)
    return answer_of_schema(field, field, {"type": "object"}) if form.type == "json_object" else None


def _echoed(body: ResponsesBody, options: Options, tools: ToolUse | None) -> dict[str, Any]:
    """The fields of the request that the response repeats."""
    instructions = body.instructions or ""
    reasoning, text = body.reasoning or ResponseReasoning(), body.text or TextOptions()
    short = tools is not None and tools.n_chars <= ECHOED_CHARS
    return {
        **{name: getattr(body, name) for name in ECHOED},
        "background": False,
        "instructions": instructions if 0 < len(instructions) <= ECHOED_CHARS else None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "store": False,
        "temperature": options.sampling.temperature,
        "text": {"format": _filled(text.format or TextFormat(type="text")), "verbosity": text.verbosity},
        "tool_choice": "required" if body.tool_choice == "any" else body.tool_choice or "auto",
        "tools": [_filled(tool) for tool in body.tools or () if tool.type in CLIENTS_OWN] if short else [],
        "top_logprobs": options.sampling.logprobs or 0,
        "top_p": options.sampling.top_p,
        "truncation": body.truncation or "disabled",
    }


def _filled(body: Body) -> dict[str, Any]:
    """The fields of an object that were sent."""
    values = {name: getattr(body, name) for name in body.__struct_fields__}
    return {name: _echo(value) for name, value in values.items() if value is not None}


def _echo(value: Any) -> Any:
    if isinstance(value, list):
        return [_echo(item) for item in value]
    return _filled(value) if isinstance(value, Body) else value


# -- tools -----------------------------------------------------------------------------------------------------------


def _named(
    tools: Sequence[OfferedFunction], where: str, namespace: str | None = None
) -> Iterator[tuple[ToolDefinition, ToolItem]]:
    """The tools that the client runs, as the model sees them and as the client names them."""
    for i, tool in enumerate(tools):
        field = f"{where}[{i}]"
        if tool.type not in CLIENTS_OWN:
            continue
        if not tool.name:
            raise invalid(f"{field}.name", f"{field}.name is missing.")
        if tool.type == "namespace":
            if not isinstance(tool, OfferedTool):
                raise invalid(f"{field}.type", f"{field}.type: a namespace has no others inside.")
            yield from _named(tool.tools or (), f"{field}.tools", tool.name)
            continue
        custom = tool.type == "custom"
        parameters = _text_parameters(tool) if custom else tool.parameters
        name = shown_name(tool.name, namespace)
        definition = define(name, tool.description, parameters, (f"{field}.name", f"{field}.parameters"))
        yield definition, ToolItem(name=tool.name, namespace=namespace, custom=custom)


def _text_parameters(tool: OfferedFunction) -> dict[str, Any]:
    """The arguments of the function that stands for a custom tool."""
    text = {"type": "string", "description": "The tool's whole input."}
    if tool.format is not None and tool.format.definition is not None:
        text["description"] += f" It matches this {tool.format.syntax or 'lark'} grammar:\n{tool.format.definition}"
    return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}


def _choose(
    body: ResponsesBody, definitions: Sequence[ToolDefinition], offered: Mapping[str, ToolItem], served: ApiModel
) -> ToolUse | None:
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None | "auto" | "none" | "required" | "any":
            must = body.tool_choice in ("required", "any")
            choice = AllowedTools(may=body.tool_choice != "none", must=must, parallel=parallel)
        case {"type": "function" | "custom", "name": str()} as named:
            choice = AllowedTools(must=True, name=_shown(named), parallel=False)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = _allowed(allowed, offered)
            choice = AllowedTools(may=bool(names), must=mode == "required", parallel=parallel)
            tools = choose_tools(definitions, choice, served)
            return tools and replace(tools, tools=tuple(tool for tool in tools.tools if tool.name in names))
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise unsupported("tool_choice", f"the type {kind[:40]!r}; this server runs no tools itself")
        case _:
            known = 'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", "mode": ...}'
            raise invalid("tool_choice", f"tool_choice must be {known}.")
    return choose_tools(definitions, choice, served)


def _allowed(tools: Sequence[object], offered: Mapping[str, ToolItem]) -> list[str]:
    """The names that the model sees of a list of allowed tools, without those that run elsewhere."""
    names = [_shown(one) for one in tools if isinstance(one, dict) and one.get("type") in ("function", "custom")]
    if (strange := next((name for name in names if name not in offered), None)) is not None:
        raise invalid("tool_choice", f"tool_choice allows {strange[:128]!r}, which is not among the tools.")
    return names


def _shown(chosen: Any) -> str:
    """The name that the model sees of a tool that is chosen by an object."""
    namespace = chosen.get("namespace")
    return shown_name(str(chosen.get("name")), None if namespace is None else str(namespace))
