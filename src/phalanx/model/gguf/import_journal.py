"""Keeps which tensors of an unfinished import are on the disk, so that it goes on after the last of them.

A line of JSON per tensor, written once the tensor's bytes are. The first line stands for the layout and the version of
phalanx: an import of another version starts anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

from phalanx import __version__

SYNC = 64 << 20  # bytes of tensors that are written between two waits for the disk


class ImportJournal:
    """The journal of a file of weights.

    Args:
        file: of the journal.
        weights: the file of weights.
        layout: the start of that file, which says where each tensor lies.
    """

    def __init__(self, file: Path, weights: Path, layout: bytes) -> None:
        self._file = file
        self._plan = hashlib.sha256(layout + __version__.encode()).hexdigest()
        self._pending: list[str] = []
        self._bytes = 0
        self.finished: dict[str, float | None] = self._read() if weights.is_file() else {}
        """Tensor -> its largest error; None: it is exact."""
        if not self.finished:
            weights.write_bytes(layout)
            file.write_text(json.dumps(self._plan) + "\n")

    def _read(self) -> dict[str, float | None]:
        try:
            first, *lines = self._file.read_text().split("\n")
            if json.loads(first) != self._plan:
                return {}
            return dict(json.loads(line) for line in lines[:-1])  # the last one has no end, if it was cut off
        except (OSError, ValueError, TypeError):
            return {}

    def add(self, tensor: str, error: float | None, nbytes: int, out: BinaryIO) -> None:
        """Note a tensor that was written, once it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        self._pending.append(json.dumps([tensor, error]) + "\n")
        self._bytes += nbytes
        if self._bytes >= SYNC:
            self._sync(out)

    def finish(self, out: BinaryIO) -> None:
        """Wait until the last tensor is on the disk; the journal is done with.

        Raises:
            OSError: it cannot be written.
        """
        self._sync(out)
        self._file.unlink()

    def _sync(self, out: BinaryIO) -> None:
        out.flush()
        os.fsync(out.fileno())
        with self._file.open("a") as file:
            file.write("".join(self._pending))
        self._pending, self._bytes = [], 0
