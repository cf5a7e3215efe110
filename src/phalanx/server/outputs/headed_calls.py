"""Calls whose name stands in a header before the JSON of the arguments: Mistral, Kimi K2, DeepSeek.

[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}
<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>
"""

from __future__ import annotations

import re

from msgspec import Struct

from phalanx.server.outputs.calls import MAX_NAME, Broken, Calls, arguments_object, end_call
from phalanx.server.outputs.json_calls import read_objects
from phalanx.server.outputs.reader import Reader, Steps, marks_of


class HeadedCalls(Struct, frozen=True):
    """`open` header `arguments` JSON `close`; any number of them, in a section or not."""

    open: str
    arguments: str  # the mark between header and JSON
    close: str = ""
    section: tuple[str, str] | tuple[()] = ()  # marks around all calls
    name: str = r"\s*([\w.-]+)\s*"  # the header, with the tool's name as its first group
    header: str = "{name}"  # as a model writes it: of a name and a number from 0
    before: str = ""  # as a model writes it, between `arguments` and JSON
    after: str = ""  # between JSON and `close`
    lists: bool = False  # `open` may also be followed by a list of objects with name and arguments

    @property
    def opens(self) -> tuple[str, ...]:
        return (*self.section[:1], self.open)

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.open, self.close, *self.section) if mark)

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.marks, self.arguments, self.header, "[CALL_ID]" if self.lists else "")

    @property
    def begins_bare(self) -> str:
        return ""

    def read(self, reader: Reader, calls: Calls, opened: str) -> Steps[None]:
        """Read the call, or the calls of the section, after the opening mark."""
        in_section = opened in self.section
        if not in_section:
            yield from self._call(reader, calls)
        while in_section and (yield from reader.next_nonspace()):
            if not (yield from reader.accept(self.open)):
                return
            yield from self._call(reader, calls)

    def _call(self, reader: Reader, calls: Calls) -> Steps[None]:
        """Read one call after its mark, and the marks that close it and its section, if they follow."""
        if self.lists and (yield from reader.next_nonspace()) in ("[", "{"):
            yield from read_objects(reader, calls)
            return
        header: list[str] = []
        ended = yield from reader.until(marks_of(self.arguments), header.append, most=MAX_NAME)
        found = re.fullmatch(self.name, "".join(header), re.DOTALL)
        if not ended or not found:
            raise Broken("The model's call has no name.")
        calls.begin(found.group(1))
        ends = tuple(filter(None, (self.after.strip(), self.close)))
        yield from arguments_object(reader, calls, *ends)
        yield from end_call(reader, calls, *ends, *self.section[1:])
