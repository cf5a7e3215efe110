"""Writes to the terminal: errors, notes, log lines and loading progress on stderr, a model's text on stdout."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO

import msgspec

from phalanx.catalog.pull_progress import ASKING, PullProgress
from phalanx.environment import environment
from phalanx.errors import PhalanxError
from phalanx.log_limits import CountingHandler
from phalanx.supervision.client import EngineClient, EngineState, LoadProgress
from phalanx.text.printable import LineFormatter, as_entry, printable
from phalanx.text.word_wrap import fitted

BOLD_RED, DIM = "1;31", "2"
POLL_S = 0.1  # between two looks at what is loaded
PLAIN_STEP = 0.25  # without a terminal: one line per this share of a phase


def report(error: PhalanxError) -> None:
    """Print an error in red, and its remedy on a second line."""
    text = fitted(f"error: {as_entry(error.message)}", sys.stderr)
    print(text.replace("error:", _styled("error:", BOLD_RED), 1), file=sys.stderr)
    if error.remedy:
        print(fitted(f"  {as_entry(error.remedy)}", sys.stderr), file=sys.stderr)


def note(text: str) -> None:
    """Print a dim line for the user."""
    print(_styled(fitted(printable(text), sys.stderr), DIM), file=sys.stderr)


def show(text: str) -> None:
    """Print a piece of a model's text on stdout. A terminal gets it without control characters, a file as it is."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def show_dim(text: str) -> None:
    """As `show`, dimmed: for reasoning and other text beside the answer."""
    print(_styled(printable(text), DIM, sys.stdout) if sys.stdout.isatty() else text, end="", flush=True)


def show_json(value: object) -> None:
    """Print a value for programs, as JSON of several lines."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def _styled(text: str, style: str, file: TextIO | None = None) -> str:
    """The text in a style; unchanged if the file (stderr) is not a terminal, or the user wants no colours."""
    file = file or sys.stderr
    plain = not file.isatty() or is_dumb() or environment().get("NO_COLOR")
    return text if plain else f"\033[{style}m{text}\033[0m"


def is_dumb() -> bool:
    """Whether the terminal only prints: it has no colours, and nothing can be drawn over."""
    return environment().get("TERM") in ("dumb", "unknown")


def set_up_logging(level: str) -> None:
    """Log phalanx at `level`, other libraries from warnings on; with `debug`, everything. Repeats are counted."""
    verbose = level == "debug"
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: verbose or record.name.startswith("phalanx") or record.levelno >= logging.WARNING)
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if verbose else logging.WARNING, force=True)
    logging.getLogger("phalanx").setLevel(level.upper())
    logging.captureWarnings(True)  # of libraries, which may quote a model's files


class LoadingView:
    """Shows an engine's loading progress, from a thread of its own, until the engine serves or has failed.

    A bar on a terminal that can draw one, a line now and then elsewhere. Reads only `EngineClient.state`, a snapshot.
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
        if sys.stderr.isatty() and not is_dumb():
            self._bar()
        else:
            self._lines()

    def _finished(self, state: EngineState) -> bool:
        return state.phase in ("ready", "failed", "stopped") or self._over.wait(POLL_S)

    def _bar(self) -> None:
        while self._engine.state.progress is None:
            if self._finished(self._engine.state):
                return
        with importlib.import_module("phalanx.cli.loading_bar").LoadingBar() as bar:
            while not self._finished(state := self._engine.state):
                if state.progress is not None:
                    bar.show(state.progress)

    def _lines(self) -> None:
        show_line = plain_lines()
        while not self._finished(self._engine.state):
            progress = self._engine.state.progress  # not what it was before the pause
            if progress is not None and progress.done >= PLAIN_STEP * progress.total:  # short phases print nothing
                show_line(progress)


def plain_lines() -> Callable[[LoadProgress], None]:
    """A function that prints progress, one line for each `PLAIN_STEP` of a phase."""
    shown: tuple[str, int] | None = None

    def show_line(progress: LoadProgress) -> None:
        nonlocal shown
        share = progress.done / max(1, progress.total)
        reached = (progress.phase, int(share / PLAIN_STEP))
        if reached != shown:
            shown = reached
            print(f"{progress.phase}: {share:.0%}", file=sys.stderr, flush=True)

    return show_line


class PullView:
    """Shows how far a download is until the context is left, as `LoadingView`."""

    def __init__(self) -> None:
        self._end = ExitStack()
        self._show: Callable[[LoadProgress], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.close()

    def __call__(self, progress: PullProgress) -> None:
        """Show one line of a pull, except that the hub is asked: every start does that."""
        if progress.completed is None:
            if progress.status != ASKING:
                note(progress.status)
            return
        if self._show is None:
            self._show = self._view()
        self._show(LoadProgress(progress.status, progress.completed, progress.total))

    def _view(self) -> Callable[[LoadProgress], None]:
        if not sys.stderr.isatty() or is_dumb():
            return plain_lines()
        show: Callable[[LoadProgress], None] = self._end.enter_context(
            importlib.import_module("phalanx.cli.loading_bar").LoadingBar()
        ).show
        return show
