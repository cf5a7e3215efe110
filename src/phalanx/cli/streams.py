"""Keeps commands alive when a standard stream fails: closed, full disk, reader gone, terminal without Unicode."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


class _Output(io.FileIO):
    """A descriptor that takes no harm from a failed write: it drops the data, and keeps the error for `failure`.

    Args:
        raises: whether a failed write raises as well, once.
    """

    def __init__(self, number: int, *, raises: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.failure: OSError | None = None
        self._raises = raises

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                return super().write(data) or 0  # None: a full pipe that does not block
            except OSError as error:
                self.failure = error if self._raises else None
                if self._raises:
                    raise
        return memoryview(data).nbytes


def secure(*, goes_on: bool) -> None:
    """Prepare the standard streams of this process; to be called once, before anything opens a file.

    A closed descriptor 0, 1 or 2 becomes /dev/null: the next socket would take its number, and messages of C libraries
    would go to a client. Characters that an encoding lacks are escaped. Stderr never raises.

    Args:
        goes_on: whether the command goes on without its stdout, as one that serves does; else a failed write ends it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = _text(_Output(1, raises=not goes_on), sys.stdout)
    sys.stderr = _text(_Output(2, raises=False), sys.stderr)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  (lives as long as the process)


def failure() -> OSError | None:
    """Why stdout took nothing more; None if it took everything so far."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _Output) else None


def _text(raw: _Output, replaced: Any) -> io.TextIOWrapper:
    encoding = getattr(replaced, "encoding", None) or "utf-8"
    by_line = raw.fileno() == 2 or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=by_line
    )
