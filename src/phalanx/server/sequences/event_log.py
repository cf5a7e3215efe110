"""The last faults of the engine in plain words: what failed, why, what was done about it, what helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from phalanx.faults import recognise
from phalanx.types import Batch, ModelInfo

MAX_EVENTS = 50


class EngineEvent(Struct, kw_only=True):
    """One fault."""

    number: int
    at: float  # seconds since 1970
    down: float  # monotonic seconds
    what: str  # which machine and rank, and what of it
    cause: str = ""
    remedy: str = ""
    will_restart: bool
    gap_s: float | None = None  # until the engine served again


class EventLog:
    """Listens to the engine.

    Args:
        clock: monotonic seconds.
        now: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock = clock
        self._now = now
        self._events: deque[EngineEvent] = deque(maxlen=MAX_EVENTS)
        self._n = 0

    def on_down(self, reason: str, will_restart: bool) -> None:
        """The engine has ended."""
        fault = recognise(reason)
        self._n += 1
        self._events.append(
            EngineEvent(
                number=self._n,
                at=self._now(),
                down=self._clock(),
                what=reason,
                cause=fault.cause if fault is not None else "",
                remedy=fault.remedy if fault is not None else "",
                will_restart=will_restart,
            )
        )

    def on_ready(self, info: ModelInfo) -> None:
        """It serves again."""
        for event in self._events:
            if event.gap_s is None:
                event.gap_s = self._clock() - event.down

    def on_batch(self, batch: Batch) -> None:
        """Nothing to note."""

    def faults(self) -> list[tuple[str, float]]:
        """The text of each fault and its age in seconds, oldest first."""
        return [(event.what, self._clock() - event.down) for event in self._events]

    def shown(self, clean: Callable[[str], str]) -> dict[str, dict[str, Any]]:
        """The events by name, as the page shows them.

        Args:
            clean: takes out of a reason what a viewer may not see.
        """
        return {f"events/{event.number}": _shown(event, clean) for event in self._events}


def _shown(event: EngineEvent, clean: Callable[[str], str]) -> dict[str, Any]:
    if event.gap_s is not None:
        did = f"The ranks were started again and served after {event.gap_s:.1f} s; unfinished requests went on."
    elif event.will_restart:
        did = "The ranks are being started again; unfinished requests wait and go on."
    else:
        did = "The server ends."
    return {
        "at": round(event.at, 1),
        "what": clean(event.what),
        "cause": event.cause,
        "did": did,
        "remedy": event.remedy,
        "gap_seconds": None if event.gap_s is None else round(event.gap_s, 2),
    }
