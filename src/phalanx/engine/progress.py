"""Reports the progress of a start: from rank 0 to the server, from the other ranks to the log."""

from __future__ import annotations

import logging
import time

from phalanx.config import GIB
from phalanx.engine.server_socket import ServerSocket
from phalanx.model.loading import load
from phalanx.types import Loading

log = logging.getLogger("phalanx.engine")

SERVER_PERIOD_S = 0.2  # between two reports to the server: a bar that moves
LOG_PERIOD_S = 5.0  # between two lines of the log


def reporter(server_socket: ServerSocket | None) -> load.Progress:
    """A function that reports progress, at most once a period; to the server also each beginning and end.

    Args:
        server_socket: None on ranks that the server does not see.
    """
    period_s = LOG_PERIOD_S if server_socket is None else SERVER_PERIOD_S
    last = time.monotonic()

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        is_due = now - last >= period_s
        if server_socket is not None and (is_due or done == 0 or done >= total):
            last = now
            server_socket.send(Loading(phase=phase, done=done, total=total))
        elif server_socket is None and is_due:
            last = now
            log.info("%s: %.2f of %.2f GiB", phase, done / GIB, total / GIB)

    return report
