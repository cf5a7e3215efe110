"""Request ids: which of a client's own are repeated in answers and logs."""

from __future__ import annotations

import re
from collections.abc import Callable

REQUEST_ID = "x-request-id"
SANE = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}")
"""What of a client's own id is repeated: nothing that could be taken for markup or for another line of a log."""


def request_id(given: str, new: Callable[[], str]) -> str:
    """The id of a request: the client's own, if it is sane, else a new one.

    Args:
        new: makes 32 hexadecimal digits.
    """
    return given if SANE.fullmatch(given) else f"req_{new()}"
