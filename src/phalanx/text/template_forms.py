"""Finds the form of `content` that a chat template takes, and messages whose text a rendering lacks.

Templates of text models take a message's content as a text, those of many image models as a list of parts; given the
other form, they drop the words without an error. Rendering a word that no template has shows it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""A conversation as text; None if the template does not take it."""

PROBE = "zq7probe"
MARK = re.compile(r"zq\d+mark")
SEARCHES = 8  # that may fail in one conversation; see `_not_found`
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The parameters of a function that takes none."""
ASK: Message = {"role": "user", "content": "Hi."}
PROBES: Mapping[str, list[Message]] = {
    "user": [{"role": "user", "content": PROBE}],
    "system": [{"role": "system", "content": PROBE}, ASK],
    "assistant": [ASK, {"role": "assistant", "content": PROBE}, ASK],
}
"""By role, the users' first: a conversation that shows whether the template shows a message of this role."""


def roles_in_parts(render: Render) -> tuple[frozenset[str], frozenset[str]]:
    """The roles whose messages the template takes as lists of parts, and those that it shows in any form."""
    parts, shown = frozenset[str](), frozenset[str]()
    for role, conversation in PROBES.items():
        for form in (parts, parts | {role}):
            if PROBE in (render(in_parts(conversation, form)) or "").casefold():
                parts, shown = form, shown | {role}
                break
    return parts, shown


def shows_tools(render: Callable[[list[Message], Mapping[str, Any]], str | None]) -> tuple[bool, bool]:
    """Whether a template shows the request's tools, and calls in the history.

    Args:
        render: a conversation with these variables, as `Render`.
    """
    tools = [{"type": "function", "function": {"name": PROBE, "description": "Ask.", "parameters": NOTHING}}]
    ask = {"type": "function", "id": "zq7000000", "function": {"name": PROBE, "arguments": {}}}
    calling = [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [ask]},
        {"role": "tool", "tool_call_id": ask["id"], "content": "Hi."},
    ]
    shown = render([ASK], {"tools": tools}) or ""
    called = render(calling, {}) or ""
    return PROBE in shown.casefold(), PROBE in called.casefold()


def in_parts(messages: list[Message], roles: Collection[str]) -> list[Message]:
    """The messages, in which the content of those of some roles is a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in roles and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def missing_message(messages: list[Message], text: str, render: Render) -> int | None:
    """The index of a message whose text is not in the rendering; None if there is none.

    Templates trim texts, replace words in them and drop earlier reasoning. So a text that is not in the rendering as
    sent counts as missing only if another word in its place does not show either.

    Args:
        messages: only those whose content is a text count.
        text: the rendering.
        render: renders other conversations in the same way.
    """
    doubtful = _not_found(messages, text)
    if not doubtful:
        return None
    marks = {i: f"zq{i}mark" for i in doubtful}
    again = render([{**message, "content": marks[i]} if i in marks else message for i, message in enumerate(messages)])
    if again is None:
        return None
    shown = set(MARK.findall(again.casefold()))
    return next((i for i, mark in marks.items() if mark not in shown), None)


def _not_found(messages: list[Message], text: str) -> list[int]:
    """Indices of messages whose text is not in the rendering after that of the previous message of the same role.

    A failed search reads the whole rendering. After a few of them the rest counts as not found.
    """
    ends: dict[str, int] = defaultdict(int)
    absent: list[int] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or message.get("tool_calls"):  # many templates drop the text beside calls
            continue
        content = content.strip()
        start = text.find(content, ends[message["role"]]) if len(absent) < SEARCHES else -1
        if start < 0:
            absent.append(i)
        else:
            ends[message["role"]] = start + len(content)
    return absent
