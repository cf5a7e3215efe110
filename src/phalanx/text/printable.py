"""Makes text of models, clients and hosts safe to print: it can neither command a terminal nor forge a line of a log.

An escape sequence can rename a window, hide the text after it or answer a query of the terminal; an override of the
writing direction shows other words than the text has.
"""

from __future__ import annotations

import logging
import re

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 controls except tab and newline, and the characters that override or embed a writing direction."""


def printable(text: str) -> str:
    """The text with control characters as in Python's literals, such as `\\x1b`; tabs and newlines stay."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def as_entry(text: str) -> str:
    """The text as `printable`, and as one entry of a log: further lines are indented, so that they cannot pass for
    entries."""
    return printable(text).replace("\n", "\n  ")


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning with a note of how long it is."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class LineFormatter(logging.Formatter):
    """Formats a record as one entry."""

    def format(self, record: logging.LogRecord) -> str:
        return as_entry(super().format(record))
