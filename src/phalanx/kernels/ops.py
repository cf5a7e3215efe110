"""What the native operations are to whoever calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

Function = Callable[..., mx.array]


class Ops(Protocol):
    """The native operations: functions of arrays by name."""

    def __getattr__(self, name: str) -> Function: ...
