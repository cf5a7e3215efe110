"""Parses the tools of a request and the choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from phalanx.errors import InvalidRequest
from phalanx.server.fields.openai_bodies import ChatBody, ToolBody
from phalanx.server.fields.refusals import ONLY_FUNCTIONS, foreign_type, invalid, unsupported
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.requests.parsed import ApiModel, ToolUse

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # OpenAI: 64, without dots; tools of tool servers are named SERVER.TOOL
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class AllowedTools(Struct, frozen=True, kw_only=True):
    """A request's `tool_choice`."""

    may: bool = True
    must: bool = False
    name: str | None = None  # the only one that may be called
    parallel: bool = True  # several may be called in one answer


def parse_tools(body: ChatBody, served: ApiModel) -> ToolUse | None:
    """The tools that the model may call; None if it may call none.

    Raises:
        InvalidRequest: names the field.
    """
    _refuse_functions(body)
    chosen = _named(body.tool_choice) if isinstance(body.tool_choice, dict) else body.tool_choice
    named = isinstance(body.tool_choice, dict)
    if chosen == "any" and not named:  # Mistral's name for "required"
        chosen = "required"
    if chosen not in (None, "none", "auto", "required") and not named:
        known = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise invalid("tool_choice", f"tool_choice is {str(chosen)[:40]!r}; it must be {known}.")
    choice = AllowedTools(
        may=named or chosen != "none",
        must=named or chosen == "required",
        name=chosen if named else None,
        parallel=body.parallel_tool_calls is not False and not named,
    )
    return choose_tools(definitions(body.tools or []), choice, served)


def choose_tools(defined: Sequence[ToolDefinition], choice: AllowedTools, served: ApiModel) -> ToolUse | None:
    """The tools that the model may call, of those that a request of any dialect defines; None if it may call none.

    Raises:
        InvalidRequest: names `tools` or `tool_choice`.
    """
    names = [tool.name for tool in defined]
    if (twice := next((name for i, name in enumerate(names) if name in names[:i]), None)) is not None:
        raise invalid("tools", f"tools has two functions named {twice!r}.")
    if not choice.may or not (defined or choice.must):
        return None
    if not defined:
        raise invalid("tool_choice", "tool_choice needs tools.")
    if choice.name is not None and choice.name not in names:
        raise invalid("tool_choice", f"tool_choice names {choice.name[:128]!r}, which is not among the tools.")
    if not takes_tools(served, must=choice.must):
        return None
    if not choice.must and not served.auto_tools:
        raise unsupported("tool_choice", '"auto", by --no-enable-auto-tool-choice')
    return ToolUse(
        tools=tuple(tool for tool in defined if choice.name in (None, tool.name)),
        required=choice.must,
        parallel=choice.parallel,
    )


def takes_tools(served: ApiModel, *, must: bool = False) -> bool:
    """Whether to offer the tools to the model; False if it cannot call any, and they are left out of the request.

    Args:
        must: the answer must be a call.

    Raises:
        InvalidRequest: the model cannot call tools, and they cannot be left out; says what to do.
    """
    if served.tool_parser is not None:
        return True
    if must or served.drop_tools is None:
        raise _toolless(served, must=must)
    served.drop_tools()
    return False


def shown_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Tools in the form for chat templates."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({"description": tool.description} if tool.description else {}),
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]


def definitions(tools: Sequence[ToolBody]) -> list[ToolDefinition]:
    """The tools of a body.

    Raises:
        InvalidRequest: names the field.
    """
    return [_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def define(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, fields: tuple[str, str]
) -> ToolDefinition:
    """A function that may be called.

    Args:
        parameters: JSON schema of its arguments.
        fields: the names of the fields with its name and with its parameters, for errors.

    Raises:
        InvalidRequest: names one of `fields`.
    """
    name_field, field = fields
    if not NAME.fullmatch(name):
        message = f"{name_field} is {name[:140]!r}; it must be 1 to 128 of A-Z, a-z, 0-9, _, - and `.`."
        raise invalid(name_field, message)
    parameters = parameters or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise invalid(field, f"{field}: the schema's type must be object, since arguments are one.")
    return ToolDefinition(name, description or "", dict(parameters), field)


def _definition(tool: ToolBody, where: str) -> ToolDefinition:
    if tool.type != "function":
        raise foreign_type(where, tool.type, ONLY_FUNCTIONS)
    function = tool.function
    fields = (f"{where}.function.name", f"{where}.function.parameters")
    return define(function.name, function.description, function.parameters, fields)


def _toolless(served: ApiModel, *, must: bool) -> InvalidRequest:
    """The error for tools that the model cannot call."""
    why, remedies = "its chat template does not show them to it", ["serve a model that has tools"]
    if served.shows_tools:
        why = "the format in which it writes calls is not known"
        remedies.append("name its format with --tool-call-parser")
    if not must:
        remedies.append("start the server with --tools drop, which leaves optional tools out")
    *others, last = remedies
    refuses = served.drop_tools is None  # also optional tools
    change = "Send no tools" if not must else "Require no call and send no tools" if refuses else "Require no call"
    return InvalidRequest(
        f"The model {served.names[0]!r} cannot call tools: {why}. "
        f"{change}, {''.join(f'{other}, ' for other in others)}or {last}.",
        param="tools" if refuses else "tool_choice",
        code="unsupported_value",
    )


def _named(choice: Mapping[str, Any]) -> str:
    """The name in a tool_choice that is an object."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": str(kind)} if kind != "function":
            raise unsupported("tool_choice", f'the type {kind[:40]!r}; only "function"')
    raise invalid("tool_choice", 'tool_choice must be {"type": "function", "function": {"name": ...}}.')


def _refuse_functions(body: ChatBody) -> None:
    """Refuse OpenAI's fields from before November 2023; neutral values pass."""
    for name, successor in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) and body.function_call != "none":
            raise unsupported(name, f"send {successor}")
