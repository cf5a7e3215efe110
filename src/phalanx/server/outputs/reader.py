"""Reads text while it comes, by generators that pause where they need more.

A parser of a format is written as if it had the whole text; each `yield` means "wait for more text". All waiting is in
this file, and every method takes the same text wherever it is cut. The work is linear: text that cannot be part of a
mark is taken at once and never read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: pauses where it needs more text, and returns a T."""

SPACE = " \t\n\r"


class Marks:
    """Texts to search for; none may be a prefix of another."""

    def __init__(self, marks: Collection[str]) -> None:
        self.pattern = re.compile("|".join(re.escape(mark) for mark in sorted(marks)) or r"(?!)")
        self._beginnings = frozenset(mark[:n] for mark in marks for n in range(1, len(mark)))
        self._longest = max(map(len, marks), default=0)

    def held(self, text: str, at: int) -> int:
        """The length of the end of `text`, from `at` on, that may begin a mark."""
        for n in range(min(self._longest - 1, len(text) - at), 0, -1):
            if text[-n:] in self._beginnings:
                return n
        return 0


@lru_cache(maxsize=256)
def marks_of(*marks: str) -> Marks:
    """The marks, compiled once."""
    return Marks(marks)


class Reader:
    """The text so far, and how much of it was taken."""

    def __init__(self) -> None:
        self.ended = False  # no more text will come
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append text, and drop the text that was taken."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self, first: str = "") -> None:
        """Start a recording: from now on `recorded` is `first` and all text that is taken."""
        self._record = [first]

    def recorded(self) -> str:
        """The recording since `record`; empty if there is none."""
        return "".join(self._record or ())

    def stop_recording(self) -> None:
        """End and forget the recording."""
        self._record = None

    def peek(self) -> Steps[str]:
        """The next character, not taken; "" at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def next_nonspace(self) -> Steps[str]:
        """Take white space; the next character after it, not taken; "" at the end."""
        while (char := (yield from self.peek())) and char in SPACE:
            self._take(1)
        return char

    def accept(self, literal: str) -> Steps[bool]:
        """Take `literal` if the text continues with it."""
        if found := (yield from self.follows(literal)):
            self._take(len(literal))
        return found

    def follows(self, literal: str) -> Steps[bool]:
        """Whether the text continues with `literal`, which is not taken."""
        while len(self._text) - self._at < len(literal):
            if self.ended or not literal.startswith(self._text[self._at :]):
                return False
            yield
        return self._text.startswith(literal, self._at)

    def after_space(self, *literals: str) -> Steps[str | None]:
        """The one of `literals` that follows, also after white space; "" at the end, None before other text.

        Nothing is taken.
        """
        spaces: list[str] = []
        while (char := (yield from self.peek())) and char in SPACE:
            spaces.append(self._take(1))
        found = None if char else ""
        for literal in literals:
            if found is None and (yield from self.follows(literal)):
                found = literal
        self.give_back("".join(spaces))
        return found

    def head(self, marks: Marks, most: int) -> Steps[str]:
        """The text before the first of `marks`, or of the first `most` characters. Nothing is taken."""
        parts: list[str] = []
        mark = yield from self.until(marks, parts.append, most)
        text = "".join(parts)
        self.give_back(text + mark)
        return text

    def until(self, marks: Marks, emit: Callable[[str], object], most: int | None = None) -> Steps[str]:
        """Pass the text before the first of `marks` to `emit`, take the mark and return it.

        "" if the text ends before, or after `most` characters without a mark (not a header).
        """
        n = 0
        while True:
            found = marks.pattern.search(self._text, self._at)
            end = len(self._text) - (0 if self.ended else marks.held(self._text, self._at))
            if found and found.start() <= end:
                end = found.start()
            else:
                found = None  # or one inside text that may become a longer mark
            if most is not None and n + end - self._at > most:
                emit(self._take(most - n))
                return ""
            if end > self._at:
                n += end - self._at
                emit(self._take(end - self._at))
            if found:
                return self._take(len(found.group()))
            if self.ended:
                return ""
            yield

    def through(self, take: Callable[[str, int], int], emit: Callable[[str], object]) -> Steps[bool]:
        """Pass text to `emit` up to the place where `take(text, at)` stops, which it returns.

        True when it stops before the end of the text so far; False if the text ended.
        """
        while True:
            end = take(self._text, self._at)
            if end > self._at:
                emit(self._take(end - self._at))
            if self._at < len(self._text):
                return True
            if self.ended:
                return False
            yield

    def give_back(self, text: str) -> None:
        """Give back `text`, which was taken last."""
        n = len(text)
        if n <= self._at:
            self._at -= n
        else:
            self._text, self._at = text + self._text[self._at :], 0
        while n and self._record is not None:
            last = self._record.pop()
            if len(last) > n:
                self._record.append(last[:-n])
            n -= min(n, len(last))

    def _take(self, n: int) -> str:
        text = self._text[self._at : self._at + n]
        self._at += n
        if self._record is not None:
            self._record.append(text)
        return text
