"""The memory that bodies of requests may take together, and what one of them takes of it."""

from __future__ import annotations

from phalanx.errors import QueueFull
from phalanx.http.shares import Shares

RETRY_AFTER_S = 1.0  # a body of 8 MiB is parsed in a tenth of a second


class BodyLease:
    """The memory of one body; it has none yet. A context manager: leaving it frees the memory.

    Args:
        budget: bytes of all bodies, shared among owners.
        owner: stands for the API key of the request.
        refusal: what a client is told when there is no room.
        small: bytes up to which a body takes none of the budget.
    """

    def __init__(self, budget: Shares, owner: str, refusal: str, *, small: int = 0) -> None:
        self.n_bytes = 0
        self._budget = budget
        self._owner = owner
        self._refusal = refusal
        self._small = small

    def __enter__(self) -> BodyLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def grow(self, n_bytes: int) -> None:
        """The body has so many bytes now.

        Raises:
            QueueFull: there is no room for them.
        """
        if n_bytes <= max(self._small, self.n_bytes):
            return
        more = n_bytes - self.n_bytes
        if not self._budget.has_room(self._owner, more):
            raise QueueFull(self._refusal, retry_after=RETRY_AFTER_S)
        self._budget.take(self._owner, more)
        self.n_bytes = n_bytes

    def free(self) -> None:
        """Give the memory back. Calling it twice does nothing."""
        self._budget.give_back(self._owner, self.n_bytes)
        self.n_bytes = 0
