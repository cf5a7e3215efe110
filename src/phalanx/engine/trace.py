"""A trace of one engine: every message from the server and every plan, as lines of JSON (design: Proof).

With the same model, messages and steps in the same order give the same run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

import msgspec

from phalanx.errors import ConfigError
from phalanx.sched.plan import Plan
from phalanx.types import ToEngine

log = logging.getLogger("phalanx.engine")


class Trace:
    """Appends to a file, unbuffered, so that a crash loses no line. A full disk ends the trace, not the engine."""

    def __init__(self, path: str) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self._file: IO[bytes] | None = Path(path).open("ab", buffering=0)  # noqa: SIM115 (open for the process's life)
        except OSError as error:
            raise ConfigError(
                f"--trace {path} cannot be written: {error.strerror}.", remedy="Name a file that this user may write."
            ) from error
        self._encoder = msgspec.json.Encoder()

    def message(self, message: ToEngine) -> None:
        """Write a message that the leader has taken from the server."""
        self._line({"message": message})

    def plan(self, plan: Plan) -> None:
        """Write a plan that the leader is about to broadcast."""
        self._line({"plan": plan})

    def _line(self, value: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(value) + b"\n")
        except OSError as error:
            log.error("--trace %s ends here: %s", self._file.name, error.strerror)
            self._file.close()
            self._file = None
