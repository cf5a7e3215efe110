"""Calls that are JSON objects with a name and arguments, between marks or bare: Hermes, Qwen, Llama 3.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Arguments are sent as they come if the name stands before them, as all models write it; else when the call is whole.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.server.outputs.calls import (
    ENDED,
    Broken,
    Calls,
    after_surplus,
    arguments_object,
    end_call,
    json_string,
    json_text,
    unwrapped,
)
from phalanx.server.outputs.reader import Reader, Steps

ARGUMENTS = ("arguments", "parameters")
KNOWN = ("name", *ARGUMENTS, "type", "id", "function")
"""Keys of a call's object. A bare object with another first key is an answer in JSON."""


class JsonCalls(Struct, frozen=True):
    """`open` object `close`, or a list of objects between them."""

    open: str
    close: str = ""
    arguments: str = "arguments"  # the key that the model was taught
    bare: bool = False  # an answer that begins with the object is a call too
    separator: str = ""  # between bare objects

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,) if self.open else ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.open, self.close) if mark)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.marks

    @property
    def begins_bare(self) -> str:
        """The first character of an answer that may be a call without marks."""
        return "{" if self.bare else ""

    def read(self, reader: Reader, calls: Calls, opened: str) -> Steps[None]:
        """Read the calls after `opened`, which is "" for an answer that begins with one."""
        close = "" if self.separator else self.close
        yield from read_objects(reader, calls, bare=not opened, close=close)
        while self.separator and (yield from reader.next_nonspace()) == self.separator:
            yield from reader.accept(self.separator)
            yield from read_objects(reader, calls, bare=not opened, close=close)


def read_objects(reader: Reader, calls: Calls, *, bare: bool = False, close: str = "") -> Steps[None]:
    """Read one call, or a list of calls, and `close` after it, which may be missing."""
    marks = (close,) if close else ()
    if (yield from reader.next_nonspace()) != "[":
        yield from read_object(reader, calls, bare=bare)
        yield from end_call(reader, calls, *marks)
        return
    yield from reader.accept("[")
    while True:
        yield from read_object(reader, calls, bare=bare)
        following = yield from after_surplus(reader, "}")
        if (yield from reader.accept("]")):
            yield from end_call(reader, calls, *marks)
            return
        calls.end()
        if not (yield from reader.accept(",")):
            raise Broken("the list of calls is not JSON." if following else ENDED)


def read_object(reader: Reader, calls: Calls, *, bare: bool) -> Steps[None]:
    """Read the object of one call, without its end.

    Raises:
        Broken: it is not a call. A `bare` object must begin with a call's key, and have a tool's name and arguments.
    """
    name = held = ""
    sent = False
    if (yield from reader.next_nonspace()) != "{":
        raise Broken("The model's call is not a JSON object.")
    yield from reader.accept("{")
    following = yield from reader.next_nonspace()
    while following != "}":
        key = yield from _key(reader)
        if bare and not name and key not in KNOWN:
            raise Broken("The model's call has no name.")
        if key == "name" and not name:
            name = yield from json_string(reader)
            calls.offered(name)
        elif key not in ARGUMENTS:
            yield from json_text(reader)
        elif sent or held:
            raise Broken("it has arguments twice.")
        elif name and (yield from reader.next_nonspace()) == "{":
            calls.begin(name)
            sent = True
            yield from arguments_object(reader, calls)
        else:
            held = unwrapped((yield from json_text(reader)).strip())
        following = yield from _next_member(reader)
    yield from reader.accept("}")
    if not name or (bare and not sent and not held):
        raise Broken("The model's call has no name or no arguments.")
    if not sent:
        calls.begin(name)
        calls.arguments(held or "{}")


def _key(reader: Reader) -> Steps[str]:
    if (yield from reader.next_nonspace()) != '"':
        raise Broken("The model's call is not JSON.")
    key = yield from json_string(reader)
    if (yield from reader.next_nonspace()) != ":":
        raise Broken("The model's call is not JSON.")
    yield from reader.accept(":")
    yield from reader.next_nonspace()
    return key


def _next_member(reader: Reader) -> Steps[str]:
    """The character after a member of the object: "}", or the beginning of the next member."""
    following = yield from reader.next_nonspace()
    if following == "}":
        return following
    if following != ",":
        raise Broken("it is not JSON." if following else ENDED)
    yield from reader.accept(",")
    return "" if (yield from reader.next_nonspace()) == "}" else ","
