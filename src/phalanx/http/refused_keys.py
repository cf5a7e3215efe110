"""Logs that keys or certificates are refused: at most one line in ten seconds, which counts the others.

It slows nothing down: a long key cannot be guessed, and a lock would be a weapon against its owner.
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
        self._n_unlogged = 0
        self._logged_at = -math.inf

    def note(self, address: str, now: float, why: str = "") -> None:
        """Note that a request or connection from this address was refused.

        Args:
            now: monotonic seconds.
            why: empty if `what` says it all.
        """
        if now - self._logged_at < INTERVAL_S:
            self._n_unlogged += 1
            return
        more = f", and {self._n_unlogged} more since the last such line" if self._n_unlogged else ""
        log.warning("%s came from %s%s%s", self._what, address, why and f": {why}", more)
        self._n_unlogged, self._logged_at = 0, now
