"""Calls whose parameters stand one by one in markup, as plain text: Qwen3-Coder, GLM, MiniMax and others.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Values that are strings by the tool's schema are sent as they come, other values when they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from msgspec import Struct

from phalanx.server.outputs import values
from phalanx.server.outputs.calls import ENDED, MAX_NAME, Broken, Calls, after_surplus, arguments_object
from phalanx.server.outputs.json_calls import read_object
from phalanx.server.outputs.json_scanner import JsonScanner
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.outputs.reader import Reader, Steps, marks_of

_HEAD_ENDS = marks_of("<", ">", "\n")

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
    call_name: str = r"\s*[\"']?([^\"'<>\s]+)[\"']?\s*"
    key_name: str = r"\s*[\"']?([^\"'<>]+?)[\"']?\s*"
    block: tuple[str, str] | tuple[()] = ()  # marks around all arguments as JSON, in the place of parameters
    pad: str = ""  # white space that the template puts around a value
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

    @property
    def unmarked(self) -> str:
        """The mark of a call that stands outside of a section; "" for a format without sections."""
        return self.call[0] if self.section else ""

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that may end a value, by what follows them; the first one is the closing mark."""
        return (self.parameter[1], self.parameter[0], *self.call, *self.section[1:])

    def read(self, reader: Reader, calls: Calls, opened: str) -> Steps[None]:
        """Read the call, or the calls of the section, after the opening mark."""
        if not self.section or opened == self.unmarked:
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
            raise Broken(ENDED if at_end else "The model's call cannot be parsed.")

    def opens_call(self, reader: Reader, calls: Calls) -> Steps[bool]:
        """Whether the name of an offered tool follows the mark of a call."""
        found = re.fullmatch(self.call_name, (yield from reader.head(_HEAD_ENDS, MAX_NAME)), re.DOTALL)
        return found is not None and calls.offers(found.group(1))

    def _call(self, reader: Reader, calls: Calls) -> Steps[None]:
        """Read one call after its mark, up to and with its closing mark."""
        if not self.call_head and (yield from reader.next_nonspace()) == "{":
            yield from read_object(reader, calls, bare=False)
            yield from after_surplus(reader, "}")
            yield from reader.accept(self.call[1])
            return
        head: list[str] = []
        ends = (self.call_head, "\n") if self.call_head else (self.parameter[0], self.call[1])
        mark = yield from reader.until(marks_of(*ends), head.append, most=MAX_NAME)
        found = re.fullmatch(self.call_name, "".join(head), re.DOTALL)
        if not mark or not found:
            raise Broken("The model's call has no name.")
        if not self.call_head:
            reader.give_back(mark)
        tool = calls.begin(found.group(1))
        if self.block and (yield from reader.after_space(self.block[0])):
            rest = yield from self._block(reader, calls, self.block[1])
        else:
            rest = yield from self._parameters(reader, calls, tool)
        yield from reader.next_nonspace()
        if not (yield from reader.accept(self.call[1])):
            raise Broken("there is text between its parameters." if (yield from reader.peek()) else ENDED)
        calls.arguments(rest)

    def _block(self, reader: Reader, calls: Calls, close: str) -> Steps[str]:
        """Read all arguments as one JSON object between marks; the part that was not sent."""
        yield from reader.until(marks_of(self.call_head), lambda head: None, most=MAX_NAME)
        yield from arguments_object(reader, calls)
        yield from reader.next_nonspace()
        yield from reader.accept(close)
        return ""

    def _parameters(self, reader: Reader, calls: Calls, tool: ToolDefinition) -> Steps[str]:
        """Read all parameters; the part of the arguments' JSON that was not sent."""
        given: set[str] = set()
        while (yield from reader.after_space(self.parameter[0])):
            yield from reader.next_nonspace()
            yield from reader.accept(self.parameter[0])
            name, head = yield from self._key(reader)
            calls.arguments(f"{', ' if given else '{'}{values.to_json(name)}: ")
            given.add(name)
            yield from self._value(reader, calls, tool, name, head, given)
        return "}" if given else "{}"

    def _key(self, reader: Reader) -> Steps[tuple[str, str]]:
        """Take the head of a parameter: (its name, all of it). The line's end may stand for its mark."""
        head: list[str] = []
        yield from reader.next_nonspace()
        mark = yield from reader.until(marks_of(*self.key_head, "\n"), head.append, most=MAX_NAME)
        written = "".join(head)
        key = re.fullmatch(self.key_name, written, re.DOTALL)
        found = bool(mark)
        if len(self.key_head) > 1 and mark != self.key_head[-1]:
            for literal in self.key_head:
                yield from reader.next_nonspace()
                found = yield from reader.accept(literal)
        elif mark == "\n" and self.pad:
            reader.give_back(mark)  # it belongs to the value
        if not found or not key:
            raise Broken("one of its parameters has no name.")
        name = key.group(1)
        if self.rule == "kimi":
            name = name.replace("&quot;", '"').replace("&amp;", "&")
        return name, written

    def _value(
        self, reader: Reader, calls: Calls, tool: ToolDefinition, name: str, head: str, given: set[str]
    ) -> Steps[None]:
        """Read the value of a parameter, and send its JSON."""
        root = tool.parameters
        properties = root.get("properties")
        declared: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        schema = declared.get(name)
        missing = declared.keys() - given
        if self.is_string(schema, root, head):
            value = values.StreamedString(self.pad, may_be_null=self.rule in ("qwen", "minimax"))
            closed = yield from self._text(reader, calls, missing, lambda text: calls.arguments(value.add(text)))
            calls.arguments(value.finish(self.pad if closed else self.gap))
            return
        parts: list[str] = []
        scanner = JsonScanner()  # marks inside JSON's strings are text
        yield from reader.through(scanner.take, parts.append)
        if not scanner.whole or not (yield from reader.after_space(self.parameter[1])):
            reader.give_back("".join(parts))
            parts = []
        closed = yield from self._text(reader, calls, missing, parts.append)
        calls.arguments(self.convert("".join(parts), schema, root, closed=closed))

    def _text(
        self, reader: Reader, calls: Calls, missing: Collection[str], emit: Callable[[str], object]
    ) -> Steps[bool]:
        """Pass the text of a value to `emit`, up to its end; whether its closing mark stands there.

        The closing mark is text unless a parameter or the call's end follows it. Without it a value ends at the mark of
        one of the parameters `missing`, at the end of the call, or where another call begins (and this one is broken).

        Raises:
            Broken: the text ended.
        """
        marks = marks_of(*self.ends)
        while mark := (yield from reader.until(marks, emit)):
            if mark == self.parameter[1]:
                if (yield from reader.after_space(self.parameter[0], self.call[1])):
                    return True
            elif (yield from self._is_next(reader, calls, mark, missing)):
                reader.give_back(mark)
                return False
            emit(mark)
        raise Broken(ENDED)

    def _is_next(self, reader: Reader, calls: Calls, mark: str, missing: Collection[str]) -> Steps[bool]:
        """Whether a mark that was taken inside a value ends the value."""
        if mark == self.call[0]:
            return (yield from self.opens_call(reader, calls))
        if mark in self.section:
            return bool((yield from reader.after_space(*self.section[:1])))
        if mark == self.call[1]:
            return (yield from self._is_followed(reader))
        key = re.fullmatch(self.key_name, (yield from reader.head(_HEAD_ENDS, MAX_NAME)), re.DOTALL)
        return key is not None and key.group(1) in missing

    def _is_followed(self, reader: Reader) -> Steps[bool]:
        """Whether the answer ends, or another call begins, after the end of a call and of its section."""
        end: list[str] = []
        if (yield from reader.after_space(*self.section[1:])):
            end.append((yield from reader.until(marks_of(*self.section[1:]), end.append)))
        follows = yield from reader.after_space(self.call[0], *self.section[:1])
        reader.give_back("".join(end))
        return follows is not None

    def is_string(self, schema: Any, root: Mapping[str, Any], head: str = "") -> bool:
        """Whether a parameter of this schema is always a string, so that its text can be sent as it comes.

        `root`: the schema of all arguments, for references; `head`: the parameter's head, which may name the type.
        """
        types = values.types_of(schema, root)
        if self.rule == "kimi":
            return 'type="' not in head or 'type="string"' in head
        if self.rule in ("qwen", "minimax"):
            return types == {"string"} or not schema
        return self.rule == "glm" and types == {"string"}

    def convert(self, text: str, schema: Any, root: Mapping[str, Any], *, closed: bool = True) -> str:
        """The JSON of a whole value with the white space around it. `closed`: it had a closing mark."""
        text = text.removeprefix(self.pad).removesuffix(self.pad if closed else self.gap)
        types = values.types_of(schema, root)
        if self.rule in ("muse", "kimi"):
            return values.convert_json(text)
        if self.rule == "glm" and len(types) <= 1:
            return values.convert_guessed(text)
        if self.rule == "minicpm":
            text = _without_cdata(text)
        return values.convert_typed(text, types, containers=self.rule == "qwen" and bool(schema))


def _without_cdata(text: str) -> str:
    inner = text.strip()
    if inner.startswith("<![CDATA[") and inner.endswith("]]>"):
        return inner[len("<![CDATA[") : -len("]]>")]
    return text
