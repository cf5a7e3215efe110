"""Where ranks of one machine meet."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def private() -> Iterator[Path]:
    """The path for a socket, in a directory like a start's: short, and only this user may enter it."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "control"
