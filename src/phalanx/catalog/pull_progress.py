"""Progress of a download in the form of Ollama's `/api/pull`, which Ollama's clients draw as a bar per file."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

ASKING = "pulling manifest"
"""The status while the hub is asked which files a model has."""


class PullProgress(Struct, frozen=True, omit_defaults=True):
    """A line of a pull. `total` and `completed` are bytes of the file with this digest."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int | None = None  # 0 is shown


Report = Callable[[PullProgress], None]


def quiet(progress: PullProgress) -> None:
    """The report of programs that show no progress themselves; the hub's client then draws its own bars."""
