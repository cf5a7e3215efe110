"""Sends events to the server while the device computes, unless that would delay them.

A message wakes the server process, which then takes a processor. On a machine whose processors compute the model, every
token would pay for that. So the outbox holds a step's events until the device computes the next step, when the leader
only waits. It sends them earlier where the next step would hold them up: a draft model computes first, or the step
blocks (row operations, a prompt's chunk, all-reduces). It sends them at once where no step follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.types import Batch, Finished, FromEngine, PromptScored, Tokens


class EventSink(Protocol):
    """The part of `ServerSocket` that the outbox uses."""

    def send(self, message: FromEngine) -> None: ...


class EventOutbox:
    """Holds events, in order, until the leader reports a moment of the step at which they can be sent."""

    def __init__(self, server_socket: EventSink) -> None:
        self._server_socket = server_socket
        self._unsent: list[Batch] = []

    def add(self, step_id: int, events: Sequence[Tokens | Finished | PromptScored]) -> None:
        """Hold the events of a step."""
        if events:
            self._unsent.append(Batch(step_id, [*events]))

    def before_draft(self, *, computes: bool) -> None:
        """The leader is about to draft. `computes`: a draft model runs, which would delay the events."""
        if computes:
            self.flush()

    def before_execute(self, *, blocks: bool) -> None:
        """The leader is about to execute a step. `blocks`: it waits for the device, which would delay the events."""
        if blocks:
            self.flush()

    def while_computing(self) -> None:
        """The device computes a step, and the leader has nothing to do."""
        self.flush()

    def after_step(self, *, idle: bool) -> None:
        """A step is over. `idle`: no step follows."""
        if idle:
            self.flush()

    def flush(self) -> None:
        """Send everything now."""
        for batch in self._unsent:
            self._server_socket.send(batch)
        self._unsent.clear()
