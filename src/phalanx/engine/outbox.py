"""Sends events to the server while the device computes, unless that would delay them.

A message wakes the server process, which then takes a processor. On a machine whose processors compute the model, every
token would pay for that. So the outbox holds a step's events until the device computes the next step, when the leader
only waits. It sends them earlier where the next step would hold them up: a draft model computes first, or the step
blocks (row operations, a prompt's chunk, sums over ranks). It sends them at once where no step follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.types import Batch, Finished, FromEngine, PromptScored, Tokens


class Sends(Protocol):
    """The part of `ServerSocket` that is needed here."""

    def send(self, message: FromEngine) -> None: ...


class EventOutbox:
    """Holds events, in order, and sends them at one of the moments of a step. The leader names the moments."""

    def __init__(self, server_socket: Sends) -> None:
        self._server_socket = server_socket
        self._unsent: list[Batch] = []

    def add(self, step_id: int, events: Sequence[Tokens | Finished | PromptScored]) -> None:
        """Hold the events of a step."""
        if events:
            self._unsent.append(Batch(step_id, [*events]))

    def before_draft(self, *, computes: bool) -> None:
        """The leader is about to draft. `computes`: with a model, which would hold the events up."""
        if computes:
            self.flush()

    def before_execute(self, *, blocks: bool) -> None:
        """The leader is about to execute a step. `blocks`: for the device, which would hold the events up."""
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
