"""Renders a chat template exactly as transformers does, because chat templates are written for transformers.

A template is a program from the model's repository that processes the client's data. It therefore runs in jinja2's
sandbox and gets only copies of plain JSON values. `template_process.py` limits what it takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions that a template raises on messages that it does not support."""

STEERING = frozenset(
    "self conversation chat_template add_generation_prompt continue_final_message tokenize sanitize_control_tokens "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Parameters of transformers' `apply_chat_template` that are not template variables."""

OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks in the rendered text where the final message ends. The space shows whether the template strips messages."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which templates read a message's reasoning; the first is the standard one."""

Message = dict[str, Any]


def render(
    template: str,
    messages: list[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    now: datetime | None = None,
) -> str:
    """Render a conversation as text.

    Args:
        template: jinja2 source.
        messages: not empty; keys whose value is None are left out.
        add_generation_prompt: whether the template opens the assistant's turn.
        continue_final_message: end the text after the last message's content instead.
        variables: the template's other variables; `tools` and `documents` are lists of objects.
        now: the local time, for templates that tell the model the date; None: the clock's.

    Raises:
        Exception: one of `FAILURES`.
    """
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    compiled = _compile(template)
    others = {name: _plain(value) for name, value in variables.items()}
    tools, documents = others.pop("tools", None), others.pop("documents", None)
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("Tools should be JSON schemas.")
    if documents is not None and not all(isinstance(document, dict) for document in documents):
        raise TypeError("Documents should be a list of dicts with 'title' and 'text' keys!")
    chat = [_with_reasoning({k: _plain(v) for k, v in message.items() if v is not None}) for message in messages]
    final = _mark_end(chat[-1], template) if continue_final_message else ""
    others = {"strftime_now": (now or datetime.now()).strftime, **others}
    text = compiled.render(
        messages=chat, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt, **others
    )
    return _cut_at_mark(text, final) if continue_final_message else text


def _plain(value: Any) -> Any:
    """A copy that consists of JSON values: methods of other objects could lead out of the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning, if any, under both `thinking` and `reasoning_content`."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(message: Message, template: str) -> str:
    """Mark the end of the final message's content. Returns the content without the mark."""
    content = message.get("content")
    if content is None:
        raise ValueError('continue_final_message is set but the final message has no "content" to continue!')
    if "content" not in template:
        raise ValueError(
            'continue_final_message is set to "content" but this is not an accepted field in the chat_template'
        )
    if not isinstance(content, (list, tuple)):
        message["content"] = content + OPEN_END
        return str(content)
    for block in reversed(content):
        if "text" in block:
            text = str(block["text"])
            block["text"] = text + OPEN_END
            return text
    raise ValueError("continue_final_message is set but we could not find any text to continue in the final message!")


def _cut_at_mark(text: str, final: str) -> str:
    """The text before the mark, with trailing space if the template keeps a message's trailing space."""
    mark = OPEN_END.strip()
    if final.strip() not in text or mark not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat "
            "template! This can happen if the chat template deletes portions of the final message. Please verify the "
            "chat template and final message in your chat to ensure they are compatible."
            f"Final message to continue: {final.strip()}\nRendered chat:\n{text}"
        )
    at = text.rindex(mark)
    kept = text[at : at + len(OPEN_END)] == OPEN_END
    return text[:at] if kept else text[:at].rstrip()


# The environment of a template ------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, dict=_Dict(), namespace=_Namespace)
    return environment.from_string(template)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; rendering only needs its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers' filter: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)` for templates, without the class's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """jinja2's namespace, which refuses names with a leading underscore: they lead into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )
