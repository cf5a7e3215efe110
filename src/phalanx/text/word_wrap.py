"""Breaks texts into lines of whole words that fit a terminal, also while a text comes.

By itself a terminal cuts a word at its right edge. Blocks of code stay unchanged.
"""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TextIO

PARTS = re.compile(
    r"\n|[^\S\n]+|[\u2e80-\ud7ff\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\ud7ff\uf900-\ufaff\uff00-\uffef]+"
)
"""Ends of lines, blanks, words; each character of a language without blanks is a word."""
FENCE = "```"
MAX_BEGIN = 80  # characters of a line in which a fence is looked for


def cell_len(text: str) -> int:
    """Columns that a text takes. Without rich, which has a table of its own, since ranks import this module as well."""
    if text.isascii():
        return len(text)
    shown = [char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf")]
    return len(shown) + sum(unicodedata.east_asian_width(char) in "WF" for char in shown)


class WordWrap:
    """Breaks one text. If the file is not a terminal, the text stays unchanged.

    Args:
        file: a terminal, whose width is asked for at every word, since windows change.
        indent: begins continued lines.
    """

    def __init__(self, file: TextIO, indent: str = "") -> None:
        self._file = file
        self._indent = indent
        self._begin = ""  # of the line, in the text
        self._column = 0  # of the terminal's cursor
        self._blanks = self._word = ""  # held back: more of the word may come
        self._may_break = False  # before the word
        self._is_code = False

    def add(self, text: str) -> str:
        """The text that can be shown after a further part."""
        return "".join(map(self._add, PARTS.findall(self._as_shown(text))))

    def end(self) -> str:
        """The rest of the text."""
        return self._place(columns_of(self._file))

    def _add(self, part: str) -> str:
        room = columns_of(self._file)
        if part == "\n":
            shown = self._place(room) + part
            self._is_code ^= self._begin.lstrip().startswith(FENCE)
            self._begin, self._column, self._may_break = "", 0, False
            return shown
        self._begin += part[: MAX_BEGIN - len(self._begin)]
        is_wide = cell_len(part) > 1 == len(part)
        shown = self._place(room) if part.isspace() or is_wide else ""
        if part.isspace():
            self._blanks, self._may_break = part, True
            return shown
        self._word += part
        self._may_break |= is_wide
        if is_wide or self._is_code or cell_len(self._word) > room:
            shown += self._place(room)
            self._may_break = is_wide
        return shown

    def _place(self, room: int) -> str:
        """The word, on the next line if this one has no room for it."""
        width = cell_len(self._blanks + self._word)
        if self._word and self._may_break and self._column and self._column + width > room > 0 and not self._is_code:
            shown, self._column = f"\n{self._indent}", len(self._indent)
            width = cell_len(self._word)
        else:
            shown = self._blanks
        shown += self._word
        self._column += width
        if self._column > room > 0:  # the terminal itself has begun another line
            self._column %= room
        self._blanks = self._word = ""
        self._may_break = False
        return shown

    def _as_shown(self, text: str) -> str:
        """With escapes for characters that the terminal lacks, since they are wider."""
        encoding = self._file.encoding or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)


def fitted(text: str, file: TextIO) -> str:
    """A whole text, with continued lines indented, so that they cannot pass for entries of a log."""
    wrap = WordWrap(file, indent="  ")
    return wrap.add(text) + wrap.end()


def columns_of(file: TextIO) -> int:
    """Width of the terminal; 0 if the file is not one, or the width is unknown."""
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (OSError, ValueError):
        return 0
