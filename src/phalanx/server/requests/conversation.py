"""Converts the messages or prompts of a body into the tokenizer's input, which applies the chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from phalanx.server.fields.call_arguments import parse_arguments
from phalanx.server.fields.openai_bodies import ChatBody, ChatMessage, TokenizeBody, ToolCallBody
from phalanx.server.fields.refusals import ONLY_FUNCTIONS, ONLY_TEXT, check_depth, foreign_type, invalid, unsupported
from phalanx.server.requests.parsed import ApiModel, Conversation

ROLES = ("system", "user", "assistant", "tool")
MAX_IDS = 200  # characters of the ids of calls that an error repeats


def parse_conversation(body: ChatBody | TokenizeBody, kwargs: dict[str, Any], served: ApiModel) -> Conversation:
    """The messages and how to render them. The request's template variables `kwargs` win over the server's.

    Raises:
        InvalidRequest: names the field.
    """
    if not body.messages:
        raise invalid("messages", "messages is empty; send at least one.")
    calls = CallsSoFar()
    messages = [_message(message, f"messages[{i}]", calls) for i, message in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other.")
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "continue_final_message needs a last message with the role assistant.")
    return Conversation(
        messages=messages,
        template_kwargs={**served.template_kwargs, **kwargs},
        add_generation_prompt=generates,
        continue_final_message=continues,
    )


def parse_prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | list[int], ...]:
    """One or more texts or lists of token ids. The items of a list are of one type.

    Raises:
        InvalidRequest: there is no prompt, or an empty one.
    """
    prompts: tuple[str | list[int], ...]
    if isinstance(prompt, str):
        prompts = (prompt,)
    elif prompt and isinstance(prompt[0], int):
        prompts = (cast(list[int], prompt),)
    else:
        prompts = tuple(cast(list[str] | list[list[int]], prompt))
    if not prompts or any(not item for item in prompts):
        raise invalid("prompt", "The prompt is empty.")
    return prompts


class CallsSoFar:
    """The calls of a history up to one of its messages, for the results that follow. A later answer may repeat ids."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # id of a call -> the function's name
        self._open: Counter[str] = Counter()  # id of a call in the last answer -> results still missing

    def answer(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Take in the calls of an assistant's answer."""
        self._names.update((call["id"], call["function"]["name"]) for call in calls)
        self._open = Counter(call["id"] for call in calls)

    def result(self, id: str, where: str) -> dict[str, Any]:
        """The fields of a result's message from its call: the id, and the function's name, which some templates write.

        A call that the client left out of the history is unknown. A result of an earlier answer's call passes.

        Raises:
            InvalidRequest: the last answer has calls but not this one, or the call has its result already; names the
                field `where`.
        """
        if id in self._open:
            if not self._open[id]:
                raise invalid(where, f"{where}: the call {id[:80]!r} has a result already; send one for each call.")
            self._open[id] -= 1
        elif self._open and id not in self._names:
            known = ", ".join(map(repr, self._open))
            known = known if len(known) <= MAX_IDS else f"{known[:MAX_IDS]}..."
            raise invalid(where, f"{where} is {id[:80]!r}, but the calls of the answer before it are {known}.")
        found = {"tool_call_id": id}
        return {**found, "name": self._names[id]} if id in self._names else found


def _message(message: ChatMessage, where: str, calls: CallsSoFar) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role  # no template knows both
    if role == "function":
        raise unsupported(f"{where}.role", "send the role 'tool', with the tool_call_id of the call")
    if role not in ROLES:
        known = "system, developer, user, assistant, tool"
        raise invalid(f"{where}.role", f"{where}.role is {role[:40]!r}; known are {known}.")
    parsed: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        parsed["name"] = message.name
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        parsed["reasoning_content"] = reasoning
    if message.function_call is not None:
        raise unsupported(f"{where}.function_call", "send tool_calls")
    if message.tool_calls:
        if role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant calls tools, not a {role}.")
        parsed["tool_calls"] = _calls(message.tool_calls, f"{where}.tool_calls")
    if role == "assistant":
        calls.answer(parsed.get("tool_calls", ()))
    if role == "tool":
        if not message.tool_call_id:
            raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id is missing; which call does it answer?")
        parsed = {**calls.result(message.tool_call_id, f"{where}.tool_call_id"), **parsed}
    elif message.tool_call_id is not None:
        raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id goes with the role tool, not with {role}.")
    return parsed


def _calls(calls: Sequence[ToolCallBody], where: str) -> list[dict[str, Any]]:
    """The calls for templates, with arguments as an object, not as text."""
    parsed = []
    for i, call in enumerate(calls):
        if call.type not in (None, "function"):
            raise foreign_type(f"{where}[{i}]", call.type, ONLY_FUNCTIONS)
        arguments = arguments_of(call.function.arguments, f"{where}[{i}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        parsed.append({"id": call.id, "type": "function", "function": function})
    return parsed


def arguments_of(given: str | Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The arguments of a call in the history, which most clients send as text.

    Raises:
        InvalidRequest: they are not a JSON object, or nested too deeply; names the field `where`.
    """
    if not isinstance(given, str):
        return dict(given or {})
    try:
        parsed = parse_arguments(given)
    except ValueError as error:
        raise invalid(where, f"{where} has to be a JSON object: {error}.") from error
    check_depth(where, parsed)
    return parsed


def _content(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None and message.role == "assistant":
        return message.refusal or ""
    if message.content is None:
        raise invalid(f"{where}.content", f"{where}.content is missing.")
    texts = []
    for i, part in enumerate(message.content):
        field = f"{where}.content[{i}]"
        if part.type != "text":
            raise foreign_type(field, part.type, ONLY_TEXT)
        if part.text is None:
            raise invalid(f"{field}.text", f"{field}.text is missing.")
        texts.append(part.text)
    if not texts:
        raise invalid(f"{where}.content", f"{where}.content is an empty list.")
    return "\n".join(texts)
