"""From the messages or prompts of a body to the tokenizer's input. Pure.

Does not know chat templates: the tokenizer applies them.
"""

from __future__ import annotations

from typing import Any

from phalanx.server.parsed import Conversation, Served
from phalanx.server.refusals import invalid, refuse_unknown, unsupported
from phalanx.server.schema import ChatBody, ChatMessage, TokenizeBody

ROLES = ("system", "user", "assistant")


def parse_conversation(body: ChatBody | TokenizeBody, kwargs: dict[str, Any], served: Served) -> Conversation:
    """The messages and how to render them. The request's template variables `kwargs` win over the server's.

    Raises:
        InvalidRequest: names the field.
    """
    if not body.messages:
        raise invalid("messages", "messages is empty; send at least one.")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
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


def parse_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | list[int], ...]:
    """One or more texts or lists of token ids.

    Raises:
        InvalidRequest: there is no prompt, or an empty one.
    """
    if isinstance(prompt, str):
        prompts: tuple[str | list[int], ...] = (prompt,)
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = ([item for item in prompt if isinstance(item, int)],)
    else:
        prompts = tuple(item for item in prompt if not isinstance(item, int))
    if not prompts or any(not item for item in prompts):
        raise invalid("prompt", "The prompt is empty.")
    return prompts


def _message(message: ChatMessage, where: str) -> dict[str, str]:
    refuse_unknown(message, f"{where}.")
    if message.tool_calls:
        raise unsupported(f"{where}.tool_calls", "tool calls are not supported yet")
    role = "system" if message.role == "developer" else message.role  # no template knows both
    if role in ("tool", "function"):
        raise unsupported(f"{where}.role", f"the role {role!r}: tool calls are not supported yet")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {role[:40]!r}; known are system, developer, user, assistant.")
    parsed = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        parsed["name"] = message.name
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        parsed["reasoning_content"] = reasoning
    return parsed


def _content(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise invalid(f"{where}.content", f"{where}.content is missing.")
    texts = []
    for i, part in enumerate(message.content):
        field = f"{where}.content[{i}]"
        if part.type != "text":
            raise unsupported(f"{field}.type", f"{part.type[:40]!r}; only text parts can be read by this model")
        refuse_unknown(part, f"{field}.")
        if part.text is None:
            raise invalid(f"{field}.text", f"{field}.text is missing.")
        texts.append(part.text)
    if not texts:
        raise invalid(f"{where}.content", f"{where}.content is an empty list.")
    return "\n".join(texts)
