"""Keeps logs small: repeated lines are counted instead of written, and a file that has grown too large is rotated."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

PERIOD_S = 10.0  # in which repetitions are counted: a person who watches the log sees within it that they go on
ALLOWED = 20
"""Lines of one kind that are written in one period: a start, or a fault of 16 ranks, says less about one thing."""
KINDS = 1000  # kinds that are counted apart in one period; more share one count
DIGITS = re.compile(r"\d+")
KIND_CHARS = 200  # of a line that decide its kind, so that keys of the counts stay short
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # a new file: what another user put there is not written to
MAX_FILE = 32 << 20
"""Bytes of a log file: months of usual use. With its predecessor, a log takes twice this."""


class RepeatCounter:
    """Lets the first lines of each kind pass in every period, and counts the rest.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._seen: Counter[str] = Counter()
        self._last: dict[str, str] = {}  # kind -> the last line that was left out

    def admit(self, kind: str, line: str) -> bool:
        """Count a line. Returns whether to write it. Changes state."""
        if kind not in self._seen and len(self._seen) >= KINDS:
            kind = ""
        self._seen[kind] += 1
        if self._seen[kind] <= ALLOWED:
            return True
        self._last[kind] = line
        return False

    def ended(self, *, now: bool = False) -> list[str]:
        """If the period is over, one line for each kind that had lines left out; a new period begins.

        Args:
            now: the period ends in any case.
        """
        if not now and self._clock() - self._begun < PERIOD_S:
            return []
        lines = [f"(repeated {self._seen[kind] - ALLOWED:,} times: {line})" for kind, line in self._last.items()]
        self._begun = self._clock()
        self._seen.clear()
        self._last.clear()
        return lines


def kind_of(line: str) -> str:
    """The line with its digits masked: equal for lines that differ in numbers only."""
    return DIGITS.sub("0", line[:KIND_CHARS])


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes log records to a stream; of many with the same text before its arguments, writes how many there were."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._repeats = RepeatCounter(clock)

    def emit(self, record: logging.LogRecord) -> None:
        self._write_ended()
        if self._repeats.admit(f"{record.name} {record.levelno} {str(record.msg)[:KIND_CHARS]}", record.getMessage()):
            super().emit(record)

    def close(self) -> None:
        self._write_ended(now=True)
        super().close()

    def _write_ended(self, *, now: bool = False) -> None:
        for line in self._repeats.ended(now=now):
            super().emit(logging.LogRecord("phalanx", logging.WARNING, "", 0, "%s", (line,), None))


def rotate(file: Path, largest: int = MAX_FILE) -> bool:
    """If a log has grown too large, keep it as NAME.1 and empty it. Returns whether it did.

    Processes that write the log go on: it has to be open for appending. Lines of the moment between may be lost.
    """
    try:
        if file.stat().st_size <= largest:
            return False
        previous = file.with_name(file.name + ".1")
        previous.unlink(missing_ok=True)
        with file.open("rb") as log, os.fdopen(os.open(previous, CREATE, 0o600), "wb") as kept:
            shutil.copyfileobj(log, kept)
        with file.open("r+b") as log:
            log.truncate(0)
    except OSError:  # the log was deleted, or the disk is full: then nothing can be kept
        return False
    return True
