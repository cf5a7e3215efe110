"""A file of this machine's measurements, each valid until the machine or a version changes.

A file that cannot be read counts as empty, so the measurements are repeated.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

FILE = "calibrations.json"  # in ~/.phalanx
MAX_ENTRIES = 200

T = TypeVar("T")


class Entry(Struct, frozen=True, kw_only=True):
    """One measurement."""

    at: float
    """Seconds since 1970."""
    what: str
    """Description for readers of the file."""
    value: msgspec.Raw


class CalibrationStore:
    """The file.

    Args:
        folder: of the file; created with the first entry.
        machine: everything about this machine and its software that affects timings.
        since: seconds since 1970; earlier measurements count as missing.
    """

    def __init__(self, folder: Path, machine: tuple[str, ...], since: float = 0.0) -> None:
        self._folder = folder
        self._file = folder / FILE
        self._machine = machine
        self._since = since

    def from_now_on(self) -> CalibrationStore:
        """The same file, without the measurements until now."""
        return CalibrationStore(self._folder, self._machine, time.time())

    def get(self, what: tuple[str, ...], kind: type[T]) -> T | None:
        """A measurement; None if there is none, or machine or software have changed since."""
        entry = self._read().get(self._key(what))
        try:
            return None if entry is None or entry.at < self._since else msgspec.json.decode(entry.value, type=kind)
        except msgspec.DecodeError:
            return None

    def put(self, what: tuple[str, ...], value: object) -> None:
        """Keep a measurement; drops the oldest beyond MAX_ENTRIES.

        Raises:
            OSError: the file cannot be written.
        """
        entries = self._read()
        raw = msgspec.Raw(msgspec.json.encode(value))
        entries[self._key(what)] = Entry(at=time.time(), what=" ".join((*what, *self._machine)), value=raw)
        newest = sorted(entries.items(), key=lambda item: -item[1].at)[:MAX_ENTRIES]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        beside = self._file.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(dict(newest))))
        beside.replace(self._file)

    def _key(self, what: tuple[str, ...]) -> str:
        return hashlib.blake2b(msgspec.json.encode((what, self._machine)), digest_size=12).hexdigest()

    def _read(self) -> dict[str, Entry]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, Entry])
        except (OSError, msgspec.DecodeError, RecursionError):
            return {}
