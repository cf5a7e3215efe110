"""A bar on the terminal for every phase of loading."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

from phalanx.supervision.client import LoadProgress

BESIDE = 36
"""Columns of what stands beside a phase's name: a bar of 10, "100.0/140.2 GiB", the time."""


class LoadingBar:
    """Bars on stderr, which are gone when the context is left."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        name = Column(max_width=max(1, console.width - BESIDE), no_wrap=True, overflow="crop")
        columns = (
            TextColumn("{task.description}", table_column=name),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
        )
        self._bars = Bars(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def show(self, progress: LoadProgress) -> None:
        """Draw how far a phase is; a new phase gets a bar of its own."""
        total = max(1, progress.total)
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._bars.add_task(progress.phase, total=total)
        self._bars.update(self._tasks[progress.phase], completed=progress.done, total=total)
