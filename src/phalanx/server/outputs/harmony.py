"""Harmony, the format of gpt-oss: messages on channels.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": ...}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

`analysis` is reasoning, a message to `functions.` is a call, everything else is content.
"""

from __future__ import annotations

import re

from msgspec import Struct

from phalanx.server.outputs.calls import MAX_NAME, Broken, Calls, arguments_object, end_call
from phalanx.server.outputs.reader import Reader, Steps, marks_of

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

_STRAY = (MESSAGE, CONSTRAIN, *ENDS)  # marks without effect if no header stands before them
_MARKS = marks_of(*MARKS)
_MESSAGE = marks_of(MESSAGE)
_ENDS = marks_of(*ENDS)
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyCalls(Struct, frozen=True):
    """The marks of the format. Reasoning and calls are read together, by `read_harmony`."""

    marks: tuple[str, ...] = MARKS
    texts: tuple[str, ...] = MARKS


def read_harmony(reader: Reader, calls: Calls, is_bound: bool) -> Steps[None]:
    """Read a whole answer. `is_bound`: a grammar constrains its content, in which marks are text."""
    opened = ""
    while opened or (opened := (yield from reader.until(_MARKS, calls.text))):
        if opened in _STRAY:
            opened = ""
            continue
        reader.record(opened)
        calls.mark(keeps_space=False)
        try:
            opened = yield from _message(reader, calls, opened, is_bound)
        except Broken as broken:
            calls.broken(str(broken), _MARKS)
            opened = ""
        reader.stop_recording()


def _message(reader: Reader, calls: Calls, opened: str, is_bound: bool) -> Steps[str]:
    """Read one message after the first mark of its header; the mark of the next one if it was taken."""
    header = [opened]
    if not (yield from reader.until(_MESSAGE, header.append, most=MAX_NAME)):
        raise Broken("")
    recipient = _RECIPIENT.search("".join(header))
    channel = _CHANNEL.search("".join(header))
    if recipient:
        calls.begin(recipient.group(1).removeprefix("functions."))
        yield from arguments_object(reader, calls, *ENDS)
        yield from end_call(reader, calls, *ENDS)
        return ""
    reader.stop_recording()
    is_reasoning = channel is not None and channel.group(1) == "analysis"
    if is_bound and not is_reasoning:
        while (mark := (yield from reader.until(_ENDS, calls.text))) and (yield from reader.peek()):
            calls.text(mark)
        return ""
    mark = yield from reader.until(_MARKS, calls.reasoning if is_reasoning else calls.text)
    if is_reasoning:
        calls.end_reasoning()
    return mark
