"""The seam between the server process and the engine.

The server process sends messages through an `EngineClient`, receives events on the event loop's thread, and reads the
engine's state. `supervision/process.py` and `supervision/attach.py` implement it over rank processes,
`supervision/fake_engine.py` in this process, for tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from phalanx.errors import ExitCode
from phalanx.types import Batch, EngineStats, ModelInfo, ToEngine

Phase = Literal["starting", "loading", "ready", "restarting", "failed", "stopped"]


class LoadProgress(Struct, frozen=True):
    """Progress of loading: `done` of `total` bytes of the named phase."""

    phase: str
    done: int
    total: int


class EngineState(Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's state."""

    phase: Phase = "starting"
    reason: str = ""  # why it is not ready; empty when it is
    down_since: float | None = None  # seconds since the epoch, while it is not ready
    restarts: int = 0
    progress: LoadProgress | None = None  # while starting, loading or restarting
    last_pong_age_s: float | None = None  # since the engine's own loop last answered; None before the first answer
    exit_code: ExitCode | None = None  # with "failed": what the server process should exit with


class EngineListener(Protocol):
    """Receives an engine's events. All methods are called on the event loop's thread and must not block."""

    def on_batch(self, batch: Batch) -> None:
        """All sequence events of one step, in commit order."""

    def on_ready(self, info: ModelInfo) -> None:
        """The engine serves and knows no sequence: after a restart, the listener submits unfinished ones again."""

    def on_down(self, reason: str, will_restart: bool) -> None:
        """The engine is gone and has forgotten every sequence."""


class EngineClient(ABC):
    """One engine, as the server sees it."""

    def __init__(self) -> None:
        self._listeners: list[EngineListener] = []
        self.when_lost: list[Callable[[], None]] = []
        """Called as soon as an engine that served computes no more; `on_down` follows once it is known why."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo | None:
        """The loaded model; None until the engine was ready once."""

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """A snapshot, cheap enough to take per request."""

    async def launch(self) -> None:
        """Begin to load before `start`, while the caller does other work. Optional; does nothing by default.

        Listeners get no event before `start`.

        Raises:
            PhalanxError: it cannot be started, and starting it again would not help.
        """
        return

    @abstractmethod
    async def start(self) -> None:
        """Start the engine. May return before it is ready; listeners then get `on_ready` or `on_down`.

        Raises:
            PhalanxError: it cannot be started, and starting it again would not help.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the engine; afterwards the state is "stopped". Safe to call twice and before `start`."""

    @abstractmethod
    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine; never blocks.

        Raises:
            EngineUnavailable: the engine is not ready; the message says why.
        """

    @abstractmethod
    async def ping(self) -> EngineStats:
        """The engine's counters. Its step loop answers, so an answer shows that the loop advances.

        Raises:
            EngineUnavailable: the engine is not ready, or went down before it answered.
        """

    def subscribe(self, listener: EngineListener) -> None:
        """Send all further events to `listener`, after the listeners that subscribed before it."""
        self._listeners.append(listener)

    def emit_batch(self, batch: Batch) -> None:
        """For implementations: send a batch to all listeners."""
        for listener in self._listeners:
            listener.on_batch(batch)

    def emit_ready(self, info: ModelInfo) -> None:
        """For implementations: report that the engine serves. `state` must be "ready" already: listeners submit."""
        for listener in self._listeners:
            listener.on_ready(info)

    def emit_down(self, reason: str, *, will_restart: bool) -> None:
        """For implementations: report that the engine is gone. `state` must not be "ready" any more."""
        for listener in self._listeners:
            listener.on_down(reason, will_restart)
