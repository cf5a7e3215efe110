"""Parses one answer's text, by its model's formats of reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.server.outputs.calls import Broken, Calls
from phalanx.server.outputs.formats import ReasoningFormat, ToolFormat
from phalanx.server.outputs.harmony import HarmonyCalls, read_harmony
from phalanx.server.outputs.markup_calls import MarkupCalls
from phalanx.server.outputs.pieces import CallArguments, Piece, ReasoningPiece, TextPiece, ToolDefinition
from phalanx.server.outputs.reader import Marks, Reader, Steps


class FormatParser:
    """An `OutputParser` that runs the steps of reading a whole answer."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        offered: Sequence[ToolDefinition],
        *,
        in_reasoning: bool,
        is_bound: bool,
    ) -> None:
        self._reader = Reader()
        self._calls = Calls(self._reader, offered)
        if isinstance(tools, HarmonyCalls):
            steps = read_harmony(self._reader, self._calls, is_bound)
        else:
            steps = _Answer(self._reader, self._calls, reasoning, tools, is_bound).read(in_reasoning)
        self._steps = steps
        self._running = True
        self._run()

    @property
    def detail(self) -> str:
        return self._calls.detail

    def add(self, text: str) -> list[Piece]:
        self._reader.feed(text)
        self._run()
        return self._taken()

    def finish(self) -> list[Piece]:
        self._reader.ended = True
        self._run()
        self._calls.finish()
        return self._taken()

    def _run(self) -> None:
        if self._running:
            self._running = next(self._steps, self) is not self

    def _taken(self) -> list[Piece]:
        """The pieces so far, neighbours of one kind joined."""
        pieces, self._calls.pieces = self._calls.pieces, []
        joined: list[Piece] = []
        run: list[str] = []
        for i, piece in enumerate(pieces):
            if not isinstance(piece, (TextPiece, ReasoningPiece, CallArguments)):
                joined.append(piece)
                continue
            run.append(piece.text)
            if i + 1 == len(pieces) or type(pieces[i + 1]) is not type(piece):
                joined.append(type(piece)("".join(run)))
                run = []
        return joined


class _Answer:
    """Content with blocks of reasoning and calls in it.

    Args:
        is_bound: a grammar constrains the answer to reasoning, and then calls or content without marks.
    """

    def __init__(
        self,
        reader: Reader,
        calls: Calls,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        is_bound: bool,
    ) -> None:
        assert not isinstance(tools, HarmonyCalls)
        self._reader = reader
        self._calls = calls
        self._tools = tools
        self._is_bound = is_bound
        self._opens = frozenset(tools.opens if tools else ())
        self._unmarked = tools.unmarked if isinstance(tools, MarkupCalls) else ""
        self._reasoning_opens = reasoning.open if reasoning else ""
        self._reasoning_closes = reasoning.close if reasoning else ""
        self._is_interrupted = False  # a call stands inside of reasoning, whose closing mark may follow
        others = (reasoning.open, reasoning.close, *reasoning.dropped) if reasoning else ()
        marks = {*self._opens, *(tools.marks if tools else ()), *others}
        self._dropped = Marks(marks)
        self._marks = Marks({*marks, self._unmarked} - {""})
        self._reasoning_ends = Marks({*self._opens, reasoning.close} if reasoning else ())

    def read(self, in_reasoning: bool) -> Steps[None]:
        """Read a whole answer."""
        opened = self._reasoning_opens if in_reasoning else ""
        if not opened and self._is_bound and self._reasoning_opens:
            opened = self._reasoning_opens if (yield from self._reader.accept(self._reasoning_opens)) else ""
        if opened:
            opened = yield from self._reasoning()
        else:
            yield from self._bare()
        if self._is_bound and not opened and not (yield from self._reader.after_space(*self._opens)):
            yield from self._reader.until(Marks(()), self._calls.text)
            return
        while opened or (opened := (yield from self._reader.until(self._marks, self._calls.text))):
            opened = yield from self._mark(opened)

    def _mark(self, mark: str) -> Steps[str]:
        """Read the text after a mark; the mark of a call that ended it or follows directly."""
        if mark == self._reasoning_opens:
            return (yield from self._reasoning())
        is_text = mark == self._reasoning_closes and not self._is_interrupted
        if mark == self._unmarked:
            assert isinstance(self._tools, MarkupCalls)
            is_text = not (yield from self._tools.opens_call(self._reader, self._calls))
        if is_text:
            self._calls.text(mark)
            return ""
        self._calls.mark()
        if mark == self._reasoning_closes:
            self._is_interrupted = False
        if mark in self._opens or mark == self._unmarked:
            yield from self._read_calls(mark)
        return ""  # any other mark, which closes nothing

    def _reasoning(self) -> Steps[str]:
        """Read a block of reasoning; the mark of a call that ended it or follows directly."""
        self._calls.mark()
        mark = yield from self._reader.until(self._reasoning_ends, self._calls.reasoning)
        self._calls.end_reasoning()
        self._is_interrupted = mark in self._opens
        if self._is_interrupted:
            return mark
        return (yield from self._bare())

    def _bare(self) -> Steps[str]:
        """Read calls without marks at the beginning of content; always ""."""
        if self._tools and (first := self._tools.begins_bare):
            self._reader.record()
            if (yield from self._reader.next_nonspace()) == first:
                yield from self._read_calls("")
            else:
                self._calls.text(self._reader.recorded())
                self._reader.stop_recording()
        return ""

    def _read_calls(self, opened: str) -> Steps[None]:
        assert self._tools and not isinstance(self._tools, HarmonyCalls)
        if opened:
            self._reader.record(opened)
        try:
            yield from self._tools.read(self._reader, self._calls, opened)
        except Broken as broken:
            seen = opened or self._calls.sending  # otherwise it may not have been meant as a call
            self._calls.broken(str(broken) if seen else "", self._dropped)
        else:
            self._calls.mark()
        self._reader.stop_recording()
