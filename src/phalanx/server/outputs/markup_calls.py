"""Calls whose parameters stand one by one in markup, as plain text: Qwen3-Coder, GLM, MiniMax and others.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The tool's schema says which values are strings; those are sent on as they come, other values when they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from phalanx.server.outputs import values
from phalanx.server.outputs.calls import MAX_NAME, Broken, Calls
from phalanx.server.outputs.json_calls import read_object
from phalanx.server.outputs.json_scanner import JsonScanner
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.outputs.reader import Reader, Steps, marks_of

ENDED = "the answer ended inside."

ValueRule = Literal["qwen", "glm", "minimax", "minicpm", "muse", "kimi"]
"""How the text of a value becomes JSON: see `MarkupCalls.convert`."""


class MarkupCalls(Struct, frozen=True):
    """Marks of calls and parameters, in the order in which they stand in a text.

    Heads of calls and parameters hold a name, and may hold more: `call_name` and `key_name` have it as first group.
    """

    call: tuple[str, str]
    parameter: tuple[str, str]
    call_head: str  # ends a call's head; "": the first parameter's mark or the call's end does
    key_head: tuple[str, ...]  # ends a parameter's head; several marks: with white space between them
    rule: ValueRule
    section: tuple[str, str] | tuple[()] = ()  # marks around calls
    shared: bool = False  # as a model writes it: all calls stand in one section
    call_name: str = r"\s*[\"']?([^\"'>\s]+)[\"']?\s*"
    key_name: str = r"\s*[\"']?([^\"'>]+?)[\"']?\s*"
    trim: values.Trim = "space"
    pad: str = ""  # as a model writes it: around values that are trimmed
    gap: str = ""  # between marks, or nothing
    written_call: str = "{name}"  # a call's head, of its name and a number from 1
    written_key: str = "{name}"  # a parameter's head, of its name and its type in JSON

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.section[0] if self.section else self.call[0],)

    @property
    def marks(self) -> tuple[str, ...]:
        return self.section or self.call

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.section, *self.call, *self.parameter, self.call_head, *self.key_head)

    @property
    def begins_bare(self) -> str:
        return ""

    def read(self, reader: Reader, calls: Calls, opened: str) -> Steps[None]:
        """Read the call, or the calls of the section, after the opening mark."""
        if not self.section:
            yield from self._call(reader, calls)
            calls.end()
            return
        n = 0
        closed = False
        while not closed and (yield from reader.next_nonspace()) and (yield from reader.accept(self.call[0])):
            yield from self._call(reader, calls)
            yield from reader.next_nonspace()
            closed = yield from reader.accept(self.section[1])
            calls.end()
            n += 1
        if not n:
            at_end = not (yield from reader.peek())
            raise Broken(ENDED if at_end else "What the model wrote as a call cannot be read as one.")

    def _call(self, reader: Reader, calls: Calls) -> Steps[None]:
        """Read one call after its mark, up to and with its closing mark."""
        if not self.call_head and (yield from reader.next_nonspace()) == "{":
            yield from read_object(reader, calls, bare=False)
            yield from reader.next_nonspace()
            yield from reader.accept(self.call[1])
            return
        head: list[str] = []
        ends = (self.call_head,) if self.call_head else (self.parameter[0], self.call[1])
        mark = yield from reader.until(marks_of(*ends), head.append, most=MAX_NAME)
        found = re.fullmatch(self.call_name, "".join(head), re.DOTALL)
        if not mark or not found:
            raise Broken("What the model wrote as a call has no name.")
        tool = calls.begin(found.group(1))
        calls.arguments("{")
        before = ""
        while mark != self.call[1]:
            if mark == self.parameter[0]:
                yield from self._parameter(reader, calls, tool, before)
                before = ", "
            yield from reader.next_nonspace()
            mark = self.parameter[0] if (yield from reader.accept(self.parameter[0])) else ""
            if not mark and (yield from reader.accept(self.call[1])):
                mark = self.call[1]
            if not mark:
                raise Broken("there is text between its parameters." if (yield from reader.peek()) else ENDED)
        calls.arguments("}")

    def _parameter(self, reader: Reader, calls: Calls, tool: ToolDefinition, before: str) -> Steps[None]:
        head: list[str] = []
        found = (yield from reader.until(marks_of(self.key_head[0]), head.append, most=MAX_NAME)) != ""
        for literal in self.key_head[1:]:
            yield from reader.next_nonspace()
            found = (yield from reader.accept(literal)) and found
        key = re.fullmatch(self.key_name, "".join(head), re.DOTALL)
        if not found or not key:
            raise Broken("one of its parameters has no name.")
        name = key.group(1)
        if self.rule == "kimi":
            name = name.replace("&quot;", '"').replace("&amp;", "&")
        root = tool.parameters
        properties = root.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        begin = f"{before}{values.to_json(name)}: "
        close = marks_of(self.parameter[1])
        if self.is_string(schema, root, "".join(head)):
            value = values.StreamedString(self.trim, may_be_null=self.rule in ("qwen", "minimax"))
            calls.arguments(begin)
            closed = yield from reader.until(close, lambda text: calls.arguments(value.add(text)))
            calls.arguments(value.finish() if closed else "")
        else:
            parts: list[str] = []
            if self.rule in ("muse", "kimi") or "string" not in values.types_of(schema, root):
                # a closing mark inside of JSON's strings does not end the value
                yield from reader.through(JsonScanner().take, parts.append)
            closed = yield from reader.until(close, parts.append)
            if closed:
                calls.arguments(begin + self.convert("".join(parts), schema, root))
        if not closed:
            raise Broken(ENDED)

    def is_string(self, schema: Any, root: Mapping[str, Any], head: str = "") -> bool:
        """Whether every text is a string for a parameter of this schema, so that it can be sent on as it comes.

        `root`: the schema of all arguments, for references; `head`: the parameter's head, which may say the type.
        """
        types = values.types_of(schema, root)
        if self.rule == "kimi":
            return 'type="' not in head or 'type="string"' in head
        if self.rule in ("qwen", "minimax"):
            return types == {"string"} or not schema
        return self.rule == "glm" and types == {"string"}

    def convert(self, text: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The JSON of a whole value."""
        if self.trim == "newline":
            text = text.removeprefix("\n").removesuffix("\n")
        elif self.trim == "space":
            text = text.strip()
        types = values.types_of(schema, root)
        if self.rule in ("muse", "kimi"):
            return values.convert_json(text)
        if self.rule == "glm" and len(types) <= 1:
            return values.convert_guessed(text)
        if self.rule == "minicpm":
            text = _without_cdata(text)
        return values.convert_typed(text, types, containers=self.rule == "qwen" and bool(schema))


def _without_cdata(text: str) -> str:
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text[len("<![CDATA[") : -len("]]>")]
    return text
