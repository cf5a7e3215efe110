"""How much a test tries: less in `make test` than in `make soak`, which sets SOAK and runs what is marked `grows`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

SOAK = os.environ.get("SOAK") == "1"


def examples(usual: int, *, soak: int, **more: Any) -> Callable[[Any], Any]:
    """hypothesis's `settings` without a deadline; `make soak` runs the test as well, with more examples."""

    def decorate(test: Any) -> Any:
        chosen = settings(max_examples=soak if SOAK else usual, deadline=None, **more)
        return pytest.mark.grows(chosen(test))

    return decorate
