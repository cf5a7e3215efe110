"""Renders a conversation's prompt, with a remembered answer's own tokens in place of the template's rendering of it.

The template still decides what the model sees: if it now leaves out something that it showed then (older reasoning,
tools that it moves to the last question), its own rendering counts. `call_memory.py` remembers the answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.server.answers.call_memory import Turn
from phalanx.server.requests.parsed import Conversation
from phalanx.text.tokenizer import Tokenizer

MARK = "zq7mark"
"""A word that no template has."""
TAIL = 256  # characters of a prompt's end in which reasoning may have been opened


class Rendered(Struct, frozen=True, kw_only=True):
    """A prompt."""

    tokens: list[int]
    tail: str = ""  # the end of its text
    digest: bytes = b""  # of the conversation; see `call_memory.digests`
    is_recalled: bool = False  # it differs from the template's rendering of the messages alone
    checkpoint: int = 0  # tokens up to the end of the user's last message; 0: not asked for, or not found


def render(tokenizer: Tokenizer, conversation: Conversation) -> str:
    """The conversation as text. System messages keep their places; if the template refuses that, they move into turns.

    Raises:
        InvalidRequest: as `Tokenizer.render_chat`.
    """
    try:
        return _render(tokenizer, conversation, conversation.messages)
    except InvalidRequest:
        in_turns = system_in_turns(conversation.messages)
        if in_turns == conversation.messages:
            raise
        return _render(tokenizer, conversation, in_turns)


def system_in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for templates that accept a system message at the beginning only, and turns of user and assistant.

    The first system messages become one; later ones become a part of the user's turn.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role == "system" and found and found[-1]["role"] != "system":
            role = "user"
        if role in ("system", "user") and found and found[-1]["role"] == role:
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{message['content']}"}
        else:
            found.append({**message, "role": role})
    return found


def in_order_of_calls(conversation: Conversation) -> Conversation:
    """The conversation with tool results in the order of the calls, by which templates without ids pair them.

    Results between two messages of the assistant change places; other messages keep theirs.
    """
    messages, found = conversation.messages, list(conversation.messages)
    waiting: dict[str, list[int]] = {}  # id in the last answer -> the places of its calls that have no result yet
    places: dict[int, int] = {}  # index of a result after that answer -> the place of its call

    def settle() -> None:
        for index, origin in zip(places, sorted(places, key=places.__getitem__), strict=True):
            found[index] = messages[origin]

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            settle()
            places.clear()
            waiting = {}
            for place, call in enumerate(message.get("tool_calls", ())):
                waiting.setdefault(call["id"], []).append(place)
        elif message["role"] == "tool" and (left := waiting.get(message["tool_call_id"])):
            places[index] = left.pop(0)
    settle()
    if found == messages:
        return conversation
    return replace(conversation, messages=found, is_as_sent=False)


def _render(tokenizer: Tokenizer, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
    try:
        return tokenizer.render_chat(
            messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            template_kwargs=_named_for(tokenizer.template_source, conversation.template_kwargs),
        )
    except InvalidRequest as error:
        if conversation.is_as_sent and messages is conversation.messages:
            raise
        raise _without_number(error, conversation.field) from error


def _named_for(template: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The variables, with `enable_thinking` also under the name in DeepSeek's, Kimi's and Granite's templates."""
    if "enable_thinking" in template or "thinking" not in template or "enable_thinking" not in variables:
        return variables
    return {"thinking": variables["enable_thinking"], **variables}


def _without_number(error: InvalidRequest, field: str) -> InvalidRequest:
    """The error without the message's number, for a client that counts or names messages differently."""
    if not (error.param or "").startswith("messages"):
        return error
    message = re.sub(r"messages\[\d+\]", f"a message of {field}", str(error), count=1)
    return InvalidRequest(message, param=field, code=error.code)


def continued(tokenizer: Tokenizer, conversation: Conversation, text: str, index: int, turn: Turn) -> list[int] | None:
    """The prompt's tokens: a remembered answer's with all before it, then those of the template's text after it.

    Args:
        text: the conversation as the template renders it.
        index: of the answer's message.

    Returns:
        None if the template changes the earlier text, or if the answer's end is not found.
    """
    found = _answer_in(tokenizer, conversation, text, index)
    if found is None:
        return None
    start, end = found
    shown = text[start:end]
    if any(name in shown for name in tokenizer.end_texts) or turn.written.reasoning.strip() not in shown:
        return None
    rest = tokenizer.encode(text[end:], add_special_tokens=False)
    if not rest or rest[0] not in tokenizer.eos_ids:
        return None
    return [*turn.tokens, *(rest[1:] if turn.tokens[-1] in tokenizer.eos_ids else rest)]


def end_of_question(tokenizer: Tokenizer, conversation: Conversation, text: str, tokens: list[int]) -> int:
    """The number of a prompt's tokens before the start of the answer; 0 unless the last message is the user's.

    The conversation's later prompts have these tokens in common, even if the template changes or leaves out a part of
    the answer, as its reasoning.

    Args:
        text: the conversation as the template renders it.
        tokens: of the prompt, with this text's end.
    """
    if not conversation.add_generation_prompt or conversation.messages[-1]["role"] != "user":
        return 0
    try:
        question = render(tokenizer, replace(conversation, add_generation_prompt=False))
    except InvalidRequest:
        return 0
    start = tokenizer.encode(text[len(question) :], add_special_tokens=False) if text.startswith(question) else []
    return len(tokens) - len(start) if start and tokens[-len(start) :] == start else 0


def _answer_in(tokenizer: Tokenizer, conversation: Conversation, text: str, index: int) -> tuple[int, int] | None:
    """Where the template writes the answer `messages[index]`, from the end of the text before it to its end token.

    That token is the last one before the next message's text, which another word in its place finds.
    """
    messages = conversation.messages
    if index == 0 or index + 1 >= len(messages):
        return None
    follower = {**messages[index + 1], "content": MARK}
    try:
        before = render(tokenizer, replace(conversation, messages=messages[:index], add_generation_prompt=False))
        marked = render(
            tokenizer, replace(conversation, messages=[*messages[: index + 1], follower, *messages[index + 2 :]])
        )
    except InvalidRequest:
        return None
    at = marked.find(MARK)
    end = max((marked.rfind(name, len(before), max(0, at)) for name in tokenizer.end_texts), default=-1)
    if end < 0 or not text.startswith(before) or marked[:end] != text[:end]:
        return None
    return len(before), end
