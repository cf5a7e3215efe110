"""Short limits for tests that play them out, and longer ones for where a busy machine missed them."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support.channels import FAST, connect

from phalanx.dist.channel import WatchdogLimits
from phalanx.errors import PeerMissing, PhalanxError

SHORT_S, LONG_S = 1.0, 10.0


def patiently(scenario: Callable[[float], None]) -> None:
    """Play a scenario with a limit of a second; where the machine missed that, with a limit that none misses."""
    try:
        scenario(SHORT_S)
    except (AssertionError, PhalanxError, OSError, queue.Empty, pytest.fail.Exception):
        scenario(LONG_S)


def strict(silence_s: float) -> WatchdogLimits:
    """Who is silent for so long counts as lost."""
    return replace(FAST, silence_s=silence_s)


def gives_up(words: str, control: str, **options: Any) -> None:
    """A rank cannot join there, and gives up with these words. `%s` among them is its limit in seconds."""

    def scenario(hello_s: float) -> None:
        with pytest.raises(PeerMissing) as found:
            connect(control, limits=replace(FAST, hello_s=hello_s), **options)
        assert re.search(words.replace("%s", f"{hello_s:g}"), str(found.value)), found.value

    patiently(scenario)
