"""Says in the log that keys or certificates are refused: at most one line in ten seconds, which counts the others.

Does not slow down anything: with a long key there is nothing to guess, and a lock would be a weapon against its owner.
"""

from __future__ import annotations

import logging
import math

log = logging.getLogger(__name__)

INTERVAL_S = 10.0  # between two lines


class RefusedKeys:
    """The refused requests of one kind.

    Args:
        what: was refused, as the beginning of a sentence: "A wrong admin key".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._unsaid = 0
        self._said_at = -math.inf

    def note(self, address: str, now: float, why: str = "") -> None:
        """A request or connection from this address was refused.

        Args:
            now: monotonic seconds.
            why: empty if `what` says it.
        """
        if now - self._said_at < INTERVAL_S:
            self._unsaid += 1
            return
        more = f", and {self._unsaid} more since the last such line" if self._unsaid else ""
        log.warning("%s came from %s%s%s", self._what, address, why and f": {why}", more)
        self._unsaid, self._said_at = 0, now
