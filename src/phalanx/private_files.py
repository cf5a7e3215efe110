"""Writes files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(file: Path, data: bytes) -> None:
    """Write a new file of mode 0600.

    Raises:
        OSError: a file, or a link, has this name already; or the file cannot be written.
    """
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
