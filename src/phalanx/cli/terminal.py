"""Everything on stderr: errors, notes, log lines, loading progress.

Does not know what any command does.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from phalanx.errors import PhalanxError
from phalanx.supervision.client import EngineClient, EngineState

POLL_S = 0.1
PLAIN_STEP = 0.25  # without a terminal: one line per this share of a phase


def report(error: PhalanxError) -> None:
    """Print an error in red, and its remedy on a second line."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False)
    if error.remedy:
        console.print(f"  {escape(error.remedy)}", highlight=False)


def note(text: str) -> None:
    """Print a dim line for the user."""
    Console(stderr=True, soft_wrap=True).print(escape(text), style="dim", highlight=False)


def set_up_logging(level: str) -> None:
    """Log phalanx at `level`, other libraries from warnings on; with `debug`, everything."""
    verbose = level == "debug"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: verbose or record.name.startswith("phalanx") or record.levelno >= logging.WARNING)
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if verbose else logging.WARNING, force=True)
    logging.getLogger("phalanx").setLevel(level.upper())


class LoadingView:
    """Shows an engine's loading progress, from a thread of its own, until the engine serves or has failed.

    A bar on a terminal, a line now and then elsewhere. Reads only `EngineClient.state`, which is a snapshot.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading view", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar(console)
        else:
            self._lines()

    def _finished(self, state: EngineState) -> bool:
        return state.phase in ("ready", "failed", "stopped") or self._over.wait(POLL_S)

    def _bar(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            tasks: dict[str, TaskID] = {}
            while not self._finished(state := self._engine.state):
                if state.progress is not None:
                    phase, total = state.progress.phase, max(1, state.progress.total)
                    if phase not in tasks:
                        tasks[phase] = bar.add_task(phase, total=total)
                    bar.update(tasks[phase], completed=state.progress.done, total=total)

    def _lines(self) -> None:
        shown: tuple[str, int] | None = None
        while not self._finished(state := self._engine.state):
            if state.progress is None:
                continue
            share = state.progress.done / max(1, state.progress.total)
            reached = (state.progress.phase, int(share / PLAIN_STEP))
            if reached != shown:
                shown = reached
                print(f"{state.progress.phase}: {share:.0%}", file=sys.stderr, flush=True)
