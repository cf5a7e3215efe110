"""Memory of request bodies: one body's lease of the quota that all bodies share."""

from __future__ import annotations

from phalanx.errors import QueueFull
from phalanx.http.fair_quota import FairQuota

RETRY_AFTER_S = 1.0  # a body of 8 MiB is parsed in a tenth of a second


class BodyLease:
    """The memory of one body, at first none. A context manager that frees it at the end.

    Args:
        budget: bytes of all bodies.
        owner: of the request's API key.
        refusal: text of the error when there is no room.
        small: bytes up to which a body takes nothing of the budget.
    """

    def __init__(self, budget: FairQuota, owner: str, refusal: str, *, small: int = 0) -> None:
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
        """Grow the lease to so many bytes.

        Raises:
            QueueFull: there is no room.
        """
        if n_bytes <= max(self._small, self.n_bytes):
            return
        more = n_bytes - self.n_bytes
        if not self._budget.has_room(self._owner, more):
            raise QueueFull(self._refusal, retry_after=RETRY_AFTER_S)
        self._budget.take(self._owner, more)
        self.n_bytes = n_bytes

    def free(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        self._budget.give_back(self._owner, self.n_bytes)
        self.n_bytes = 0
